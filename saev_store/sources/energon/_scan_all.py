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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from saev_store.errors import SaevStoreError
from saev_store.sources.energon import _worker
from saev_store.sources.energon.tar_scan import ScannedShard, scan_shard
from saev_store.transport import MmapTransport, PreadTransport, Transport

#: Below this, starting processes takes longer than they save.
_WORTH_WORKERS_S = 1.5
MAX_WORKERS = 64


def scan_all(
    transport: Transport, shards: Sequence[str], *, num_workers: int | None
) -> Iterator[ScannedShard | SaevStoreError]:
    """Scan shards in parallel and give the results in the order of the shards; a damaged one gives its error.

    Args:
        transport: The data set's folder.
        shards: Paths of the tars.
        num_workers: How many at once; None: as many as the machine has processors, and as the work is worth.
    """
    todo = list(shards)
    if not isinstance(transport, MmapTransport | PreadTransport):
        remote = not transport.is_local
        n_threads = min(num_workers or (16 if remote else 1), MAX_WORKERS, max(1, len(todo)))
        with ThreadPoolExecutor(n_threads) as pool:
            yield from pool.map(lambda shard: _scan_one(transport, shard), todo)
        return
    if num_workers is None:
        # Tars differ more than machines do: the first ones tell how long the rest takes.
        started, n_done = time.perf_counter(), 0
        while todo and (time.perf_counter() - started) * len(todo) < _WORTH_WORKERS_S * max(1, n_done):
            yield _scan_one(transport, todo.pop(0))
            n_done += 1
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = min(num_workers, MAX_WORKERS, len(todo))
    if num_workers <= 1:
        yield from (_scan_one(transport, shard) for shard in todo)
        return
    yield from _in_processes(transport.url, todo, num_workers)


def _scan_one(transport: Transport, shard: str) -> ScannedShard | SaevStoreError:
    try:
        return scan_shard(transport, shard)
    except SaevStoreError as error:
        return error


def _in_processes(root: str, shards: list[str], num_workers: int) -> Iterator[ScannedShard | SaevStoreError]:
    """Each worker takes the next shard when it has done one."""
    workers = [_Worker(root) for _ in range(num_workers)]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def scan(shard: str) -> ScannedShard | SaevStoreError:
        worker = idle.get()
        try:
            return worker.scan(shard)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(num_workers)
    try:
        yield from pool.map(scan, shards)
    finally:
        for worker in workers:
            worker.stop()
        pool.shutdown(cancel_futures=True)


class _Worker:
    """A process that scans tars, one at a time; one that dies costs its tar, and is started again."""

    def __init__(self, root: str) -> None:
        self._command = [sys.executable, "-m", _worker.__name__, root]
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def scan(self, shard: str) -> ScannedShard | SaevStoreError:
        try:
            return self._ask(shard)
        except (OSError, ValueError):
            self._end()
            return SaevStoreError("the process that read it ended", where=shard, remedy="Prepare again.")

    def _ask(self, shard: str) -> ScannedShard | SaevStoreError:
        with self._lock:
            if self._process is None and not self._stopped:
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
                # A process group of its own: Ctrl-C reaches the parent, which ends the workers.
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
        return _worker.result_of(process.stdout.readline())

    def stop(self) -> None:
        """End the process, whatever it does; a thread that waits for it gets an error."""
        with self._lock:
            self._stopped = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what was not sent to a dead process
                process.__exit__(None, None, None)
