"""Copies in processes of their own that are killed at chosen moments."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def killed_copies(command: Sequence[str], folder: Path, *, n_receipts: Sequence[int]) -> Iterator[int]:
    """Run a copy into `folder` several times; each is killed when there are so many receipts, the first shard for 0.

    Gives each number after that kill. At least one process is killed before it ends by itself, and none says anything.
    """
    n_killed = 0
    for n in n_receipts:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        begun = ".saev_store/receipts/*.json" if n else "acts*.bin"
        while process.poll() is None and len(list(folder.glob(begun))) < max(n, 1):
            time.sleep(0.001)
        process.kill()
        _, err = process.communicate()
        assert err == b""
        n_killed += process.returncode == -signal.SIGKILL
        yield n
    assert n_killed
