"""Going through all tars of a data set: in processes on this machine, in threads where each request is a round trip."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from saev_store.errors import SaevStoreError
from saev_store.formats.energon import _worker
from saev_store.formats.energon._receipts import scan_shard
from saev_store.transport import MmapTransport, PreadTransport, Transport

#: Below this, starting processes takes longer than they save.
_WORTH_WORKERS_S = 1.5
MAX_WORKERS = 64


def scan_all(
    transport: Transport, shards: Sequence[tuple[str, int]], *, num_workers: int | None, done: Callable[[int], None]
) -> list[SaevStoreError]:
    """Go through shards, (path, nbytes) each; all are tried even if some are damaged.

    Args:
        transport: The data set's folder.
        shards: What to go through.
        num_workers: How many at once; None: as many as the machine has processors, and as the work is worth.
        done: Called with the size of each tar when it is finished.
    """
    sizes = dict(shards)
    errors: list[SaevStoreError] = []
    todo = list(sizes)

    def one(shard: str) -> None:
        try:
            scan_shard(transport, shard)
        except SaevStoreError as error:
            errors.append(error)
        done(sizes[shard])

    if not isinstance(transport, MmapTransport | PreadTransport):
        far = not getattr(transport, "is_local", False)
        with ThreadPoolExecutor(min(num_workers or (16 if far else 1), MAX_WORKERS, max(1, len(todo)))) as pool:
            list(pool.map(one, todo))
        return errors
    if num_workers is None:
        # Tars differ more than machines do: the first ones tell what the rest takes.
        started, begun = time.perf_counter(), 0
        while todo and (time.perf_counter() - started) * len(todo) < _WORTH_WORKERS_S * max(1, begun):
            one(todo.pop(0))
            begun += 1
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = min(num_workers, MAX_WORKERS, len(todo))
    if num_workers <= 1:
        for shard in todo:
            one(shard)
        return errors
    for shard, error in _in_processes(transport.url, todo, num_workers):
        if error is not None:
            errors.append(error)
        done(sizes[shard])
    return errors


def _in_processes(root: str, shards: list[str], num_workers: int) -> Iterator[tuple[str, SaevStoreError | None]]:
    """Each shard once it is finished; a worker takes the next when it has done one."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for shard in shards:
        waiting.put(shard)
    finished: queue.SimpleQueue[tuple[str, SaevStoreError | None]] = queue.SimpleQueue()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", _worker.__name__, root]
    with ExitStack() as stack:
        for _ in range(num_workers):
            process = stack.enter_context(
                subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
                )
            )
            stack.callback(process.kill)
            threading.Thread(target=_feed, args=(process, waiting, finished), daemon=True).start()
        for _ in shards:
            yield finished.get()


def _feed(
    process: subprocess.Popen[str],
    waiting: queue.SimpleQueue[str],
    finished: queue.SimpleQueue[tuple[str, SaevStoreError | None]],
) -> None:
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018, S101 - both were asked for
    while True:
        try:
            shard = waiting.get_nowait()
        except queue.Empty:
            return
        error: SaevStoreError | None = None
        try:
            process.stdin.write(json.dumps(shard) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if "error" in answer:
                error = _worker.rebuild(answer["error"])
        except (OSError, ValueError):
            error = SaevStoreError(
                "the process that went through it ended", where=shard, remedy="Prepare again: it goes on."
            )
        finished.put((shard, error))
