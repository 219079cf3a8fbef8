"""Going through all tars of a data set: in processes on this machine, in threads where each request is a round trip."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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
        far = not transport.is_local
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
    workers = [_Worker(root) for _ in range(num_workers)]
    try:
        for worker in workers:
            threading.Thread(target=worker.work, args=(waiting, finished), daemon=True).start()
        for _ in shards:
            yield finished.get()
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process, and the thread of ours that talks to it; one that dies costs the tar it was at, and is replaced."""

    def __init__(self, root: str) -> None:
        self._command = [sys.executable, "-m", _worker.__name__, root]
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def work(
        self, waiting: queue.SimpleQueue[str], finished: queue.SimpleQueue[tuple[str, SaevStoreError | None]]
    ) -> None:
        while not self._stopped:
            try:
                shard = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                error = self._ask(shard)
            except (OSError, ValueError):
                self._end()
                error = SaevStoreError(
                    "the process that went through it ended", where=shard, remedy="Prepare again: it goes on."
                )
            finished.put((shard, error))
        self._end()

    def _ask(self, shard: str) -> SaevStoreError | None:
        with self._lock:
            if self._process is None and not self._stopped:
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
                # A group of its own: Ctrl-C is for us, and we end it.
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                    process_group=0,
                )
            process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise OSError("stopped")
        process.stdin.write(json.dumps(shard) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        return _worker.rebuild(answer["error"]) if "error" in answer else None

    def stop(self) -> None:
        """End the process, whatever it is at; the thread notices."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what was not sent to a dead process
                process.__exit__(None, None, None)
