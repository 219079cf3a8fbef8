"""Children that the scripts which kill writers start, and what they leave on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

#: A kill leaves memory and disk alike (a power cut does not), and memory does not wait for fsync: most kills happen there.
MEMORY = "/dev/shm"


def harness_result(
    script: str, where: Literal["memory", "disk"], n_kills: int, *, tmp_path: Path, limit_s: int
) -> dict:
    """What a script of this folder prints after that many kills (`SAEV_STORE_KILLS` of them, where that is set)."""
    n_kills = int(os.environ.get("SAEV_STORE_KILLS", n_kills))
    parent = MEMORY if where == "memory" and os.access(MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        done = subprocess.run(
            [sys.executable, Path(__file__).parent / script, folder, "--kills", str(n_kills)],
            capture_output=True,
            text=True,
            timeout=limit_s + n_kills,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"n_asked": n_kills}


def in_child(work: Callable[[], None], *, on_warning: Literal["error", "ignore"] = "error") -> int:
    """The process that carries out `work`; its exit status says whether that went well."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warnings.simplefilter(on_warning)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def killed(pid: int) -> int:
    """Kill a child; its exit code, which is not -9 if it had ended before."""
    os.kill(pid, signal.SIGKILL)
    return ended(pid)


def ended(pid: int) -> int:
    """The exit code of a child, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
