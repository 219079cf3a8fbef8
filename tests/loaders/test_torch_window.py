"""Batches to come on a device: the same batches as from this machine's memory, tested with tensors of the CPU."""

from __future__ import annotations

import itertools
import json

import pytest
from plain_stores import Plain, plain_store

torch = pytest.importorskip("torch")

from saev_store.errors import ArgumentError, TransportError  # after the check that torch is there
from saev_store.loaders._reads import Reads  # after the check that torch is there
from saev_store.torch import ShuffledConfig, ShuffledDataLoader  # after the check that torch is there


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("window"), n=43, tokens=7, per_shard=5, labels=True, d_model=16)


def make(plain: Plain, **options) -> ShuffledDataLoader:
    return ShuffledDataLoader(ShuffledConfig(**{"shards": plain.path, "layer": 5, "batch_size": 32, "window_bytes": 6000, **options}))  # fmt: skip


def equal(one: list, two: list) -> bool:
    if len(one) != len(two):
        return False
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, two, strict=True))  # fmt: skip


@pytest.mark.parametrize("layer", [5, (11, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"ignore_labels": range(100)}, {"scale_norm": True}, {"read_bytes": 100, "n_threads": 16}, {"tokens": "special"}])  # fmt: skip
def test_the_same_batches(plain, layer, options):
    options = {"layer": layer, **options}
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


@pytest.mark.parametrize("device", ["x", "", "cpu:x"])
def test_a_window_on_what_is_no_device(plain, device):
    with pytest.raises(ArgumentError, match=f"'{device}' is not a device: ") as refused:
        make(plain, window_device=device)
    assert refused.value.where == "window_device"


def test_errors_arrive(plain, monkeypatch):
    loader = make(plain, window_device="cpu", n_threads=2)
    whole = list(loader)

    def broken(self, shard, read, in_steps=None) -> None:
        raise TransportError("it is broken", where="acts000001.bin")

    with monkeypatch.context() as patch:
        patch.setattr(Reads, "_retried", broken)
        with pytest.raises(TransportError, match="acts000001"):
            list(loader)
    loader.set_epoch(0)
    assert equal(list(loader), whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu(plain):
    host = list(make(plain))
    for _ in range(5):
        found = [{name: value.cpu() for name, value in batch.items()} for batch in make(plain, device="cuda", window_device="cuda")]  # fmt: skip
        assert equal(found, host)
