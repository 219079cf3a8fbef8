"""Stores made of arrays; a part of `ShardStore`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from saev_store.core.dtypes import StoredDtype
from saev_store.core.layout import IntArray

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore


class Importing:
    """The part of `ShardStore` for data that are not a store yet."""

    @classmethod
    def from_array(
        cls,
        array: object,
        root: str | os.PathLike[str],
        *,
        family: str,
        ckpt: str,
        layers: Sequence[int] | IntArray | None = None,
        cls_token: bool = False,
        dims: Sequence[str] | None = None,
        dtype: StoredDtype | None = None,
        token_arrays: Mapping[str, object] | None = None,
        hook_points: Sequence[str] | None = None,
        text: Mapping[str, object] | None = None,
        data: Mapping[str, object] | None = None,
        dataset: str | os.PathLike[str] | None = None,
        max_tokens_per_shard: int | None = None,
        max_block_bytes: int = 256 << 20,
        resume: bool = True,
        verify: bool = True,
        client: Client | str | None = None,
        storage_options: Mapping[str, object] | None = None,
        pad: bool | None = None,
        on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
        on_overflow: Literal["raise", "warn", "saturate"] = "raise",
        progress: bool | None = None,
    ) -> ShardStore:
        """Write an array as a new store below `root`, block by block, and open it.

        The store is named by its metadata, which hold the array's shape, dtype and a digest of eight of its examples: another array
        is another store. The same call continues after a crash; a store that is finished is opened. docs/importing.md has examples.

        Args:
            array: Activations, as an array of NumPy (also mapped from a file), zarr, h5py, xarray, dask or torch. Lazy ones are
                computed block by block by threads of this process.
            root: The folder of stores; created if need be.
            family: The family of models, such as "clip".
            ckpt: The model.
            layers: The label of each entry of the layer axis; None: the coordinate "layer" of an xarray array.
            cls_token: Whether token 0 is a CLS or BOS token, which token arrays leave out.
            dims: The names of the axes in their order: "example" and "d_model", and if there are such axes "layer" and "token". None: those
                of xarray, else (example, layer, token, d_model), (example, token, d_model) or (example, d_model).
            dtype: Of the store: "float32", "bfloat16" or "float16"; None keeps that of the array. Numbers are rounded to nearest even.
                None does not take float64, which no store holds.
            token_arrays: (examples, content tokens) for each token array, by name, of the same kinds as `array`.
            hook_points: Where in its layer each entry of the layer axis was taken; None: "resid_post".
            text: How texts were cut into examples, as in `new_metadata`.
            data: Describes the data set; `imported` is added to it.
            dataset: Where the data set is.
            max_tokens_per_shard: Budget of vectors per shard; None chooses one, as `new_metadata`.
            max_block_bytes: Read at most so much of the array at a time, or one example, or what it holds as one chunk. Two copies
                of it are in memory.
            resume: Continue an unfinished import, or begin one, and accept a finished store; False refuses both.
            verify: Compare what an earlier call has written with the array. An import that is continued then reads all of the array.
            client: A dask cluster whose workers write a dask array, each its own shards; they must reach `root`, and what the array is
                computed from. None: this process writes.
            storage_options: What fsspec hands to the file system of `root`.
            pad: Write the last shard at full size, its tail zeros.
            on_nonfinite: What to do with NaN and infinity.
            on_overflow: What to do with finite numbers that become infinite in the dtype of a 16-bit store.
            progress: Show a bar on stderr; default: when it is a terminal.

        Raises:
            ArgumentError: the array or an argument breaks a rule; the message names it.
            ResumeError: an unfinished import of it holds other numbers than the array has now.
            StoreExistsError: a finished one does, or `resume` is False.

        >>> import numpy as np
        >>> from saev_store import ShardStore
        >>> acts = np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)
        >>> store = ShardStore.from_array(acts, "memory://shards", family="vit", ckpt="tiny", layers=[11])
        >>> store.shape, store[2, 0, 3, :3].tolist()
        ((3, 1, 4, 8), [88.0, 89.0, 90.0])
        """
        from saev_store.writer.importing import ImportOptions, import_array

        return import_array(
            array, root, ImportOptions(resume, verify, max_block_bytes, pad, on_nonfinite, on_overflow, progress),
            layers=layers, dims=dims, dtype=dtype, token_arrays=token_arrays, data=data, cls_token=cls_token, client=client,
            storage_options=storage_options, family=family, ckpt=ckpt, hook_points=hook_points, text=text, dataset=dataset,
            max_tokens_per_shard=max_tokens_per_shard,
        )  # fmt: skip
