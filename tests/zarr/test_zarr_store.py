"""zarr-python's own tests of a store, run on the code that reads shards, over every transport.

They write what they then read, and a view cannot be written. So the keys here are a dictionary instead of arithmetic: a
value that a test sets is appended to one file, as the range that `ZarrView` then reads. Everything below the keys is what
runs in production. Skipped is what tests writing itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from api import MemoryTransport
from kill_harness_oracle import case
from servers import Bucket, s3_bucket  # noqa: F401  # the second is a fixture
from transports import CountingTransport, LatencyTransport, Wrapper
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.testing.store import StoreTests

from saev_store import ShardStore
from saev_store.core.chunk_grid import ChunkGrid, Extent
from saev_store.core.layout import Layout
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import SaevStoreWarning
from saev_store.transport import Transport, open_transport
from saev_store.transport import Transport as Writes
from saev_store.zarr import ZarrView

T = TypeVar("T")
BLOB = "acts000000.bin"
TRANSPORTS = ["mmap", "pread", "memory", "fsspec", "far", "wrapped", "s3", "obstore"]
#: The view of a 16-bit store, which converts the tensor and nothing else, such as token arrays.
CONVERTING = "token arrays of 3.0"
#: Of a store whose only shard is the file.
GRID = ChunkGrid(Layout(1, (0,), 1, False, 1, 1), (1, 1, 1, 1))
_names = itertools.count()


@dataclass(eq=False)
class Ranges:
    """Keys of a dictionary: value after value lies in one file, and what is set again is appended again."""

    transport: Transport
    extents: dict[str, Extent] = field(default_factory=dict)
    converts: bool = False
    token_arrays: dict[str, TokenArray] = field(default_factory=dict)
    grid: ChunkGrid = GRID

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.extents == other.extents

    __hash__ = None

    def add(self, key: str, data: bytes) -> None:
        assert isinstance(self.transport, Writes)
        blob = self.transport.read(BLOB)
        self.transport.put(BLOB, blob + data)
        # Odd values end before the chunk does, so that zeros follow which are in no file.
        kept = len(data.rstrip(b"\0")) if len(data) % 2 else len(data)
        shard_idx = None if self.converts else 0
        self.extents[key] = Extent(BLOB, len(blob), len(blob) + kept, len(data), shard_idx=shard_idx)

    def find(self, key: str) -> bytes | Extent | None:
        return self.extents.get(key)

    def index(self, extent: Extent) -> bytes:
        raise NotImplementedError

    def below(self, prefix: str) -> Iterator[str]:
        yield from (key for key in self.extents if key.startswith(prefix))

    def children(self, folder: str) -> Iterator[str]:
        head = f"{folder}/" if folder else ""
        yield from dict.fromkeys(key[len(head) :].split("/")[0] for key in self.extents if key.startswith(head))


class WritableView(ZarrView):
    """The view over `Ranges`, with a way in for the tests that prepare what they read through the store itself."""

    async def set(self, key: str, value: Buffer) -> None:
        self.keys.add(key, value.to_bytes())

    def __repr__(self) -> str:
        return f"WritableView({str(self)!r})"


def made(kind: str, folder: Path, request: pytest.FixtureRequest) -> Transport:
    name = f"{next(_names)}"
    files = {BLOB: b"what another chunk holds"}
    if kind == "memory":
        return MemoryTransport(files, label=name)
    if kind in {"s3", "obstore"}:
        if kind == "obstore":
            pytest.importorskip("obstore")
        bucket: Bucket = request.getfixturevalue("s3_bucket")
        transport = open_transport(f"{bucket.url}/x", bucket.options, engine="fsspec" if kind == "s3" else "obstore")
    elif kind == "fsspec":
        transport = open_transport(f"memory://{folder.name}-{name}")
    else:
        (folder / name).mkdir()
        transport = open_transport(folder / name, engine="pread" if kind in {"pread", "far"} else "mmap")
    assert isinstance(transport, Writes)
    transport.put(BLOB, files[BLOB])
    if kind == "far":
        return LatencyTransport(transport, 0.0, 1e9)
    return Wrapper(CountingTransport(transport)) if kind == "wrapped" else transport


def runs_coroutines(cls: type[T]) -> type[T]:
    """Make coroutines of a test class plain tests, each in an event loop of its own."""

    def plain(coroutine: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(coroutine)
        def test(*args: Any, **kwargs: Any) -> None:
            asyncio.run(coroutine(*args, **kwargs))

        return test

    for name in dir(cls):
        member = getattr(cls, name)
        if name.startswith("test_") and inspect.iscoroutinefunction(member):
            setattr(cls, name, plain(member))
    return cls


def tests_writing(*args: Any, **kwargs: Any) -> None:
    pytest.skip("tests writing; a view cannot be written")


@runs_coroutines
class TestStore(StoreTests[WritableView, cpu.Buffer]):
    store_cls = WritableView
    buffer_cls = cpu.Buffer

    async def set(self, store: WritableView, key: str, value: Buffer) -> None:
        store.keys.add(key, value.to_bytes())

    async def get(self, store: WritableView, key: str) -> Buffer:
        extent = store.keys.extents[key]
        data = store.keys.transport.read(BLOB)[extent.start : extent.end]
        return self.buffer_cls.from_bytes(data + bytes(extent.nbytes - len(data)))

    @pytest.fixture(params=[*TRANSPORTS, CONVERTING])
    def store_kwargs(self, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
        converts = request.param == CONVERTING
        transport = made("pread" if converts else request.param, tmp_path, request)
        return {"transport": transport, "keys": Ranges(transport, converts=converts)}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> WritableView:
        return sync(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> WritableView:
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store: WritableView) -> None:
        assert store.keys.transport.url in repr(store)

    def test_store_supports_writes(self, store: WritableView) -> None:
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store: WritableView) -> None:
        assert store.supports_listing

    def test_store_read_only(self, store: WritableView) -> None:
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False

    async def test_store_open_read_only(self, open_kwargs: dict[str, Any]) -> None:
        store = await ZarrView.open(open_kwargs["transport"], open_kwargs["keys"])
        assert store.read_only

    async def test_serializable_store(self, store: WritableView) -> None:
        await self.set(store, "foo", self.buffer_cls.from_bytes(b"\x01\x02\x03\x04"))
        again = pickle.loads(pickle.dumps(store))
        assert again == store
        assert again.read_only
        found = await again.get("foo")
        assert found is not None
        assert found.to_bytes() == b"\x01\x02\x03\x04"

    async def test_read_only_store_raises(self, open_kwargs: dict[str, Any]) -> None:
        store = await ZarrView.open(open_kwargs["transport"], open_kwargs["keys"])
        for refused in (store.set("foo", self.buffer_cls.from_bytes(b"bar")), store.delete("foo")):
            with pytest.raises(ValueError, match="store was opened in read-only mode and does not support writing"):
                await refused

    async def test_with_read_only_store(self, open_kwargs: dict[str, Any]) -> None:
        store = await ZarrView.open(open_kwargs["transport"], open_kwargs["keys"])
        with pytest.raises(NotImplementedError, match="with_read_only is not implemented"):
            store.with_read_only(read_only=False)

    test_set = test_set_not_open = test_set_many = test_set_if_not_exists = tests_writing
    test_set_sync = test_set_sync_overwrite = tests_writing
    test_delete_sync = test_delete_sync_missing = tests_writing
    test_sync_async_set_get_parity = tests_writing
    test_clear = tests_writing


def float32_bits(bits: np.ndarray) -> bytes:
    """What bfloat16 numbers are as float32: the same bits above zeros."""
    return (bits.view(np.uint16).astype("<u4") << 16).tobytes()


@pytest.mark.parametrize("kind", ["mmap", "pread", "memory", "fsspec", "obstore"])
def test_every_part_of_every_chunk_of_a_16_bit_store(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The numbers are converted while they are read, in whatever pieces they are asked for."""
    this = case(n=5, per_shard=2, d_model=3, content=1, protocol="3.0")
    transport = made(kind, tmp_path, request)
    assert isinstance(transport, Writes)
    for name, data in this.files().items():
        transport.put(name, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # the folder has another name than the documents imply
        view = ShardStore.open(transport).as_zarr(chunks=(1, 1, 2, 3))
    truths = {f"activations/c/{i}/{j}/0/0": float32_bits(this.acts[i, j]) for i in range(5) for j in range(2)}
    n = 24
    parts: list[ByteRequest | None] = [None, *(OffsetByteRequest(at) for at in range(n + 2))]
    parts += [SuffixByteRequest(at) for at in range(1, n + 2)]
    parts += [RangeByteRequest(first, end) for first in range(n) for end in range(first + 1, n + 3, 5)]

    def truth(key: str, part: ByteRequest | None) -> bytes:
        match part:
            case None:
                return truths[key]
            case RangeByteRequest(first, end):
                return truths[key][first:end]
            case OffsetByteRequest(offset):
                return truths[key][offset:]
            case SuffixByteRequest(suffix):
                return truths[key][-suffix:]

    async def check() -> None:
        prototype = default_buffer_prototype()
        for key in truths:
            assert await view.getsize(key) == n
            some = parts if key == "activations/c/4/1/0/0" else parts[::29]
            for part in some:
                found = await view.get(key, prototype, part)
                assert found is not None
                assert found.to_bytes() == truth(key, part), (key, part)
            async for ranges in view.get_ranges(key, some, prototype=prototype):
                for number, found in ranges:
                    assert found is not None
                    assert found.to_bytes() == truth(key, some[number]), (key, some[number])

        listed = {key async for key in view.list()}
        assert {key for key in listed if key.startswith("activations/c/")} == set(truths)

    asyncio.run(check())
    again = pickle.loads(pickle.dumps(view))
    assert again == view
    key = "activations/c/3/0/0/0"
    assert again.get_sync(key, prototype=default_buffer_prototype()).to_bytes() == truths[key]


def test_all_twelve_abstract_members_are_there():
    assert not ZarrView.__abstractmethods__
    assert len(Store.__abstractmethods__) == 12
    assert Store.__abstractmethods__ <= set(vars(ZarrView))
