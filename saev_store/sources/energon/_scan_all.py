"""Scans all tars of a data set: in processes on this machine, in threads where each request is a round trip."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO

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
            yield from pool.map(partial(_scan_one, transport), todo)
        return
    if num_workers is None:
        # The first tars tell how long the rest takes.
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
    """Process i scans every `num_workers`-th shard from shard i on; answers are read in the order of the shards."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    workers: list[subprocess.Popen[str]] = []
    try:
        for i in range(num_workers):
            # A process group of its own: Ctrl-C reaches the parent, which ends the workers.
            worker = subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
                [sys.executable, "-m", _worker.__name__, root],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, process_group=0,
            )  # fmt: skip
            workers.append(worker)
            with contextlib.suppress(OSError):  # a process that died gives no answers
                _pipe(worker.stdin).write(json.dumps(shards[i::num_workers]) + "\n")
                _pipe(worker.stdin).flush()
        for i, shard in enumerate(shards):
            try:
                yield _worker.result_of(_pipe(workers[i % num_workers].stdout).readline())
            except ValueError:
                yield SaevStoreError("the process that read it ended", where=shard, remedy="Prepare again.")
    finally:
        for worker in workers:
            worker.kill()
            with contextlib.suppress(OSError):  # what was not sent to a process that died
                worker.__exit__(None, None, None)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # noqa: S101 - every stream is opened as a pipe above; for the type checker
    return stream
