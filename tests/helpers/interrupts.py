"""Raises KeyboardInterrupt at each place of a call where the interpreter can, and uses again what was interrupted.

A program, because a lock that stays locked would end no test; see test_interrupts.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from waiting import soon

from saev_store import ShardStore
from saev_store._runtime.threads import Flag, ahead, share
from saev_store.loaders import OrderedLoader, ShuffledLoader, staging
from saev_store.loaders._base import Loader
from saev_store.loaders.cache import CachedTransport
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder
from saev_store.transport import MemoryTransport, Writes, open_transport
from saev_store.transport._remote import run_in_loop
from saev_store.transport.fsspec._transport import FsspecTransport

#: What to interrupt, and what to find out afterwards.
Attempt = tuple[Callable[[], object], Callable[[bool], object]]
_lost: list[object] = []


def interrupted(call: Callable[[], object], place: int) -> tuple[bool, bool]:
    """Whether there was such a place, and whether the caller was told. Else the interpreter has ignored it, in a finalizer."""
    n_events, is_there, is_told = 0, False, False

    def interrupt(_frame: object, event: str, _called: object) -> None:
        nonlocal n_events, is_there
        if event in {"call", "c_return"}:
            n_events += 1
            if n_events == place:
                is_there = True
                raise KeyboardInterrupt

    _lost.clear()
    sys.setprofile(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        is_told = True
    finally:
        sys.setprofile(None)
    assert is_told or not is_there or _lost, "nobody was told"
    return is_there, is_told


def at_every_place(begin: Callable[[], Attempt], *, step: int = 1) -> int:
    """Interrupt a new attempt at each place, or at every so many; how many there were."""
    place = 1
    while True:
        call, check = begin()
        try:
            is_there, is_told = interrupted(call, place)
            check(is_told)
        except BaseException as error:
            error.add_note(f"place {place}")
            raise
        if not is_there:
            return place - 1
        place += step


def threads(_path: Path) -> int:
    """A starting thread is never taken for one that the system refuses, so the caller's own thread never does the work."""

    def begin(call: Callable[[Callable[[int], object]], object]) -> Attempt:
        by = list[threading.Thread]()
        return lambda: call(lambda _: by.append(threading.current_thread())), lambda _: by

    def in_others() -> Attempt:
        call, seen = begin(lambda work: list(ahead(work, [1, 2, 3, 4], 2)))

        def check(_is_told: bool) -> None:
            by = seen(True)
            assert isinstance(by, list)
            assert threading.main_thread() not in by

        return call, check

    def in_all() -> Attempt:
        return begin(lambda work: share(work, deque([1, 2]), 2))

    def in_background() -> Attempt:
        return lambda: staging.stage_in_background("from", "to"), lambda _is_told: None

    staging.stage = lambda *_args, **_options: "to"
    return sum(map(at_every_place, [in_others, in_all, in_background]))


def requests(_path: Path) -> int:
    """The loop that all requests of a client share goes on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def answer() -> int:
        await asyncio.sleep(0.001)
        return 5

    def begin() -> Attempt:
        def call() -> None:
            assert run_in_loop(answer, loop, limit_s=30.0) == 5

        return call, lambda _is_told: call()

    return at_every_place(begin)


def opened(_path: Path) -> int:
    """The loop of fsspec runs."""
    from fsspec import asyn
    from fsspec.implementations.http import HTTPFileSystem

    def begin() -> Attempt:
        HTTPFileSystem.clear_instance_cache()
        asyn.loop[0] = asyn.iothread[0] = None

        def call() -> None:
            FsspecTransport("http://127.0.0.1:9/a")

        def check(_is_told: bool) -> None:
            loop = FsspecTransport("http://127.0.0.1:9/a").client.fs().loop
            assert soon(loop.is_running)
            loop.call_soon_threadsafe(loop.stop)

        return call, check

    return at_every_place(begin, step=5)


def flags(_path: Path) -> int:
    def begin() -> Attempt:
        flag = Flag()

        def call() -> None:
            flag.wait(0.001)
            flag.set()
            flag.wait(60.0)

        def check(_is_told: bool) -> None:
            flag.set()
            assert flag.wait(60.0)

        return call, check

    return at_every_place(begin)


def loader(path: Path, make: Callable[[ShardStore], Loader]) -> int:
    """What was handed out, and what a new loader hands out from the state on, is every batch; one may be lost on the way out."""
    store = ShardStore.open(path)
    whole = [batch["act"].copy() for batch in make(store)]

    def begin() -> Attempt:
        loader, found = make(store), list[np.ndarray]()

        def call() -> None:
            found.extend(batch["act"] for batch in loader)

        def check(is_told: bool) -> None:
            state = loader.state_dict()
            if is_told:
                next(iter(loader))
            loader.close()
            if not is_told:
                assert len(found) == len(whole)
                return
            other = make(store)
            other.load_state_dict(state)
            rest = [batch["act"] for batch in other]
            if len(rest) == len(whole) <= len(found) + 1:  # the next epoch
                return
            assert len(rest) in {len(whole) - len(found), len(whole) - len(found) - 1}
            for batch, expected in zip(found, whole, strict=False):
                np.testing.assert_array_equal(batch, expected)
            for batch, expected in zip(reversed(rest), reversed(whole), strict=False):
                np.testing.assert_array_equal(batch, expected)

        return call, check

    return at_every_place(begin, step=3)


def ordered(path: Path) -> int:
    return loader(path, lambda store: OrderedLoader(store.sel(layer=5), batch_size=8, n_threads=2))


def shuffled(path: Path) -> int:
    return loader(path, lambda store: ShuffledLoader(store.sel(layer=5), batch_size=8, n_threads=2))


def gathered(path: Path) -> int:
    """The threads that a data set keeps go on."""
    from saev_store.torch import IndexedConfig, IndexedDataset, indexed

    indexed._MIN_ROWS_PER_THREAD = 8
    dataset = IndexedDataset(IndexedConfig(shards=path, layer=5))
    dataset._n_threads = 3
    picked = np.random.default_rng(0).permutation(len(dataset))
    whole = dataset.batch(picked)["act"].clone()

    def begin() -> Attempt:
        dataset.close()

        def call() -> None:
            assert dataset.batch(picked)["act"].equal(whole)

        return call, lambda _is_told: call()

    return at_every_place(begin, step=3)


def shared(path: Path) -> int:
    """Each batch is handed out once; one may be lost on the way out, and the consumer counts it."""
    import torch

    from saev_store.torch import OrderedConfig, OrderedDataLoader

    def make() -> OrderedDataLoader:
        return OrderedDataLoader(OrderedConfig(shards=path, layer=5, batch_size=8))

    whole = [batch["act"].clone() for batch in make()]

    def begin() -> Attempt:
        shared, found = make().share(1), list[torch.Tensor]()
        consumer = shared[0]

        def call() -> None:
            found.extend(batch["act"] for batch in consumer)

        def check(is_told: bool) -> None:
            n = consumer.number
            assert n - len(found) in ({0, 1} if is_told else {0})
            rest = [batch["act"] for batch in consumer]  # of the next epoch, if this one was at its end
            shared.close()
            assert len(rest) == len(whole) - n % len(whole)
            for batch, expected in zip([*found, *rest], [*whole[: len(found)], *whole[-len(rest) :]], strict=True):
                assert torch.equal(batch, expected)

        return call, check

    return at_every_place(begin, step=7)


def locks(path: Path) -> int:
    """A lock is free again in this process; a file in memory that is moved under it is not lost."""
    memory = MemoryTransport()

    def begin(transport: Writes) -> Attempt:
        def call() -> None:
            with transport.lock("locked"):
                pass

        return call, lambda _is_told: call()

    def begin_to_move() -> Attempt:
        memory.put("a", b"x")

        def check(_is_told: bool) -> None:
            assert [*memory.files.values()] == [b"x"]
            memory.delete("b")

        return lambda: memory.move("a", "b"), check

    transport = open_transport(str(path))
    return sum(map(at_every_place, [lambda: begin(transport), lambda: begin(memory), begin_to_move]))


def kept(path: Path) -> int:
    """A cache has no temporary files, and the bytes that it counts."""
    inner = MemoryTransport({"a.bin": bytes(range(200))})
    folder = path.parent / "cache"

    def begin() -> Attempt:
        shutil.rmtree(folder, ignore_errors=True)
        transport = CachedTransport(inner, folder, 150)

        def call() -> None:
            found = transport.get_ranges("a.bin", starts=[0, 50], ends=[50, 70])
            assert [*map(bytes, found)] == [bytes(range(50)), bytes(range(50, 70))]

        def check(_is_told: bool) -> None:
            call()
            sizes = {file.name: file.stat().st_size for file in folder.glob("*/a.bin*")}
            assert [size for name, size in sizes.items() if not name.endswith(".tmp")] == [*sizes.values()]
            assert transport.kept_bytes == sum(sizes.values())

        return call, check

    return at_every_place(begin)


def leases(path: Path) -> int:
    """No thread goes on to renew the lease of somebody who never had it."""
    staging.BEAT_S = 0.01
    transport = open_transport(str(path))

    def begin() -> Attempt:
        (path / "leased").unlink(missing_ok=True)

        def call() -> None:
            with staging.Lease(transport, "leased"):
                pass

        def check(_is_told: bool) -> None:
            gc.collect()  # the error may refer to itself
            # The interpreter also lists threads whose start was interrupted.
            ours = [thread for thread in threading.enumerate() if thread.name == "saev-lease"]
            assert soon(lambda: not any(thread.is_alive() for thread in ours))

        return call, check

    return at_every_place(begin)


def servers(_path: Path) -> int:
    """No server runs on that nobody can stop."""
    import uvicorn
    from starlette.applications import Starlette

    from saev_store.serve import listen, serve_in_thread

    uvicorn.Config.configure_logging = lambda _config: None  # an interrupt within `logging` leaves its lock taken

    def begin() -> Attempt:
        listening, _ = listen("127.0.0.1", 0)
        stops = list[Callable[[], None]]()

        def call() -> None:
            stops.append(serve_in_thread(Starlette(), listening))
            stops[0]()

        def check(_is_told: bool) -> None:
            for stop in stops:
                stop()
            ours = [thread for thread in threading.enumerate() if thread.name == "saev-store-server"]
            assert soon(lambda: not any(thread.is_alive() for thread in ours))
            assert listening.fileno() == -1 or not ours
            listening.close()

        return call, check

    return at_every_place(begin)


def writer(path: Path) -> int:
    """The same process goes on, to the same bytes."""
    store = ShardStore.open(path)
    acts, to = np.asarray(store[...]), path.parent / "written"

    def begin() -> Attempt:
        shutil.rmtree(to, ignore_errors=True)

        def call() -> None:
            with ShardStore.create(to, store.metadata, progress=False) as writer:
                for batch in np.array_split(acts, 5):
                    writer.append(batch)

        def check(_is_told: bool) -> None:
            if not (to / store.metadata.hash / "metadata.json").exists():
                with ShardStore.create(to, store.metadata, resume="auto", progress=False) as writer:
                    writer.append(acts[writer.next_example :])
            np.testing.assert_array_equal(ShardStore.open(to / store.metadata.hash)[...], acts)

        return call, check

    return at_every_place(begin, step=97)


def documents(path: Path) -> int:
    """Both files are there, or neither is, and no other one."""
    sequences, to = [np.arange(size, dtype=np.uint16) for size in (5, 0, 7)], path.parent / "documents"

    def begin() -> Attempt:
        shutil.rmtree(to, ignore_errors=True)

        def call() -> None:
            with IndexedDatasetBuilder(to / "tokens", dtype="uint16") as builder:
                for sequence in sequences:
                    builder.add_document(sequence)

        def check(_is_told: bool) -> None:
            if not (to / "tokens.idx").exists():
                call()
            if len(os.listdir(to)) > 2:  # from Python 3.13 on, the traceback of the interrupt can be a cycle
                gc.collect()
            assert sorted(os.listdir(to)) == ["tokens.bin", "tokens.idx"]
            with IndexedDataset(to / "tokens") as found:
                assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in sequences]

        return call, check

    return at_every_place(begin, step=7)


def hooks(_path: Path) -> int:
    """No hook stays in a model, and its modules train as before."""
    import torch

    from saev_store.record import Recorder, TextAdapter

    blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    adapter = TextAdapter(model=blocks, blocks=list(blocks), d_model=4)

    def begin() -> Attempt:
        recorder = Recorder(adapter, layers=(0, 2))
        entered = list[bool]()

        def call() -> None:
            with recorder:
                entered.append(True)

        def check(_is_told: bool) -> None:
            n_hooks = sum(len(module._forward_hooks) for module in blocks)
            if n_hooks and entered:
                recorder.__exit__(None, None, None)  # an interrupt at its first line
                n_hooks = sum(len(module._forward_hooks) for module in blocks)
            assert n_hooks == 0
            assert all(module.training for module in blocks.modules())

        return call, check

    return at_every_place(begin)


def main(what: str, path: Path) -> None:
    sys.unraisablehook = _lost.append
    of_threads, of_loaders = [threads, requests, opened, flags], [ordered, shuffled, gathered, shared]
    scenes = [*of_threads, *of_loaders, kept, locks, leases, servers, writer, documents, hooks]
    try:
        n_places = {scene.__name__: scene for scene in scenes}[what](path)
        sys.stdout.write("fine\n" if n_places >= 10 else f"{n_places} places\n")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the interpreter's own pools may be left as the interrupt found them


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
