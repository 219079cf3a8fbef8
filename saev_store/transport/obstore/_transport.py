"""Object stores through obstore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError, StoreExistsError
from saev_store.transport._remote import Pins, RemoteTransport
from saev_store.transport.base import Buffer, Entry, Transport, far_cost
from saev_store.transport.checks import check_ranges, joined_runs, too_big
from saev_store.transport.credentials import StorageOptions
from saev_store.transport.obstore._client import ObstoreClient, fork_error, is_forked, running_loop
from saev_store.transport.obstore._options import only_obstore_understands
from saev_store.transport.obstore._ranges import PIECE_BYTES, RangeReader
from saev_store.transport.obstore._sink import ObstoreSink, create, delete, put

if TYPE_CHECKING:
    from saev_store.transport.fsspec._transport import FsspecTransport

#: S3 copies larger objects in parts only.
_MOST_COPIED_AT_ONCE = 5 << 30
_FAR = far_cost(cpu_s=1e-4, piece_bytes=PIECE_BYTES)


class ObstoreTransport(RemoteTransport[ObstoreClient]):
    """`s3://`, `gs://`, `az://` and `http(s)://` through obstore. Each returned buffer is read-only memory of its own.

    The first range of a file pins its size and ETag: if they change, reading the file is an error, never a mixture of two
    objects; `close` unpins all files. Every operation has a time-out of `timeout_s` plus one second per MiB that it moves,
    retries included.

    obstore does not work after `fork`. A forked child reads through fsspec, with the same options; writing there is a
    `ForkError`, and so is reading where fsspec cannot.

    Args:
        url: The root.
        storage_options: As fsspec's file systems understand them, or obstore's own names. Never part of a message, of `repr`
            or of a pickle that outlives this process and its children.
        timeout_s: Time-out of one operation.

    Raises:
        ArgumentError: obstore has no equivalent for an option.
        MissingDependencyError: obstore is not installed.
    """

    cost = _FAR

    def __init__(
        self, url: str, storage_options: Mapping[str, object] | None = None, *, timeout_s: float = 60.0
    ) -> None:
        super().__init__(ObstoreClient(url, StorageOptions(storage_options or {}), timeout_s))
        self._client.check()
        self._in_child: FsspecTransport | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._client, self._folder, self._pins)

    @property
    def name(self) -> str:
        """`obstore:` and the kind of store."""
        return f"obstore:{self._client.place.kind}"

    def close(self) -> None:
        """Unpin all files and free unused memory; connections stay open for other transports."""
        super().close()
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
        client.requests.add("read", read=len(data))
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
        client.requests.add("list")
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
        self._client.call("delete", self._where(below), lambda: delete(self._client, self._key(below)))
        self._pins.forget(below)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> ObstoreSink:
        """A file that is uploaded while it is written and appears when it is committed; `resume` replaces the old one then."""
        below = self._below(path)
        running_loop()  # or a ForkError, before anything is written
        if not resume:
            self._check_absent(path)
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
        if not isinstance(source, ObstoreTransport):
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
        ours.requests.add("copy_within")
        ours.call(
            "copy",
            self._where(below),
            lambda: ours.slot(lambda: obstore.copy_async(ours.store, source._key(from_below), self._key(below))),
            nbytes=size // 16,
        )
        return True

    def _forked(self) -> FsspecTransport:
        """Reads in a forked child.

        Raises:
            ForkError: fsspec is not installed, or would read something else with these options.
        """
        from saev_store.transport.fsspec._transport import FsspecTransport

        client = self._client
        if self._in_child is None:
            # Only for S3 do both clients name versions alike.
            pins = self._pins if client.place.kind == "s3" else None
            try:
                if names := only_obstore_understands(client.place, client.options.all):
                    raise ArgumentError(f"only obstore understands {', '.join(names)}", where="storage_options")
                self._in_child = FsspecTransport(client.url, client.options.all, timeout_s=client.timeout_s, pins=pins)
            except SaevStoreError as error:
                raise fork_error(f", and fsspec cannot read instead: {error}") from error
        return self._in_child.at(self._folder)

    def _object(self, below: str) -> RangeReader:
        return RangeReader(self._client, self._pins, below, self._key(below), self._where(below))

    def _key(self, below: str) -> str:
        prefix = self._client.place.prefix
        return f"{prefix}/{below}" if prefix and below else prefix or below


def _reopen(client: ObstoreClient, folder: str, pins: Pins) -> ObstoreTransport:
    transport = object.__new__(ObstoreTransport)
    transport.__dict__.update(_client=client, _pins=pins, _folder=folder, _in_child=None)
    return transport
