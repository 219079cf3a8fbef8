"""Object stores through obstore."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from saev_store.errors import ArgumentError, ForkError, NotFoundError, SaevStoreError, StoreExistsError
from saev_store.transport._pins import Pins
from saev_store.transport.base import Buffer, Counters, Entry, Transport, far_cost
from saev_store.transport.checks import check_path, check_ranges, joined_runs, too_big
from saev_store.transport.credentials import Options
from saev_store.transport.obstore._client import Client, is_forked
from saev_store.transport.obstore._options import own_names
from saev_store.transport.obstore._ranges import PIECE_BYTES, Object
from saev_store.transport.obstore._sink import ObstoreSink, create, delete, put

if TYPE_CHECKING:
    from saev_store.transport.fsspec._transport import FsspecTransport

#: S3 copies larger objects in parts only.
_MOST_COPIED_AT_ONCE = 5 << 30
_FAR = far_cost(cpu_s=1e-4, piece_bytes=PIECE_BYTES)


class ObstoreTransport:
    """`s3://`, `gs://`, `az://` and `http(s)://` through obstore. Each returned buffer is read-only memory of its own.

    The first range of a file pins the file: its size and ETag must stay what they were, or reading it is an error, never
    a mixture of two objects; `close` lets go of all pins. Every operation is given up after `timeout_s` plus one second
    per MiB that it moves, retries included.

    obstore does not survive `fork`: in a forked child fsspec does the work, if it can, and `ForkError` says so if not.

    Args:
        url: The root.
        storage_options: As fsspec's file systems understand them, or obstore's own names; see `_obstore_options`. Never
            part of a message, of `repr` or of a pickle that outlives this process and its children.
        timeout_s: Longest wait for one operation.

    Raises:
        ArgumentError: obstore has no equivalent for an option.
        MissingDependencyError: obstore is not installed.
    """

    pads = False
    is_local = False
    local_path = None
    reads_into = False
    cost = _FAR

    def __init__(
        self, url: str, storage_options: Mapping[str, object] | None = None, *, timeout_s: float = 60.0
    ) -> None:
        self._client = Client(url, Options(storage_options or {}), timeout_s=timeout_s)
        self._pins = Pins()
        self._folder = ""
        self._fsspec: FsspecTransport | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._client, self._folder, self._pins)

    @property
    def url(self) -> str:
        """The root; obstore takes no addresses that carry credentials."""
        return self._where(self._folder)

    @property
    def name(self) -> str:
        """`obstore:` and the kind of store."""
        return f"obstore:{self._client.place.kind}"

    @property
    def counters(self) -> Counters:
        """What was asked of the server so far, through this client; its own retries are not counted."""
        return self._client.tally.counters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def at(self, path: str) -> ObstoreTransport:
        """The same client, one folder deeper."""
        child = object.__new__(type(self))
        child.__dict__.update(self.__dict__, _fsspec=None, _folder=self._below(path) if path else self._folder)
        return child

    def close(self) -> None:
        """Forget what files looked like when they were first read; connections stay for others."""
        self._pins.versions.clear()
        self._client.buffers.clear()

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file in one request, which is given up when the answer announces too much."""
        below = self._below(path)
        if is_forked():
            return self._forked().read(path, max_bytes=max_bytes)
        import obstore

        async def get() -> bytes:
            answer = await obstore.get_async(self._client.store, self._key(below))
            if max_bytes is not None and answer.meta["size"] > max_bytes:
                raise too_big(self._where(below), size=answer.meta["size"], max_bytes=max_bytes)
            return bytes(await answer.bytes_async())

        client = self._client
        data = client.call("read", self._where(below), lambda: client.slot(get), nbytes=max_bytes or 0)
        client.tally.add("read", read=len(data))
        return data

    def size(self, path: str) -> int:
        """The size of a file in bytes, asked anew each time."""
        below = self._below(path)
        if is_forked():
            return self._forked().size(path)
        return self._client.call("look at it", self._where(below), lambda: self._object(below).head())["size"]

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only buffer per range, each of exactly the length asked for; empty ranges cost no request.

        Raises:
            CorruptShardError: the file ends before a range does.
            TransportError: the file is not the one that was read before, or the server sent something else.
        """
        below = self._below(path)
        check_ranges(self._where(below), starts, ends)
        if is_forked():
            return self._forked().get_ranges(path, starts=starts, ends=ends)
        return self._client.call(
            "read",
            self._where(below),
            lambda: self._object(below).ranges(starts, ends),
            nbytes=sum(ends) - sum(starts) if max(ends, default=0) < 1 << 50 else 0,
        )

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fetch the ranges in pieces, side by side, and copy each into its place as it arrives."""
        below = self._below(path)
        runs = joined_runs(self._where(below), starts, buffers)
        if is_forked():
            self._forked().readinto(path, starts=starts, buffers=buffers)
        elif runs:
            self._object(below).readinto(runs)

    def version(self, path: str) -> str | None:
        """The pinned ETag or time, with the size."""
        return self._forked().version(path) if is_forked() else self._pins.told(self._below(path))

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names in a folder, sorted."""
        below = self._below(path) if path else self._folder
        if is_forked():
            return self._forked().list(path)
        import obstore

        client, key = self._client, self._key(below)
        client.tally.add("list")
        found = client.call(
            "list",
            self._where(below),
            lambda: obstore.list_with_delimiter_async(client.store, key or None),  # pyright: ignore[reportUnknownMemberType]  # Arrow tables, declared without types
        )
        base = f"{path}/" if path else ""
        entries = {base + name.rstrip("/").rpartition("/")[2]: None for name in found["common_prefixes"]}
        sizes: dict[str, int | None] = {**entries}
        times: dict[str, float] = {}
        for meta in found["objects"]:
            name = base + meta["path"].rpartition("/")[2]
            if meta["path"] != key:  # a placeholder for the folder itself
                sizes.setdefault(name, meta["size"])
                times[name] = meta["last_modified"].timestamp()
        if not sizes and key:
            raise NotFoundError("there is no such folder", where=self._where(below))
        return [
            Entry(name, is_dir=size is None, size=size, modified_s=times.get(name))
            for name, size in sorted(sizes.items())
        ]

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a file, atomically."""
        below = self._below(path)
        if is_forked():
            self._forked().put(path, data)
            return
        content = bytes(data)
        self._client.call(
            "write", self._where(below), lambda: put(self._client, self._key(below), content), nbytes=len(content)
        )
        self._pins.forget(below)

    def create(self, path: str, data: Buffer) -> None:
        """Create a file unless its name is taken: the service decides between writers that race.

        A lost answer can make a creation that succeeded look failed, also as `StoreExistsError`: read the file back to
        know.
        """
        below = self._below(path)
        if is_forked():
            self._forked().create(path, data)
            return
        content = bytes(data)
        try:
            self._client.call(
                "create",
                self._where(below),
                lambda: create(self._client, self._key(below), content),
                nbytes=len(content),
            )
        except StoreExistsError:
            raise StoreExistsError("the file already exists", where=self._where(below)) from None
        self._pins.forget(below)

    def delete(self, path: str) -> None:
        """Delete a file, or everything below a folder."""
        below = self._below(path)
        if is_forked():
            self._forked().delete(path)
            return
        self._client.call("delete", self._where(below), lambda: delete(self._client, self._key(below)))
        self._pins.forget(below)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> ObstoreSink:
        """A file that is uploaded while it is written and appears when it is committed; `resume` replaces the old one then."""
        below = self._below(path)
        if is_forked():
            raise ForkError(
                "obstore was used before this process was forked, so nothing can be uploaded from it",
                where=self._where(below),
                remedy='Start workers with "spawn", or open the store with engine="fsspec".',
            )
        if not resume:
            with contextlib.suppress(NotFoundError):
                self.size(path)
                raise StoreExistsError(
                    "the file already exists", where=self._where(below), remedy="Resume, or delete it first."
                )
        return ObstoreSink(
            self._client,
            self._where(below),
            self._key(below),
            used_nbytes=used_nbytes,
            file_nbytes=file_nbytes,
            committed=lambda: self._pins.forget(below),
        )

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        """Let the service copy a file; False from another bucket, for large objects, or with other options."""
        if not isinstance(source, ObstoreTransport) or is_forked():
            return False
        ours, theirs, below = self._client, source._client, self._below(path)
        if ours.place.kind == "http" or (ours.place.kind, ours.place.bucket) != (
            theirs.place.kind,
            theirs.place.bucket,
        ):
            return False
        size, from_below = source.size(source_path), source._below(source_path)
        if ours.options.all != theirs.options.all or size > _MOST_COPIED_AT_ONCE:
            return False
        import obstore

        self._pins.forget(below)
        ours.tally.add("copy_within")
        ours.call(
            "copy",
            self._where(below),
            lambda: ours.slot(lambda: obstore.copy_async(ours.store, source._key(from_below), self._key(below))),
            nbytes=size // 16,
        )
        return True

    def lock(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Nothing: object stores have no locks, publication decides who wins."""
        check_path(path)
        return contextlib.nullcontext()

    # -- names ---------------------------------------------------------------------------------------------------------

    def _forked(self) -> FsspecTransport:
        """Who does the work in a forked child."""
        if self._fsspec is None:
            from saev_store.transport.fsspec._transport import FsspecTransport

            client = self._client
            try:
                if own := own_names(client.place.kind, client.options.all):
                    raise ArgumentError(f"only obstore understands {', '.join(own)}", where="storage_options")
                found = FsspecTransport(client.url, client.options.all, timeout_s=client.timeout_s)
            except SaevStoreError as error:
                raise ForkError(
                    "obstore was used before this process was forked and does not work in it, and fsspec cannot take "
                    f"over: {error}",
                    where=self.url,
                    remedy='Start workers with "spawn" or "forkserver".',
                ) from error
            if client.place.kind == "s3":  # the two clients name versions alike
                found.pinned_as(self._pins)
            self._fsspec = found.at(self._folder)
        return self._fsspec

    def _object(self, below: str) -> Object:
        return Object(self._client, self._pins, below, self._key(below), self._where(below))

    def _below(self, path: str) -> str:
        checked = check_path(path)
        return f"{self._folder}/{checked}" if self._folder else checked

    def _key(self, below: str) -> str:
        prefix = self._client.place.prefix
        return f"{prefix}/{below}" if prefix and below else prefix or below

    def _where(self, below: str) -> str:
        return f"{self._client.url}/{below}" if below else self._client.url


def _reopen(client: Client, folder: str, pins: Pins) -> ObstoreTransport:
    transport = object.__new__(ObstoreTransport)
    transport.__dict__.update(_client=client, _pins=pins, _folder=folder, _fsspec=None)
    return transport
