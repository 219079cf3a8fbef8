"""Whether a model and a source still give what a store holds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from saev_store.core.dtypes import LARGEST
from saev_store.core.layout import shard_name
from saev_store.errors import NotFoundError, ResumeError
from saev_store.transport import open_transport
from saev_store.writer.folder import token_rows_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from saev_store.record._examples import ExampleWriter, Recorded
    from saev_store.transport import Transport

Recheck = Literal["exact", "close", "off"]
#: With `recheck="close"`: the largest difference, as a part of the largest number.
_CLOSE = 0.01


class KeptExamples:
    """The examples that a store holds."""

    def __init__(self, writer: ExampleWriter, storage_options: Mapping[str, object] | None, *, saturate: bool) -> None:
        self._writer, self._storage_options, self._saturate = writer, storage_options, saturate
        self._transport: Transport | None = None

    def compare(self, recorded: Recorded, i: int, recheck: Recheck) -> None:
        """Check that example `i` of `recorded` is what is there; `ResumeError` if it is not."""
        import torch

        layout, example = self._writer.layout, recorded.first + i
        self._compare_token_arrays(recorded, i)
        fresh, largest = recorded.acts[i], LARGEST[layout.dtype]
        if self._saturate:
            fresh = torch.where(fresh.isfinite(), fresh.clamp(-largest, largest), fresh)
        fresh = fresh.to(getattr(torch, layout.dtype)).contiguous()
        there = torch.frombuffer(bytearray(self._read(example)), dtype=fresh.dtype).reshape(fresh.shape)
        if torch.equal(fresh.view(torch.uint8), there.view(torch.uint8)):
            return
        other = (fresh != there) & ~(fresh.isnan() & there.isnan())
        difference = (fresh.double() - there.double())[other].abs().max().item() if other.any() else 0.0
        finite = there.double()[there.isfinite()].abs()
        if recheck == "close" and difference <= _CLOSE * (finite.max().item() if len(finite) else 0.0):
            return
        n_other = int(other.sum())
        raise ResumeError(
            f"example {example} is not what the model gives now: {n_other} of {fresh.numel()} numbers differ, by up to "
            f"{difference:.3g}",
            where=self._writer.url,
            remedy="Continue on a machine like the first one and with as many threads, or throw the store away with "
            '`discard_unfinished`. If only rounding differs, recheck="close" continues.',
        )

    def _compare_token_arrays(self, recorded: Recorded, i: int) -> None:
        """Check the token arrays of an example of an unfinished store; a repair compares those of a published one itself."""
        metadata, example = self._writer.metadata, recorded.first + i
        if metadata is None or not recorded.token_arrays:
            return
        arrays = metadata.recordable
        shard, row = divmod(example, metadata.layout.examples_per_shard)
        try:
            there = self._row(
                token_rows_path(shard), row, sum(array.example_nbytes(metadata.layout) for array in arrays)
            )
        except NotFoundError:  # recorded without labels, which the writer refuses to change
            return
        for array in arrays:
            n_bytes = array.example_nbytes(metadata.layout)
            kept, there = np.frombuffer(there[:n_bytes], array.numpy_dtype), there[n_bytes:]
            fresh = np.asarray(recorded.token_arrays[array.name][i]).astype(array.numpy_dtype)
            if fresh.tobytes() != kept.tobytes():
                raise ResumeError(
                    f"{array.name} of example {example} are not what the source gives now: {int((fresh != kept).sum())} of "
                    f"{kept.size} differ",
                    where=self._writer.url,
                    remedy="Continue with the source that it was begun with, or throw the store away with `discard_unfinished`.",
                )

    def _read(self, example: int) -> bytes:
        """The bytes of an example, all layers."""
        layout = self._writer.layout
        shard, row = divmod(example, layout.examples_per_shard)
        return self._row(shard_name(shard), row, layout.example_nbytes)

    def _row(self, path: str, row: int, nbytes: int) -> bytes:
        """A row of a file of the store whose rows have `nbytes`."""
        if self._transport is None:
            self._transport = open_transport(self._writer.url, self._storage_options)
        (found,) = self._transport.get_ranges(path, starts=[row * nbytes], ends=[(row + 1) * nbytes])
        return bytes(np.asarray(found))
