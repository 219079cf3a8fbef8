"""TensorStore specs: plain JSON for `tensorstore.open`, without this package.

TensorStore has no driver for ranges of files, so each shard is one chunk: suited to scans of whole shards, not to single vectors. A
spec uses the `zarr3` driver with the array's metadata, over `kvstack`, which maps the key of each chunk to a file. A last shard that
is cut is an array of its own, joined by `stack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from saev_store.core.layout import DIMS, shard_name
from saev_store.errors import ArgumentError, brief
from saev_store.export._references import url_parts, usable_base
from saev_store.zarr.documents import ARRAY, CONTENT, TOKEN_DIMS, array_document, coordinates, token_variables

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore

Spec = dict[str, object]

#: Keys that TensorStore's metadata check refuses.
_NOT_IN_SPECS = ("attributes", "storage_transformers")


def array_names(store: ShardStore) -> tuple[str, ...]:
    """Names of the arrays that have a spec."""
    tokens = token_variables(store.token_arrays.described())
    return (ARRAY, "layer", "token", *((*tokens, CONTENT) if tokens else ()))


def tensorstore_spec(store: ShardStore, array: str = ARRAY, *, base: str | Mapping[str, object] | None = None) -> Spec:
    """The spec of one array for `tensorstore.open`: plain JSON types, each shard as one chunk.

    What it opens cannot be written to.

    Args:
        store: The opened store.
        array: `"activations"`, `"layer"`, `"token"`, and if the store has token arrays, such as `"labels"`, their names and
            `"content_token"`.
        base: The store's folder for readers: an address, or TensorStore's JSON for it (a kvstore).

    Raises:
        ArgumentError: the store has no such array, or TensorStore has no driver for the address.
        CorruptShardError: shards are missing or short.

    >>> from saev_store import ShardStore
    >>> tensorstore_spec(ShardStore.open(SAMPLE), "token")["array"]
    [-1, 0, 1, 2, 3]
    """
    names = array_names(store)
    if not isinstance(array, str) or array not in names:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"{brief(array)} is not an array of this store; it has {', '.join(names)}", where="array")
    layout = store.layout
    values = coordinates(layout, labelled=True).get(array)
    if values is not None:
        transform = {"input_inclusive_min": [0], "input_exclusive_max": [len(values)], "input_labels": [array]}
        return {"driver": "array", "array": values.tolist(), "dtype": "int64", "transform": transform}
    store.validate(progress=False).raise_if_bad()
    folder = _kvstore(base if isinstance(base, Mapping) else usable_base(store, base))
    tokens = token_variables(store.token_arrays.described()).get(array)
    if tokens is not None:
        shape = (layout.n_examples, layout.content_tokens_per_example)
        return _zarr3(tokens.dtype, shape, shape, TOKEN_DIMS, {"c/0/0": tokens.file_name}, folder)
    last = layout.n_shards - 1
    in_last_file = store.transport.size(shard_name(last)) // layout.example_nbytes
    files = {f"c/{n}/0/0/0": shard_name(n) for n in range(layout.n_shards)}
    rest = layout.shape[1:]
    if in_last_file == layout.examples_per_shard or last == 0:
        return _zarr3(layout.dtype, layout.shape, (in_last_file, *rest), DIMS, files, folder)
    n_before = last * layout.examples_per_shard
    tail_file = {"c/0/0/0/0": files.pop(f"c/{last}/0/0/0")}
    before = _zarr3(layout.dtype, (n_before, *rest), (layout.examples_per_shard, *rest), DIMS, files, folder)
    tail = _zarr3(layout.dtype, (layout.n_examples - n_before, *rest), (in_last_file, *rest), DIMS, tail_file, folder)
    tail["transform"] = _moved_by(n_before, layout.shape)
    return {"driver": "stack", "layers": [before, tail]}


def _zarr3(
    data_type: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    dims: Sequence[str],
    files: Mapping[str, str],
    folder: Mapping[str, object],
) -> Spec:
    document = dict(array_document(data_type, shape, chunk, dims))
    for name in _NOT_IN_SPECS:
        document.pop(name)
    path = str(folder.get("path", ""))
    layers = [
        {"base": {**folder, "path": f"{path}/{name}" if path else name}, "exact": key, "strip_prefix": len(key)}
        for key, name in files.items()
    ]
    shards = {
        "driver": "zarr3",
        "kvstore": {"driver": "kvstack", "layers": layers},
        "metadata": document,
        # There is no zarr.json anywhere to compare it with.
        "open": True,
        "assume_metadata": True,
        # A shard that disappears is an error, and does not read as NaN.
        "fill_missing_data_reads": False,
    }
    # Every element of them, read only: TensorStore opens for writing too unless it is told otherwise, and this driver cannot write.
    return {
        "driver": "downsample",
        "downsample_factors": [1] * len(shape),
        "downsample_method": "stride",
        "base": shards,
    }


def _moved_by(n_before: int, shape: Sequence[int]) -> Spec:
    """The part of the whole tensor's coordinates that belongs to the last shard, and where they lead in it."""
    output = [{"input_dimension": axis, **({"offset": -n_before} if axis == 0 else {})} for axis in range(len(shape))]
    return {
        "input_inclusive_min": [n_before, 0, 0, 0],
        "input_exclusive_max": list(shape),
        "input_labels": list(DIMS),
        "output": output,
    }


def _kvstore(base: str | Mapping[str, object]) -> dict[str, object]:
    """TensorStore's name for a folder."""
    if isinstance(base, str) and "\\" in base:
        raise ArgumentError(f"{base!r} has a backslash, which TensorStore takes for a slash", where="base")
    if not isinstance(base, str):
        if "driver" not in base:
            raise ArgumentError(f"{brief(dict(base))} is no kvstore: it names no driver", where="base")
        return {**base, "path": str(base.get("path", "")).rstrip("/")}
    if base.startswith("/"):
        return {"driver": "file", "path": base}
    scheme, host, path, *_ = url_parts(base, where="base")
    match scheme:
        case "file" | "local":
            return {"driver": "file", "path": base.partition("://")[2]}
        case "s3" | "s3a":
            return {"driver": "s3", "bucket": host, "path": path.lstrip("/")}
        case "gs" | "gcs":
            return {"driver": "gcs", "bucket": host, "path": path.lstrip("/")}
        case "http" | "https":
            return {"driver": "http", "base_url": f"{scheme}://{host}", "path": path.lstrip("/")}
        case _:
            raise ArgumentError(
                f"TensorStore has no driver for {base!r}",
                where="base",
                remedy='Pass its own name of the folder, such as {"driver": "file", "path": "/data/…"}.',
            )
