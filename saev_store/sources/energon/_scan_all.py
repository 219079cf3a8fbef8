"""Scans all tars of a data set in parallel: in processes on this machine, in threads where each request is a round trip.

Run as a program, this module is such a process: it reads names of tars from standard input and writes one JSON line for each
tar to standard output. A program does not import the caller's main module again, as a pool of processes does, and does not
copy its threads and clients, as a fork does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import IO, cast

from saev_store._runtime.threads import ahead
from saev_store.errors import SaevStoreError
from saev_store.sources.energon.tar_scan import SampleRow, ScannedShard, scan_shard
from saev_store.transport import MmapTransport, PreadTransport, Transport, open_transport

#: Below this, starting processes costs more time than it saves.
_WORTH_WORKERS_S = 1.5
MAX_WORKERS = 64


def scan_all(
    transport: Transport, shards: Sequence[str], *, num_workers: int | None
) -> Iterator[ScannedShard | SaevStoreError]:
    """Scan shards in parallel; the results, in the order of the shards, are an error for a damaged shard.

    Args:
        transport: The data set's folder.
        shards: Paths of the tars.
        num_workers: Number of processes or threads; None: as many as there are processors, and as the work is worth.
    """
    todo = list(shards)
    if not isinstance(transport, MmapTransport | PreadTransport):
        remote = not transport.is_local
        n_threads = min(num_workers or (16 if remote else 1), MAX_WORKERS, max(1, len(todo)))
        yield from ahead(partial(_scan_one, transport), todo, n_threads)
        return
    if num_workers is None:
        # The first tars tell how long the rest takes.
        started, n_done = time.perf_counter(), 0
        while todo and (time.perf_counter() - started) * len(todo) < _WORTH_WORKERS_S * max(1, n_done):
            yield _scan_one(transport, todo.pop(0))
            n_done += 1
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = min(num_workers, MAX_WORKERS, len(todo))
    with contextlib.closing(_in_processes(transport.url, todo if num_workers > 1 else [], num_workers)) as answers:
        for shard in todo:
            # A process gives no answer for a damaged tar, and none after it was killed: the tar is scanned here.
            yield next(answers, None) or _scan_one(transport, shard)


def _scan_one(transport: Transport, shard: str) -> ScannedShard | SaevStoreError:
    try:
        return scan_shard(transport, shard)
    except SaevStoreError as error:
        return error


def _in_processes(root: str, shards: list[str], num_workers: int) -> Generator[ScannedShard | None]:
    """Process i of n scans every n-th shard from shard i on; answers are read in the order of the shards."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    workers: list[subprocess.Popen[str]] = []
    try:
        for _ in range(min(num_workers, len(shards))):
            # A process group of its own: Ctrl-C reaches the parent, which ends the workers.
            try:
                worker = subprocess.Popen(  # noqa: S603 - this interpreter and this module
                    [sys.executable, "-m", __name__, root],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, process_group=0,
                )  # fmt: skip
            except OSError:  # no more processes: those that there are do the work
                break
            workers.append(worker)
        for i, worker in enumerate(workers):
            with contextlib.suppress(OSError):  # a process that died gives no answers
                stdin = cast("IO[str]", worker.stdin)
                stdin.write(json.dumps(shards[i :: len(workers)]) + "\n")
                stdin.flush()
        if not workers:
            return
        for i in range(len(shards)):
            line = cast("IO[str]", workers[i % len(workers)].stdout).readline()
            answer = json.loads(line) if line.endswith("\n") else None
            if answer is None:
                yield None
                continue
            shard, nbytes, end, oddities, samples = cast("tuple[str, int, int, list[str], list[SampleRow]]", answer)
            yield ScannedShard(shard, nbytes, end, tuple(oddities), samples)
    finally:
        for worker in workers:
            worker.kill()
            with contextlib.suppress(OSError):  # what was not sent to a process that died
                worker.__exit__(None, None, None)


def main(root: str) -> None:
    """Scan the tars below `root` that the first line of standard input lists."""
    transport = open_transport(root)
    line = sys.stdin.readline()
    for shard in json.loads(line) if line.endswith("\n") else ():  # else the parent was killed
        found = _scan_one(transport, shard)
        try:
            sys.stdout.write(json.dumps(dataclasses.astuple(found) if isinstance(found, ScannedShard) else None) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # the parent was killed
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
