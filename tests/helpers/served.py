"""A server of a store in a process of its own, as `saev-store serve` starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL, and the process, which is ended with Ctrl-C."""
    command = [sys.executable, "-m", "saev_store", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(process.communicate(timeout=HANG_S)[1])
        yield url, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_S)
