"""xarray's back end, the dataset of a store, and several stores as one."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.chunk_grid import task_lengths
from saev_store.core.layout import DIMS
from saev_store.errors import (
    ArgumentError,
    MissingDependencyError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    brief,
)
from saev_store.names import METADATA_NAME, SHARDS_NAME
from saev_store.store.identity import recording_identity
from saev_store.store.listing import list_stores
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.zarr.documents import ARRAY, HOOK_POINT, TOKEN_DIMS, attributes_of, coordinates, token_variables

try:
    import pandas as pd
    import xarray
    from xarray.backends import BackendEntrypoint

    from saev_store.xarray._variables import LazyArray, StoreArray, TokenVariable
except ImportError as error:
    raise MissingDependencyError(
        "xarray is not installed", where="as_xarray", remedy="Run: pip install 'saev-store[xarray]'."
    ) from error

if TYPE_CHECKING:
    from saev_store.store.store import TaskSizes

#: Options of xarray that every back end must accept.
_DECODERS = {
    "mask_and_scale", "decode_times", "decode_timedelta", "use_cftime", "concat_characters", "decode_coords",
}  # fmt: skip


class SaevBackend(BackendEntrypoint):
    """xarray's back end for `engine="saev"`, for a local folder of a store opened without an engine, and for a `ShardStore`.

    `xr.open_datatree(root, engine="saev")` opens a root of stores as one tree. Options with which xarray decodes files
    (`mask_and_scale`, `decode_times`, …) are accepted and have no effect: nothing in a store is encoded.
    """

    description = "Stores of transformer activations (metadata.json, shards.json, acts000000.bin, …)"
    supports_groups = True
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "group", "storage_options", "damaged_ok")

    def guess_can_open(self, filename_or_obj: object) -> bool:
        """Return True for a `ShardStore` and the local folder of one; no server is contacted."""
        if isinstance(filename_or_obj, ShardStore):
            return True
        if not isinstance(filename_or_obj, (str, os.PathLike)):
            return False
        path: object = os.fspath(cast("str | os.PathLike[str]", filename_or_obj))
        if not isinstance(path, str) or ("://" in path and not path.startswith("file://")):
            return False
        try:
            transport = open_transport(path)
            return all(transport.size(name) > 0 for name in (METADATA_NAME, SHARDS_NAME))
        except SaevStoreError:
            return False

    def open_dataset(  # pyright: ignore[reportIncompatibleMethodOverride]  # it takes stores, not xarray's data stores
        self,
        filename_or_obj: str | os.PathLike[str] | ShardStore,
        *,
        drop_variables: str | Iterable[str] | None = None,
        group: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, object] | None = None,
        damaged_ok: bool = False,
        **decoders: object,
    ) -> xarray.Dataset:
        """The dataset of one store, with no activation read.

        Args:
            filename_or_obj: The store's folder, any address that fsspec supports, or an opened store.
            drop_variables: Names to leave out.
            group: Folder of the store below `filename_or_obj`, for a root of stores; None and `"/"`: none.
            storage_options: What fsspec hands to the file system.
            damaged_ok: As in `ShardStore.open`.
            decoders: xarray's decoding options, such as `mask_and_scale`; without effect.

        Raises:
            ArgumentError: `group` is given with an opened store.
            TypeError: another option is given.
            SaevStoreError: as `ShardStore.open`.
        """
        _check_decoders(decoders)
        is_path = group is None or isinstance(group, (str, os.PathLike))
        name = os.fspath(group or "").strip("/") if is_path else ""
        if not is_path or (name and isinstance(filename_or_obj, ShardStore)):
            raise ArgumentError(f"{brief(group)} is not the folder of a store below a root", where="group")
        if isinstance(filename_or_obj, ShardStore):
            return dataset_of(filename_or_obj, drop_variables)
        place = open_transport(filename_or_obj, storage_options).at(name)
        return dataset_of(ShardStore.open(place, damaged_ok=damaged_ok), drop_variables)

    def open_groups_as_dict(  # pyright: ignore[reportIncompatibleMethodOverride]  # as `open_dataset`
        self,
        filename_or_obj: str | os.PathLike[str] | ShardStore,
        *,
        drop_variables: str | Iterable[str] | None = None,
        storage_options: Mapping[str, object] | None = None,
        damaged_ok: bool = False,
        **decoders: object,
    ) -> dict[str, xarray.Dataset]:
        """The datasets of the stores in a root by `/<folder>`, or that of one store as `/`.

        Raises:
            TypeError: an unknown option is given.
            SaevStoreError: as `ShardStore.open`, where there is no store.

        Warns:
            SaevStoreWarning: stores are left out because they are unfinished, broken, or damaged without `damaged_ok`.
        """
        _check_decoders(decoders)
        if isinstance(filename_or_obj, ShardStore):
            return {"/": dataset_of(filename_or_obj, drop_variables)}
        root, folders = open_transport(filename_or_obj, storage_options), [""]
        try:
            root.size(METADATA_NAME)
        except NotFoundError:
            wanted = {"complete", "damaged"} if damaged_ok else {"complete"}
            entries = list_stores(root)
            left_out = [f"{entry.name} ({entry.state})" for entry in entries if entry.state not in wanted]
            # Opening a root without stores raises the error with the reason.
            folders = [entry.name for entry in entries if entry.state in wanted] or [""]
            if left_out:
                warnings.warn(
                    f"{root.url}: left out of the tree: {', '.join(left_out)}", SaevStoreWarning, stacklevel=3
                )
        return {
            f"/{name}": dataset_of(ShardStore.open(root.at(name), damaged_ok=damaged_ok), drop_variables)
            for name in folders
        }

    def open_datatree(  # pyright: ignore[reportIncompatibleMethodOverride]  # as `open_dataset`
        self, filename_or_obj: str | os.PathLike[str] | ShardStore, **options: Any
    ) -> xarray.DataTree:
        """The datasets of `open_groups_as_dict` as one tree; closing it closes the stores."""
        datasets = self.open_groups_as_dict(filename_or_obj, **options)
        tree = xarray.DataTree.from_dict(datasets)  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        for path, dataset in datasets.items():
            cast("xarray.DataTree", tree[path]).set_close(dataset.close)
        return tree


def _check_decoders(options: Mapping[str, object]) -> None:
    unknown = sorted(options.keys() - _DECODERS)
    if unknown:
        raise TypeError(f'engine "saev" has no option {", ".join(unknown)}')


def dataset_of(store: ShardStore, drop_variables: str | Iterable[str] | None = None) -> xarray.Dataset:
    """A store as a dataset of lazy variables, without dask; closing it closes the store."""
    store.check_wide()
    layout = store.layout
    variables = {
        ARRAY: xarray.Variable(DIMS, LazyArray(StoreArray(store))),
        "example": xarray.Variable("example", pd.RangeIndex(layout.n_examples)),  # of constant size
    }
    arrays = token_variables(store.token_arrays.described())
    for name, values in coordinates(layout, labelled=bool(arrays)).items():
        variables[name] = xarray.Variable(name, values)
    for name, array in arrays.items():
        variables[name] = xarray.Variable(TOKEN_DIMS, LazyArray(TokenVariable(store, array.name)))
    if layout.hook_points is not None:
        variables[HOOK_POINT] = xarray.Variable("layer", np.array(layout.hook_points))
    for name in {ARRAY, *arrays} & variables.keys():  # else xarray would make each variable one dask task
        variables[name].encoding["preferred_chunks"] = {**variables[name].sizes, "example": task_lengths(layout)}
    dropped = () if drop_variables is None else drop_variables
    try:
        left_out = {dropped} if isinstance(dropped, str) else set(dropped)
    except TypeError:
        raise ArgumentError(
            f"drop_variables is {brief(drop_variables)}; it must be a name, or a list of names", where="drop_variables"
        ) from None
    # netCDF has neither objects nor booleans as attributes. Hook points are a coordinate.
    attributes = {
        name: json.dumps(value) if isinstance(value, dict) else int(value) if isinstance(value, bool) else value
        for name, value in attributes_of(store.metadata, url=store.url).items()
        if name != "hook_points"
    }
    dataset = xarray.Dataset(
        {name: variable for name, variable in variables.items() if name not in left_out}, attrs=attributes
    )
    dataset.encoding["source"] = store.url
    dataset.set_close(store.close)
    return dataset


def open_store(store: ShardStore, *, chunks: TaskSizes) -> xarray.Dataset:
    """Implements `ShardStore.as_xarray`: a lazy dataset of the activations.

    Args:
        store: The opened store.
        chunks: As in `xarray.open_dataset`: None reads without dask; `{}` makes dask arrays of few tasks that follow the
            shards. Names of tasks contain the recording identity.

    Raises:
        MissingDependencyError: xarray (or dask, with `chunks`) is not installed.
        DocumentError: `labels.bin` has another size than the documents imply.

    >>> from saev_store import ShardStore
    >>> dataset = ShardStore.open(SAMPLE).as_xarray()
    >>> dict(dataset.sizes)
    {'example': 7, 'layer': 3, 'token': 5, 'd_model': 8, 'content_token': 4}
    >>> dataset.activations.sel(layer=11, token=-1).shape
    (7, 8)
    """
    dataset = xarray.open_dataset(  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        store,  # pyright: ignore[reportArgumentType]  # handed on to the back end as it is
        engine=SaevBackend,
        cache=chunks is None,
    )
    if chunks is None:
        return dataset
    need("dask", install="saev-store[xarray]", where="as_xarray")
    from dask.base import tokenize

    sizes = {"example": task_lengths(store.layout)} if chunks in ("auto", {}) else chunks
    try:
        return dataset.chunk(sizes, name_prefix="saev-recording-", token=tokenize(store))  # pyright: ignore[reportUnknownMemberType]  # partly annotated
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ArgumentError(
            f"{brief(chunks)} cannot be laid over {dict(dataset.sizes)}: {brief(str(error))}", where="chunks"
        ) from error


def concat(stores: Sequence[ShardStore]) -> xarray.Dataset:
    """Implements `ShardStore.concat`: several stores of one model as one lazy dataset along `example`.

    Tasks of dask follow the shards of each store. `example` counts on through the stores. The attributes are those on
    which the stores agree, and `stores`: a JSON list of the url, content hash and number of examples of each.

    Args:
        stores: Opened stores, in order.

    Raises:
        ArgumentError: no store is given, one is given twice, or the stores differ in model, layers, tokens, d_model, token
            arrays, or in how they are labelled.
        MissingDependencyError: xarray or dask is not installed.

    >>> from saev_store import ShardStore
    >>> store = ShardStore.open(SAMPLE)
    >>> concat([store, store])
    Traceback (most recent call last):
    saev_store.errors.ArgumentError: stores: store 1 is the recording of store 0 again: ...
    """
    if not isinstance(stores, Sequence) or not stores or not all(isinstance(s, ShardStore) for s in stores):
        raise ArgumentError(
            "pass opened stores, at least one", where="stores", remedy="ShardStore.open(url) gives one."
        )
    expected = _what_must_agree(stores[0])
    known: dict[tuple[object, ...], int] = {}
    for number, store in enumerate(stores):
        for name, value in _what_must_agree(store).items():
            if value != expected[name]:
                raise ArgumentError(
                    f"store {number} ({store.url}) has {name} {brief(value)}, but store 0 has {brief(expected[name])}; "
                    "all must agree",
                    where="stores",
                )
        first = known.setdefault((store.metadata, recording_identity(store.transport, store.layout)), number)
        if first != number:
            raise ArgumentError(f"store {number} is the recording of store {first} again: {store.url}", where="stores")
    whole: xarray.Dataset = xarray.concat(
        [open_store(store, chunks={}).drop_vars("example") for store in stores],
        dim="example",
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="exact",
        combine_attrs="drop_conflicts",
    )
    listed = [{"url": store.url, "content_hash": store.metadata.hash, "n_examples": len(store)} for store in stores]
    n_examples = sum(map(len, stores))
    examples = pd.RangeIndex(n_examples)
    numbered = whole.assign_coords(example=examples)  # pyright: ignore[reportUnknownMemberType]  # partly annotated
    return numbered.assign_attrs(n_examples=n_examples, stores=json.dumps(listed))


def _what_must_agree(store: ShardStore) -> dict[str, object]:
    metadata = store.metadata
    return {
        "family": metadata.family,
        "ckpt": metadata.ckpt,
        "layers": metadata.layers,
        "hook_points": metadata.layout.hook_points,
        "content_tokens_per_example": metadata.content_tokens_per_example,
        "cls_token": metadata.cls_token,
        "d_model": metadata.d_model,
        "labels": store.has_labels,
        "pixel_agg": metadata.pixel_agg if store.has_labels else None,
        "token_arrays": {array.name: array.dtype for array in store.token_arrays.described()},
    }
