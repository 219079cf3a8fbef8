"""The window on a device: the same batches as from a window in this machine's memory, tested with tensors of the CPU."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from plain_stores import Plain, plain_store

torch = pytest.importorskip("torch")

from saev_store.errors import ArgumentError, TransportError  # after the check that torch is there
from saev_store.loaders._memory import allocate  # after the check that torch is there
from saev_store.loaders._reads import Reads  # after the check that torch is there
from saev_store.torch import ShuffledConfig, ShuffledDataLoader  # after the check that torch is there
from saev_store.torch._device import Done, PlainCopies  # after the check that torch is there
from saev_store.torch._window import DeviceWindow, Staging  # after the check that torch is there


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("window"), n=43, tokens=7, per_shard=5, labels=True, d_model=16)


def make(plain: Plain, **options) -> ShuffledDataLoader:
    return ShuffledDataLoader(ShuffledConfig(**{"shards": plain.path, "layer": 5, "batch_size": 32, "window_bytes": 6000, **options}))  # fmt: skip


def equal(one: list, two: list) -> bool:
    if len(one) != len(two):
        return False
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, two, strict=True))  # fmt: skip


@pytest.mark.parametrize("slots", ["block", "row"])
@pytest.mark.parametrize("layer", [5, (11, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"ignore_labels": range(100)}, {"scale_norm": True}, {"read_bytes": 100, "n_threads": 16}, {"tokens": "special"}])  # fmt: skip
def test_the_same_batches(plain, slots, layer, options):
    options = {"slots": slots, "layer": layer, **options}
    host = list(make(plain, **options))
    loader = make(plain, window_device="cpu", **options)
    assert equal(list(loader), host)
    following = list(make(plain, window_device="cpu", **options))
    assert equal(following, host)


def test_batches_belong_to_their_holder(plain):
    """A window that goes on does not change what was handed out."""
    loader = make(plain, window_device="cpu")
    held = list(loader)
    copies = [batch["act"].clone() for batch in held]
    list(loader)
    assert all(torch.equal(batch["act"], copy) for batch, copy in zip(held, copies, strict=True))


def test_resuming(plain):
    whole = list(make(plain, window_device="cpu"))
    for stop_at in range(len(whole)):
        loader = make(plain, window_device="cpu")
        first = list(itertools.islice(loader, stop_at))
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        again = make(plain, window_device="cpu")
        again.load_state_dict(state)
        assert equal(first + list(again), whole)
        again.close()


def test_the_window_and_the_batches_are_on_one_device(plain):
    with pytest.raises(ArgumentError, match="the same device"):
        make(plain, window_device="meta")


def test_errors_arrive(plain, monkeypatch):
    loader = make(plain, window_device="cpu", n_threads=2)
    whole = list(loader)

    def broken(self, read) -> None:
        raise TransportError("it is broken", where="acts000001.bin")

    with monkeypatch.context() as patch:
        patch.setattr(Reads, "_retried", broken)
        with pytest.raises(TransportError, match="acts000001"):
            list(loader)
    loader.set_epoch(0)
    assert equal(list(loader), whole)


class LateCopies(PlainCopies):
    """Says that copies are done only when it is told so, and keeps an eye on what they are made from."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.late: list[list[bool]] = []
        self.waited = 0

    @contextmanager
    def queue(self):
        yield

    def done(self) -> Done:
        state = [False]
        self.late.append(state)

        def wait() -> None:
            self.waited += 1
            state[0] = True

        return Done(lambda: state[0], wait)


def test_a_staging_buffer_is_used_again_only_after_its_copy():
    copies = LateCopies()
    window = DeviceWindow(copies, n_threads=1)
    window.reserve(64, 3)
    in_flight: dict[int, list[bool]] = {}
    for number in range(40):

        def read(place: np.ndarray, buffer: np.ndarray, number: int = number) -> None:
            address = buffer.ctypes.data
            assert address not in in_flight or in_flight[address][0], "a buffer was filled while it was copied from"
            in_flight[address] = []
            for at in place:
                buffer[at : at + 2] = number

        window.fill(np.array([number % 8 * 4, 40]), np.array([2, 2]), read)
        for address, state in in_flight.items():
            if not state:
                in_flight[address] = copies.late[-1]
        if number % 3 == 0:
            copies.late[number][0] = True
        rows = window.batch(4)
        window.gather(np.array([number % 8 * 4, number % 8 * 4 + 1, 40, 41]), rows, None)
        assert (rows == number).all()
    assert len(in_flight) <= 5
    assert copies.waited > 0  # all five were in flight: the oldest is waited for


def test_staging_is_shared_by_threads():
    """Nobody waits for another thread, and nobody gets what another one has."""
    staging = Staging(4 + 4, allocate)
    held: set[int] = set()
    lock = threading.Lock()
    failures: list[str] = []

    def work() -> None:
        for number in range(200):
            buffer = staging.get(1 + number % 5, 2)
            with lock:
                if buffer.ctypes.data in held:
                    failures.append("shared")
                held.add(buffer.ctypes.data)
            with lock:
                held.discard(buffer.ctypes.data)
            staging.put(buffer, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("slots", ["block", "row"])
def test_on_a_gpu(plain, slots):
    host = list(make(plain, slots=slots))
    for _ in range(5):
        found = [{name: value.cpu() for name, value in batch.items()} for batch in make(plain, slots=slots, device="cuda", window_device="cuda")]  # fmt: skip
        assert equal(found, host)
