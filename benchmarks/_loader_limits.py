"""What this machine can do at most with the bytes that the loaders bring: memory, `preadv`, fio, one thread or many."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import threading
import time

import numpy as np
from _loader_peers import BATCH, CONTENT, D_MODEL, LAYER, LAYERS, TOKENS, VECTOR

from saev_store import ShardStore

#: Reads in flight where the disk is asked; what the loaders do on flash.
DEPTH = 16


class Plane:
    """The extents of one layer's content in a random order, and memory for some of them."""

    def __init__(self, store: ShardStore) -> None:
        layout = store.layout
        self.n, self.nbytes = layout.n_examples, CONTENT * VECTOR
        self.paths = [os.path.join(store.url, f"acts{i:06d}.bin") for i in range(layout.n_shards)]
        self.fds = [os.open(path, os.O_RDONLY) for path in self.paths]
        self.shard, within = np.divmod(np.random.default_rng(3).permutation(self.n), layout.examples_per_shard)
        self.start = ((within * len(LAYERS) + LAYERS.index(LAYER)) * TOKENS + 1) * VECTOR
        self.n_slots = min(self.n, (256 << 20) // self.nbytes)
        self.pool = np.zeros((self.n_slots * CONTENT, D_MODEL), np.float32)
        self.raw = memoryview(self.pool).cast("B")
        self.out = np.zeros((BATCH, D_MODEL), np.float32)
        self.log = os.path.join(os.path.dirname(store.url.rstrip("/")), "extents.fio")
        with open(self.log, "w", encoding="utf-8") as file:
            file.write("fio version 2 iolog\n")
            file.writelines(f"{path} add\n{path} open\n" for path in self.paths)
            places = zip(self.shard, self.start, strict=True)
            file.writelines(f"{self.paths[shard]} read {start} {self.nbytes}\n" for shard, start in places)
            file.writelines(f"{path} close\n" for path in self.paths)

    def preadv(self, n_threads: int = 1) -> float:
        """MB/s of reading all extents into memory that is already there."""

        def some(first: int) -> None:
            for i in range(first, self.n, n_threads):
                at = i % self.n_slots * self.nbytes
                os.preadv(self.fds[self.shard[i]], [self.raw[at : at + self.nbytes]], int(self.start[i]))

        threads = [threading.Thread(target=some, args=(first,)) for first in range(n_threads)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.n * self.nbytes / 1e6 / (time.perf_counter() - started)

    def random_preadv(self) -> float:
        """The same by many threads, with the kernel told not to read ahead: as the loaders do."""
        for fd in self.fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return self.preadv(DEPTH)

    def gather(self) -> float:
        """MB/s of `np.take` into memory that is already there, one thread."""
        rows = np.random.default_rng(0).integers(0, len(self.pool), (8, BATCH))
        started = time.perf_counter()
        for some in rows:
            np.take(self.pool, some, axis=0, out=self.out, mode="clip")
        return rows.size * VECTOR / 1e6 / (time.perf_counter() - started)

    def first_touch(self) -> float:
        """MB/s of the system giving memory that this process has not had before: what a window and batches are made of."""
        memory = mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        started = time.perf_counter()
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
        return len(memory) / 1e6 / (time.perf_counter() - started)

    def memcpy(self) -> float:
        """MB/s of copying one large array to another."""
        half = len(self.pool) // 2
        started = time.perf_counter()
        for _ in range(4):
            np.copyto(self.pool[:half], self.pool[half : 2 * half])
        return 4 * half * VECTOR / 1e6 / (time.perf_counter() - started)

    def fio(self, *, direct: bool) -> float:
        """MB/s of fio over the same extents in the same order, `DEPTH` at a time; `direct` passes the page cache by."""
        command = [
            "fio",
            "--name=x",
            f"--read_iolog={self.log}",
            f"--iodepth={DEPTH if direct else 1}",
            "--invalidate=0",
        ]
        command += ["--output-format=json", f"--direct={int(direct)}", f"--ioengine={'libaio' if direct else 'psync'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"] / 1e6
