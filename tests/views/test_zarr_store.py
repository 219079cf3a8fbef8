"""zarr-python's own tests of a store, run on the code that reads shards, over every transport.

They write what they then read, and a view cannot be written. So the keys here are a dictionary instead of arithmetic: a
value that a test sets is appended to one file, as the range that `ZarrView` then reads. Everything below the keys is what
runs in production. What tests writing itself is left out.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from api import MemoryTransport
from servers import Bucket, s3_bucket  # noqa: F401  # the second is a fixture
from transports import CountingTransport, LatencyTransport, Wrapper
from zarr.core.buffer import Buffer, cpu
from zarr.core.sync import sync
from zarr.testing.store import StoreTests

from saev_store.core.token_arrays import TokenArray
from saev_store.transport import Transport, open_transport
from saev_store.transport import Transport as Writes
from saev_store.zarr import ZarrView
from saev_store.zarr.arrays import Extent

T = TypeVar("T")
BLOB = "acts000000.bin"
TRANSPORTS = ["mmap", "pread", "memory", "fsspec", "far", "wrapped", "s3", "obstore"]
_names = itertools.count()


@dataclass(eq=False)
class Ranges:
    """Keys of a dictionary: value after value lies in one file, and what is set again is appended again."""

    transport: Transport
    extents: dict[str, Extent] = field(default_factory=dict)
    token_arrays: dict[str, TokenArray] = field(default_factory=dict)
    readable: dict[str, int] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.extents == other.extents

    __hash__ = None

    def add(self, key: str, data: bytes) -> None:
        assert isinstance(self.transport, Writes)
        blob = self.transport.read(BLOB)
        self.transport.put(BLOB, blob + data)
        # Odd values end before the chunk does, so that zeros follow which are in no file.
        kept = len(data.rstrip(b"\0")) if len(data) % 2 else len(data)
        self.extents[key] = Extent(BLOB, len(blob), len(blob) + kept, len(data))

    def find(self, key: str) -> bytes | Extent | None:
        return self.extents.get(key)

    def list(self) -> Iterator[str]:
        yield from self.extents

    def children(self, folder: str) -> Iterator[str]:
        head = f"{folder}/" if folder else ""
        yield from dict.fromkeys(key[len(head) :].split("/")[0] for key in self.extents if key.startswith(head))


class WritableView(ZarrView):
    """The view over `Ranges`, with a way in for the tests that prepare what they read through the store itself."""

    async def set(self, key: str, value: Buffer) -> None:
        self._keys.add(key, value.to_bytes())

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
        store._keys.add(key, value.to_bytes())

    async def get(self, store: WritableView, key: str) -> Buffer:
        extent = store._keys.extents[key]
        data = store._keys.transport.read(BLOB)[extent.start : extent.end]
        return self.buffer_cls.from_bytes(data + bytes(extent.nbytes - len(data)))

    @pytest.fixture(params=TRANSPORTS)
    def store_kwargs(self, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
        transport = made(request.param, tmp_path, request)
        return {"transport": transport, "keys": Ranges(transport)}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> WritableView:
        return sync(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> WritableView:
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store: WritableView) -> None:
        assert store._keys.transport.url in repr(store)

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
