"""`ShardStore`: an opened store, a thin thing made of a layout, a document and a transport."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from saev_store._open import Opened, as_metadata, open_documents, open_in_memory, read_labels
from saev_store.display import card_html, card_rows, card_text
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, SaevStoreWarning, brief
from saev_store.faces import Faces
from saev_store.indexing import Block, Key, parse_key
from saev_store.layout import DIMS, Layout
from saev_store.reader import FloatArray, Reader
from saev_store.selected import Selection, prepared
from saev_store.selection import Labels, Layers, Tokens, row_space
from saev_store.transport import Engine, Transport, open_transport

if TYPE_CHECKING:
    from types import TracebackType

    from saev_store.cost import Estimate, Prices
    from saev_store.inspect import Report
    from saev_store.listing import StoreList
    from saev_store.problems import Problem
    from saev_store.writer import RepairWriter, ShardWriter

Url = str | os.PathLike[str]
Options = Mapping[str, object]


class ShardStore(Faces):
    """A store of activations, opened: index it like a NumPy array, select from it by label, look at it.

    Make one with `ShardStore.open`. Reads return fresh float32 arrays; nothing is loaded before it is asked for. May be
    shared between threads, pickled (it reopens), and used in forked children where its transport allows that.

    >>> from saev_store import ShardStore
    >>> store = ShardStore.open(SAMPLE)
    >>> store.shape, store.layers
    ((7, 3, 5, 8), (2, 5, 11))
    >>> store[:4, 0, 1:].shape
    (4, 4, 8)
    >>> len(store.sel(layer=11, tokens="content"))
    28
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._layout = opened.metadata.layout
        self._reader = self._new_reader()
        self._labels: Labels | None = None
        self._has_labels = opened.has_labels

    def _new_reader(self) -> Reader:
        opened = self._opened
        return Reader(
            opened.transport,
            self._layout,
            readable=opened.readable,
            check_sizes=not opened.sizes_checked,
            damaged_ok=opened.damaged_ok,
        )

    # -- opening -------------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        url: Url | Transport,
        storage_options: Options | None = None,
        *,
        engine: Engine = "auto",
        damaged_ok: bool = False,
    ) -> ShardStore:
        """An existing store, wherever it lies and whichever spelling of the protocol it follows.

        Reads `metadata.json` and `shards.json` and nothing else; a local store's files are also compared in size with
        what the documents promise, a remote one's when they are first touched.

        Args:
            url: The store's folder `<root>/<HASH>`: a path, any URL that fsspec knows, chained ones too, or a transport.
            storage_options: What fsspec hands to the file system, such as `{"anon": True}`.
            engine: How bytes are read: `"auto"`, `"mmap"` or `"pread"` (local), `"fsspec"`; `"memory"` loads the whole
                store at once.
            damaged_ok: Open also where shards are missing or short. What is lost is in `problems`, and reading it raises.

        Raises:
            NotFoundError: there is no store; if it is a root of stores, the message lists them.
            IncompleteStoreError: a store lies there that was never finished.
            DocumentError: a document breaks rules; `problems` on the error lists all of them.
            UnknownProtocolError: the store is newer than this package (a breaking change), or of another dtype.
            CorruptShardError: shards are missing, short or too long, and `damaged_ok` is false.
        """
        if isinstance(url, Transport):
            transport = url
        else:
            transport = open_transport(url, storage_options, engine="auto" if engine == "memory" else engine)
        opened = open_documents(transport, damaged_ok=damaged_ok)
        if engine == "memory":
            opened = open_in_memory(opened)
        for problem in opened.problems:
            if problem.kind == "hash_mismatch":
                warnings.warn(f"{transport.url}: {problem.message}", SaevStoreWarning, stacklevel=2)
        return cls(opened)

    @staticmethod
    def list(root: Url, storage_options: Options | None = None) -> StoreList:
        """The stores one level below a root, unfinished and broken ones marked.

        Raises:
            NotFoundError: there is no such folder.
        """
        from saev_store.listing import list_stores

        return list_stores(open_transport(root, storage_options))

    @staticmethod
    def create(
        root: Url,
        metadata: Metadata | Mapping[str, object],
        *,
        storage_options: Options | None = None,
        resume: bool | Literal["auto"] = False,
        exist_ok: bool = False,
        part: tuple[int, int] | None = None,
        pad: bool | None = None,
        on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
        progress: bool | None = None,
    ) -> ShardWriter:
        """A writer of the new store `<root>/<metadata.hash>`, which appears to readers when it is complete, not before.

        Args:
            root: Where stores lie; created if need be.
            metadata: What will be written: made by `saev_store.new_metadata`, or a mapping of its arguments.
            storage_options: What fsspec hands to the file system.
            resume: `True` continues an unfinished store of exactly this metadata, after checking what it keeps, and
                refuses when only other unfinished stores lie there; `"auto"` continues one or starts anew.
            exist_ok: A complete store is fine: the writer then has nothing to do.
            part: `(rank, world)`: write only this rank's run of shards; `ShardStore.finalize` publishes.
            pad: Write the last shard at full size (default on POSIX, where that costs nothing) or cut.
            on_nonfinite: What to do about NaN and infinity in appended activations.
            progress: Show a bar on stderr; default: when it is a terminal.

        Raises:
            StoreExistsError: the store exists, complete.
            IncompleteStoreError: an unfinished one lies there and `resume` is false.
            ResumeError: what lies there cannot be continued by this call.
            WriterConflictError: another process is writing it.
        """
        from saev_store.writer import create_store

        return create_store(
            open_transport(root, storage_options),
            as_metadata(metadata),
            resume=resume,
            exist_ok=exist_ok,
            part=part,
            pad=pad,
            on_nonfinite=on_nonfinite,
            progress=progress,
        )

    @classmethod
    def finalize(
        cls, root: Url, metadata: Metadata | Mapping[str, object], *, storage_options: Options | None = None
    ) -> ShardStore:
        """Publish a store whose parts were written by several processes, and open it.

        Raises:
            IncompleteStoreError: parts are missing; the message says which examples.
            WriterConflictError: another process published it first, differently.
        """
        from saev_store.writer import finalize_store

        metadata = as_metadata(metadata)
        transport = open_transport(root, storage_options)
        finalize_store(transport, metadata)
        return cls.open(transport.at(metadata.hash))

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The geometry: sizes, shards, and where each vector lies."""
        return self._layout

    @property
    def metadata(self) -> Metadata:
        """The document, under canonical names whatever version wrote it; `metadata.raw` has its exact bytes."""
        return self._opened.metadata

    @property
    def transport(self) -> Transport:
        """What reads the bytes; `store.transport.name` says which engine that is."""
        return self._opened.transport

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What opening found odd or wrong; `validate()` looks closer."""
        return self._opened.problems

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self.transport.url

    @property
    def name(self) -> str:
        """The store's folder, normally its content hash."""
        return self._opened.name

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n_examples, n_layers, tokens_per_example, d_model)."""
        return self._layout.shape

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes."""
        return DIMS

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, padding excluded."""
        return self._layout.nbytes

    @property
    def layers(self) -> tuple[int, ...]:
        """Labels of the recorded layers; the position of a label is its index on the layer axis."""
        return self._layout.layers

    @property
    def labels(self) -> Labels | None:
        """Labels of the content tokens, uint8 (n_examples, content tokens), read-only; None where none were recorded.

        A view of the mapped file locally; remotely the file is read once, when it is first asked for.

        Raises:
            DocumentError: `labels.bin` has another size than the documents imply.
        """
        if self._labels is None and self._has_labels is not False:
            self._labels = read_labels(self.transport, self._layout)
            self._has_labels = self._labels is not None
        return self._labels

    # -- reading -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._layout.n_examples

    def __getitem__(self, key: Key) -> FloatArray:
        """What NumPy would return for the same key on the tensor, as a fresh array; layers by *position*."""
        if type(key) is tuple and len(key) == 3:  # one vector: the commonest request, worth a short way
            example, layer, token = key
            n_examples, n_layers, n_tokens, _ = self._layout.shape
            if (
                type(example) is type(layer) is type(token) is int
                and 0 <= example < n_examples
                and 0 <= layer < n_layers
                and 0 <= token < n_tokens
            ):
                return self._reader.vector(example, layer, token)
        return self.read(key)

    def __iter__(self) -> Iterator[FloatArray]:
        """Example by example, each a fresh (layer, token, d_model) array."""
        for example in range(len(self)):
            yield self[example]

    def read(self, key: Key = ..., *, out: FloatArray | None = None) -> FloatArray:
        """`self[key]`, optionally into memory that the caller owns.

        Args:
            key: Integers, slices with steps, lists, boolean masks, ellipsis: NumPy's rules, layers by position.
            out: Memory to fill: float32, C order, of exactly the result's shape.

        Raises:
            SelectionError: the key does not fit the tensor.
            ArgumentError: `out` does not fit the result.
            CorruptShardError: a shard that is needed is missing, short or was lost.
        """
        request = parse_key(key, self._layout.shape)
        result = prepared(out, request.shape)
        if isinstance(request, Block):
            self._reader.read_block(request, result.reshape(request.full_shape))
        else:
            self._reader.read_points(request, result)
        return result if result.ndim or out is not None else result[()]

    def estimate(self, key: Key = ..., *, prices: Prices | None = None) -> Estimate:
        """What `store[key]` will cost in requests, bytes and dollars; nothing is read for it.

        It is the plan of the read itself, counted: what `store.transport.counters` has more afterwards, unless a client had
        to try again. `store.sel(…).estimate(rows)` does it for selections.

        Args:
            key: As in `store[key]`.
            prices: Instead of `saev_store.cost.PRICES`, such as `{"s3": Price(0, 0)}` for a server of your own.

        Raises:
            SelectionError: the key does not fit the tensor.

        >>> from saev_store import ShardStore
        >>> ShardStore.open(SAMPLE, engine="pread").estimate(np.s_[:, 1]).bytes_wanted
        1120
        """
        from saev_store.cost import Planner, estimate, price_of

        request, planner = parse_key(key, self._layout.shape), Planner(self._reader)
        planner.plan(request)
        wanted = math.prod(request.shape) * self.dtype.itemsize
        price = price_of(self.transport, prices)
        return estimate(price, requests=planner.requests, bytes_read=planner.bytes_read, bytes_wanted=wanted)

    def sel(
        self,
        *,
        layer: Layers = "all",
        tokens: Tokens = "all",
        examples: object = None,
        ignore_labels: Sequence[int] | None = None,
    ) -> Selection:
        """Vectors chosen by label, as the rows of a lazy (n, d_model) array.

        Args:
            layer: A label out of `layers`, several of them, or `"all"`. Literal: -2 is the label -2.
            tokens: `"content"`, `"special"` (CLS) or `"all"`.
            examples: Positions: all by default, else an integer, slice, list or boolean mask.
            ignore_labels: Leave out content tokens that carry one of these labels, such as the background.

        Raises:
            LayerNotFoundError: a layer was not recorded; the message lists those that were.
            SelectionError: anything else this store does not hold.
        """
        labels = self.labels if ignore_labels is not None else None
        space = row_space(
            self._layout, layer=layer, tokens=tokens, examples=examples, ignore_labels=ignore_labels, labels=labels
        )
        return Selection(self._reader, space)

    def as_numpy(self, key: Key = ..., *, copy: bool | None = None) -> FloatArray:
        """The tensor, or `key` of it, as one NumPy array.

        Args:
            key: As in `store[key]`.
            copy: `False` for a read-only view of the mapped file, without reading anything, or an error where there is
                none; `True` for fresh memory; `None` for a view where there is one. A view keeps the map alive.

        Raises:
            ArgumentError: `copy=False`, but the key spans shards, uses lists, or the store is not mapped.
        """
        if copy is not True:
            request = parse_key(key, self._layout.shape)
            view = self._reader.view(request) if isinstance(request, Block) else None
            if view is not None:
                return view
            if copy is False:
                raise ArgumentError(
                    f"{brief(key)} is no view: a view takes integers and slices of examples that lie in one shard (of "
                    f"{self._layout.examples_per_shard} examples) of a local store",
                    where="copy=False",
                    remedy="Use copy=None to copy where needed.",
                )
        return self.read(key)

    def __array__(self, dtype: np.dtype[np.generic] | None = None, *, copy: bool | None = None) -> np.ndarray:
        array = self.as_numpy(copy=copy)
        return array if dtype is None else array.astype(dtype, copy=False)

    # -- looking after it ----------------------------------------------------------------------------------------------

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """What is wrong with the store and which examples that costs; see `saev_store.inspect.Report`.

        Args:
            deep: Read every byte: digests, all-zero rows, swapped shards. Otherwise names and sizes only.
            progress: Show a bar on stderr; default: when it is a terminal.
        """
        from saev_store.inspect import validate

        return validate(
            self.transport, self.metadata, self._opened.index, dirname=self.name, deep=deep, progress=progress
        )

    def repair(self, report: Report | None = None) -> RepairWriter:
        """A writer that takes exactly the examples that are lost, and puts them where they were.

        Args:
            report: What `validate` found; default: a quick look at names and sizes.
        """
        from saev_store.writer import open_repair

        return open_repair(self.transport, self.metadata, lost=(report or self.validate()).lost)

    def close(self) -> None:
        """Release descriptors and maps; arrays handed out stay valid, and using the store again reopens it."""
        self._reader = self._new_reader()
        self._labels = None
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[ShardStore], tuple[Opened]]:
        return ShardStore, (self._opened,)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardStore):
            return NotImplemented
        return self.url == other.url and self.metadata.raw == other.metadata.raw

    def __hash__(self) -> int:
        return hash((self.url, self.metadata.raw))

    def _card(self) -> list[tuple[str, str]]:
        known = {True: "yes (labels.bin)", False: "none", None: "not looked for yet"}[self._has_labels]
        return card_rows(
            url=self.url,
            engine=self.transport.name,
            metadata=self.metadata,
            layout=self._layout,
            problems=self.problems,
            labels=known,
        )

    def __repr__(self) -> str:
        return card_text(self.name, self._card())

    def _repr_html_(self) -> str:
        return card_html(self.name, self._card())
