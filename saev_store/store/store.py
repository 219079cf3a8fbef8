"""`ShardStore`: open, create, read and view a store."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, cast

import numpy as np

from saev_store.core.arguments import check_flag, is_list
from saev_store.core.dtypes import ReadDtype, StoredDtype, read_dtype
from saev_store.core.indexing import Block, Key, parse_key
from saev_store.core.layout import IntArray
from saev_store.core.rows import Layers, Tokens, row_space
from saev_store.core.token_arrays import LABELS
from saev_store.documents import Metadata
from saev_store.documents.metadata import as_metadata
from saev_store.errors import ArgumentError, SelectionError, brief
from saev_store.store.opening import open_store
from saev_store.store.reader import FloatArray, NumberArray
from saev_store.store.selection import Selection, prepared
from saev_store.store.text import TextReading
from saev_store.store.token_arrays import MASK, kept_tokens
from saev_store.transport import Engine, LocalTransport, Transport, open_transport

if TYPE_CHECKING:
    import dask.array
    import distributed
    import xarray

    from saev_store.sources import Source
    from saev_store.sources.provenance import Origin
    from saev_store.stats import Stats
    from saev_store.store.estimate import Estimate
    from saev_store.store.listing import StoreList
    from saev_store.view import View
    from saev_store.writer import ShardWriter
    from saev_store.zarr import ZarrView

Url: TypeAlias = str | os.PathLike[str]
Options: TypeAlias = Mapping[str, object]
#: A chunk shape over (example, layer, token, d_model), or what suits the transport.
ChunkShape: TypeAlias = Literal["auto"] | Sequence[int]
#: What xarray takes for `chunks`.
TaskSizes: TypeAlias = Mapping[str, int | tuple[int, ...] | Literal["auto"]] | Literal["auto"] | int | None


class ShardStore(TextReading):
    """An opened store of activations: index it like a NumPy array, or select from it by label.

    Made by `ShardStore.open`. Reads return fresh float32 arrays, or those of another `dtype=` where a method takes one. It may be shared
    between threads, pickled (it reopens), and used in forked children where its transport allows that.

    >>> from saev_store import ShardStore
    >>> store = ShardStore.open(SAMPLE)
    >>> store.shape, store.layers
    ((7, 3, 5, 8), (2, 5, 11))
    >>> store[:4, 0, 1:].shape
    (4, 4, 8)
    """

    _source: Source[object] | None = None

    @classmethod
    def open(
        cls, url: Url | Transport, storage_options: Options | None = None, *, engine: Engine = "auto",
        damaged_ok: bool = False,
    ) -> ShardStore:  # fmt: skip
        """An existing store, in any spelling of the protocol.

        Reads `metadata.json` and `shards.json` and nothing else. The sizes of local files are compared with the documents
        now, those of remote files when they are first read.

        Args:
            url: The store's folder `<root>/<HASH>`: a path, any URL that fsspec supports, chained ones too, or a transport.
            storage_options: What fsspec hands to the file system, such as `{"anon": True}`.
            engine: How bytes are read: `"auto"`, `"mmap"` or `"pread"` (local), `"fsspec"`, `"obstore"`.
            damaged_ok: Open also where shards are missing or short. What is lost is in `problems`, and reading it raises.

        Raises:
            NotFoundError: there is no store.
            IncompleteStoreError: the store was never finished.
            DocumentError: a document breaks rules; `problems` on the error lists all of them.
            UnknownProtocolError: the store is newer than this package (a breaking change), or of another dtype.
            CorruptShardError: shards are missing, short or too long, and `damaged_ok` is false.
        """
        transport = url if isinstance(url, Transport) else open_transport(url, storage_options, engine=engine)
        return cls(open_store(transport, damaged_ok=check_flag(damaged_ok, name="damaged_ok")))

    @staticmethod
    def list(root: Url, storage_options: Options | None = None) -> StoreList:
        """The stores one level below a root, unfinished, damaged and broken ones marked; `NotFoundError` if there is no such folder."""
        from saev_store.store.listing import list_stores

        return list_stores(open_transport(root, storage_options))

    @staticmethod
    def create(
        root: Url, metadata: Metadata | Mapping[str, object], *, storage_options: Options | None = None,
        resume: bool = False, exist_ok: bool = False, part: tuple[int, int] | None = None,
        on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
        on_overflow: Literal["raise", "warn", "saturate"] = "raise", progress: bool | None = None,
    ) -> ShardWriter:  # fmt: skip
        """A writer of the new store `<root>/<metadata.hash>`, which is published, as a whole, when it is complete.

        Args:
            root: The folder of stores; created if need be.
            metadata: What will be written: made by `saev_store.new_metadata`, or a mapping of its arguments.
            storage_options: What fsspec hands to the file system.
            resume: Continue an unfinished store; see `saev_store.writer.create_store` for this and all that follow.
            exist_ok: For a complete store, return a writer that has nothing left to do.
            part: `(rank, world)`: write only this part of the shards; `ShardStore.finalize` publishes.
            on_nonfinite: What to do with NaN and infinity in appended activations.
            on_overflow: What to do with finite numbers that become infinite in the dtype of a 16-bit store.
            progress: Show a bar on stderr; default: when it is a terminal.
        """
        from saev_store.writer import create_store

        transport = open_transport(root, storage_options)
        return create_store(
            transport, as_metadata(metadata), resume=resume, exist_ok=exist_ok, part=part,
            on_nonfinite=on_nonfinite, on_overflow=on_overflow, progress=progress,
        )  # fmt: skip

    @classmethod
    def finalize(
        cls, root: Url, metadata: Metadata | Mapping[str, object], *, storage_options: Options | None = None
    ) -> ShardStore:
        """Publish a store whose parts were written by several processes, and open it.

        Raises:
            IncompleteStoreError: parts are missing; the message names the examples.
            WriterConflictError: another process published it first, differently.
        """
        from saev_store.writer import finalize_store

        metadata = as_metadata(metadata)
        transport = open_transport(root, storage_options)
        finalize_store(transport, metadata)
        return cls.open(transport.at(metadata.hash))

    @classmethod
    def from_array(
        cls, array: object, root: Url, *, family: str, ckpt: str,
        layers: Sequence[int] | IntArray | None = None, cls_token: bool = False, dims: Sequence[str] | None = None,
        dtype: StoredDtype | None = None, token_arrays: Mapping[str, object] | None = None,
        hook_points: Sequence[str] | None = None, text: Mapping[str, object] | None = None,
        data: Mapping[str, object] | None = None, dataset: str | os.PathLike[str] | None = None,
        max_tokens_per_shard: int | None = None,
        client: distributed.Client | str | None = None, storage_options: Mapping[str, object] | None = None,
        on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
        on_overflow: Literal["raise", "warn", "saturate"] = "raise", progress: bool | None = None,
    ) -> ShardStore:  # fmt: skip
        """Write an array as a new store below `root`, block by block, and open it.

        The store is named by its metadata, which hold the array's shape, dtype and a digest of eight of its examples. The same call
        continues after a crash; a store that is finished is opened. docs/writing.md has examples.

        Args:
            array: Activations, as an array of NumPy (also mapped from a file), zarr, h5py, xarray, dask or torch; lazy ones are
                computed block by block.
            root: The folder of stores; created if need be.
            family: The family of models, such as "clip".
            ckpt: The model.
            layers: The label of each entry of the layer axis; None: the coordinate "layer" of an xarray array.
            cls_token: True if token 0 is a CLS or BOS token, which token arrays leave out.
            dims: Names of the axes in their order: "example" and "d_model", and if there are such axes "layer" and "token".
            dtype: "float32", "bfloat16" or "float16"; None keeps that of the array. Numbers are rounded to nearest even.
            token_arrays: (examples, content tokens) for each token array, by name, of the same kinds as `array`.
            hook_points: Where in its layer each entry of the layer axis was taken; None: "resid_post".
            text: How texts were cut into examples, as in `new_metadata`.
            data: Describes the data set; `imported` is added to it.
            dataset: Where the data set is.
            max_tokens_per_shard: Budget of vectors per shard; None chooses one, as `new_metadata`.
            client: A dask cluster whose workers write a dask array, each its own shards.
            storage_options: What fsspec hands to the file system of `root`.
            on_nonfinite: What to do with NaN and infinity.
            on_overflow: What to do with finite numbers that become infinite in the dtype of a 16-bit store.
            progress: Show a bar on stderr; default: when it is a terminal.

        Raises:
            ArgumentError: the array or an argument breaks a rule; the message names it.

        >>> import numpy as np
        >>> from saev_store import ShardStore
        >>> acts = np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)
        >>> store = ShardStore.from_array(acts, "memory://shards", family="vit", ckpt="tiny", layers=[11])
        >>> store.shape, store[2, 0, 3, :3].tolist()
        ((3, 1, 4, 8), [88.0, 89.0, 90.0])
        """
        from saev_store.writer.importing import ImportOptions, import_array

        return import_array(
            array, root, ImportOptions(on_nonfinite, on_overflow, progress),
            layers=layers, dims=dims, dtype=dtype, token_arrays=token_arrays, data=data, cls_token=cls_token, client=client,
            storage_options=storage_options, family=family, ckpt=ckpt, hook_points=hook_points, text=text, dataset=dataset,
            max_tokens_per_shard=max_tokens_per_shard,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.layout.n_examples

    def __getitem__(self, key: Key) -> FloatArray:
        """Return what NumPy would return for the same key on the tensor, as a fresh array; layers by *position*."""
        # No cast: it would be a call more for each vector.
        indices: tuple[object, ...] = key if isinstance(key, tuple) else ()  # pyright: ignore[reportUnknownVariableType]  # any items
        if len(indices) == 3:  # the shortest way to one vector
            example, layer, token = indices
            n_examples, n_layers, n_tokens, _ = self.layout.shape
            if (
                type(example) is int
                and type(layer) is int
                and type(token) is int  # a boolean is not a position
                and 0 <= example < n_examples
                and 0 <= layer < n_layers
                and 0 <= token < n_tokens
            ):
                return self._reader.vector(example, layer, token)
        return self.read(key)  # pyright: ignore[reportUnknownArgumentType]  # any items

    def read(self, key: Key = ..., *, dtype: ReadDtype = "float32", out: NumberArray | None = None) -> FloatArray:
        """`self[key]`, optionally of another dtype, and into memory that the caller owns.

        Args:
            key: Integers, slices with steps, lists, boolean masks, ellipsis: NumPy's rules, layers by position.
            dtype: "float32", "float64", "bfloat16", "float16" or "stored"; narrower ones round to nearest even.
            out: Memory to fill: of that dtype, C order, of exactly the result's shape.

        Raises:
            SelectionError: the key does not fit the tensor.
            ArgumentError: `out` does not fit the result, or the dtype is none of these.
            CorruptShardError: a shard that is needed is missing, short or was lost.
        """
        self.check_wide()
        request = parse_key(key, self.layout.shape)
        result = prepared(out, request.shape, read_dtype(dtype, self.layout.dtype))
        self._reader.execute(
            self._reader.plan(request), result.reshape(request.full_shape) if isinstance(request, Block) else result
        )
        return result if result.ndim or out is not None else result[()]

    def estimate(self, key: Key = ...) -> Estimate:
        """Requests and bytes of `store[key]`: the plan of the read, counted; nothing is read.

        For more than a million vectors of a far store the size of its first shard is requested, unless it is known.

        Raises:
            SelectionError: the key does not fit the tensor.
            CorruptShardError: that size is not the one of the documents, or a shard of the key is known to be lost.

        >>> from saev_store import ShardStore
        >>> ShardStore.open(SAMPLE, engine="pread").estimate(np.s_[:, 1]).bytes_wanted
        1120
        """
        from saev_store.store.estimate import count_plan

        self.check_wide()
        request, reader = parse_key(key, self.layout.shape), self._reader
        return count_plan(reader, reader.plan(request), math.prod(request.shape) * self.layout.itemsize)

    def sel(
        self, *, layer: Layers = "all", tokens: Tokens = "all", examples: object = None,
        ignore_labels: Sequence[int] | None = None, where: Mapping[str, object] | None = None, masked: bool = False,
        dtype: ReadDtype = "float32", stack_layers: bool = False,
    ) -> Selection:  # fmt: skip
        """Vectors chosen by label, as the rows of a lazy array (n, d_model), or (n, layers, d_model) with stacked layers.

        Args:
            layer: A label out of `layers`, several of them, or `"all"`. Literal: -2 is the label -2.
            tokens: `"content"`, `"special"` (CLS) or `"all"`.
            examples: Positions: all by default, else an integer, slice, list or boolean mask.
            ignore_labels: Leave out content tokens that carry one of these labels, such as the background.
            where: Only content tokens whose token arrays have these values: name to value, or to several.
            masked: Choose also content tokens whose `mask` is false, in stores that record one.
            dtype: Of the vectors that come out, as in `read`.
            stack_layers: A row holds the vectors of all chosen layers of one token, in the order given.

        Raises:
            LayerNotFoundError: a layer was not recorded; the message lists those that were.
            SelectionError: anything else this store does not hold.
        """
        stack_layers, masked = check_flag(stack_layers, name="stack_layers"), check_flag(masked, name="masked")
        arrays = self.token_arrays
        if where is not None and not isinstance(where, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise SelectionError(f"where is {brief(where)}; it must map names of token arrays to values", where="where")
        is_special = isinstance(tokens, str) and tokens == "special"  # pyright: ignore[reportUnnecessaryIsInstance]  # as above
        conditions = list[tuple[str, object, str]]()
        if not masked and not is_special and arrays.is_declared and MASK in arrays:
            conditions.append((MASK, True, "mask"))
        if ignore_labels is not None and not (is_list(ignore_labels) and not ignore_labels):
            conditions.append((LABELS.name, ignore_labels, "ignore_labels"))
        conditions += [(name, wanted, "where") for name, wanted in (where or {}).items()]
        kept = kept_tokens(arrays, conditions) if conditions else None
        space = row_space(
            self.layout, layer=layer, tokens=tokens, examples=examples, kept=kept, stack_layers=stack_layers
        )
        return Selection(self._reader, space, read_dtype(dtype, self.layout.dtype), arrays, self.metadata)

    def as_numpy(self, key: Key = ..., *, copy: bool | None = None, dtype: ReadDtype = "float32") -> FloatArray:
        """The tensor, or `key` of it, as one NumPy array.

        Args:
            key: As in `store[key]`.
            copy: `False` for a read-only view of the mapped file, of the stored dtype, or an error where there is none;
                `True` for fresh memory; `None` for a view where there is one. A view keeps the map alive.
            dtype: As in `read`.

        Raises:
            ArgumentError: `copy=False`, but the key spans shards, uses lists, or the store is not mapped.
        """
        copy = check_flag(copy, name="copy", other=None)
        if copy is not True:
            request = parse_key(key, self.layout.shape)
            view = self._reader.view(request) if isinstance(request, Block) else None
            if view is not None and view.dtype == read_dtype(dtype, self.layout.dtype):
                return cast("FloatArray", view)
            if copy is False:
                raise ArgumentError(
                    f"{brief(key)} is not a view: views are of examples in one shard of a local store, of its dtype",
                    where="copy=False",
                    remedy="Use copy=None to copy where needed.",
                )
        return self.read(key, dtype=dtype)

    def __array__(self, dtype: np.dtype[np.generic] | None = None, *, copy: bool | None = None) -> np.ndarray:
        array = self.as_numpy(copy=copy)
        return array if dtype is None else array.astype(dtype, copy=copy or False)

    def as_zarr(self, *, chunks: ChunkShape = "auto", dtype: ReadDtype = "float32") -> ZarrView:
        """A read-only Zarr store: `activations`, its coordinates `layer` and `token`, and token arrays such as `labels`.

        Nothing is copied or listed: each chunk is a range of bytes of a shard. See `saev_store.zarr.open_view`.

        >>> import zarr
        >>> from saev_store import ShardStore
        >>> group = zarr.open_group(ShardStore.open(SAMPLE).as_zarr(), mode="r")
        >>> group["activations"][2:4, 0, 1].shape, group["layer"][:].tolist()
        ((2, 8), [2, 5, 11])
        """
        from saev_store.zarr import open_view

        return open_view(self, chunks=chunks, dtype=dtype)

    def as_xarray(self, *, chunks: TaskSizes = None) -> xarray.Dataset:
        """A lazy `xarray.Dataset` with dimension names, layer labels and token numbers. See `saev_store.xarray.open_store`."""
        from saev_store.xarray import open_store

        return open_store(self, chunks=chunks)

    @staticmethod
    def concat(stores: Sequence[ShardStore]) -> xarray.Dataset:
        """Several stores of one model as one lazy `xarray.Dataset` along `example`. See `saev_store.xarray.concat`."""
        from saev_store.xarray import concat

        return concat(stores)

    def as_dask(self, *, chunks: Literal["auto"] | Sequence[object] = "auto") -> dask.array.Array:
        """A lazy `dask.array.Array` of the tensor, whose tasks read through this store. See `saev_store.dask.from_store`."""
        from saev_store.dask import from_store

        return from_store(self, chunks=chunks)

    def to_virtual_dataset(self, *, chunks: ChunkShape = "auto", base: str | None = None) -> xarray.Dataset:
        """VirtualiZarr's `ManifestArray`s, byte ranges of shards, in a `xarray.Dataset`. See `saev_store.export.to_virtual_dataset`."""
        from saev_store.export import to_virtual_dataset

        return to_virtual_dataset(self, chunks=chunks, base=base)

    def stats(
        self, *, sample: int | None = None, seed: int = 0, client: distributed.Client | str | None = None,
        save: bool = True, progress: bool | None = None,
    ) -> Stats:  # fmt: skip
        """Count, mean, std, norm, min, max, zeros and non-finite values for each layer and token.

        Computed in threads or on a dask cluster; kept beside the store as `stats.json`. See `saev_store.stats.store_stats`.

        >>> from saev_store import ShardStore
        >>> stats = ShardStore.open(SAMPLE).stats(save=False)
        >>> stats.mean_norm.shape, int(stats.count[0, 0])
        ((3, 5), 56)
        """
        from saev_store.stats import store_stats

        return store_stats(self, sample=sample, seed=seed, client=client, save=save, progress=progress)

    def source(
        self, storage_options: Options | None = None, *, url: Url | None = None, outside_ok: bool = False
    ) -> Source[object]:
        """The data set that this store was recorded from, opened; see `saev_store.sources.provenance.source_of`."""
        from saev_store.sources.provenance import source_of

        return source_of(self.metadata, storage_options, url=url, outside_ok=outside_ok)

    def origin(self, example_idx: int, token_idx: int | None = None, *, source: Source[object] | None = None) -> Origin:
        """The sample that a vector comes from, and the place in it: the position of a token, or the box of a patch.

        `source` is opened, once, where it is not given. See `saev_store.sources.provenance.origin_of`.
        """
        from saev_store.sources.provenance import origin_of

        if source is None:
            source = self._source = self._source or self.source()
        return origin_of(self, source, example_idx, token_idx)

    def view(
        self, *, other: ShardStore | None = None, source: Source[object] | None = None,
        tokenizer: Callable[[int], str] | None = None, height_px: int = 720,
    ) -> View:  # fmt: skip
        """A running page of this store, which a notebook shows in a frame; it ends with the returned object.

        It listens on this machine only, and its address has a random token. Nothing is written. `tokenizer` gives the text of a token
        id, such as `lambda i: tokenizer.decode([i])`. See `saev_store.view.View`.
        """
        from saev_store.view import View

        return View(self, other=other, source=source, tokenizer=tokenizer, height_px=height_px)

    def unmapped(self) -> ShardStore:
        """The same store, whose local files are read instead of mapped: a file that is cut while it is read gives an error."""
        if not isinstance(self.transport, LocalTransport) or not self.transport.use_mmap:
            return self
        return ShardStore(self._opened._replace(transport=self.transport.unmapped()))

    def close(self) -> None:
        """Release descriptors and maps; arrays handed out stay valid, and using the store again reopens it."""
        self._reader.forget()
        self.token_arrays.forget()
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __dask_tokenize__(self) -> tuple[str, str, str]:
        from saev_store.store.identity import recording_identity

        # Tasks do not compare what they read with its digests, which a damaged file shares with its repair.
        recording = recording_identity(self.transport, self.layout, files=self.recorded_files(), prefer="versions")
        return "saev_store", self.url, recording
