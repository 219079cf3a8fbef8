"""Whether a model and a source still give what a store holds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from saev_store.core.dtypes import LARGEST
from saev_store.core.layout import shard_name
from saev_store.errors import ResumeError

if TYPE_CHECKING:
    from saev_store.core.layout import Layout
    from saev_store.record._examples import Recorded
    from saev_store.transport import Transport
    from saev_store.writer.work import Work

Recheck = Literal["exact", "close", "off"]
#: With `recheck="close"`: the largest difference, as a part of the largest number.
_CLOSE = 0.01


class KeptExamples:
    """The examples that a store holds."""

    def __init__(self, store: Transport, work: Work | None, layout: Layout, *, saturate: bool) -> None:
        self._store, self._work, self._layout, self._saturate = store, work, layout, saturate

    def compare(self, recorded: Recorded, i: int, recheck: Recheck) -> None:
        """Check that example `i` of `recorded` is what is there; `ResumeError` if it is not."""
        import torch

        layout, example = self._layout, recorded.first + i
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
            where=self._store.url,
            remedy="Continue on a machine like the first one and with as many threads, or throw the store away with "
            '`discard_unfinished`. If only rounding differs, recheck="close" continues.',
        )

    def _compare_token_arrays(self, recorded: Recorded, i: int) -> None:
        """Check the token arrays of an example of an unfinished store; a repair compares those of a published one itself."""
        example, work = recorded.first + i, self._work
        if work is None or not recorded.token_arrays:
            return
        shard_idx, row = divmod(example, self._layout.examples_per_shard)
        receipt = work.receipt(shard_idx)
        if receipt is None or not receipt.tokens:  # recorded without labels, which the writer refuses to change
            return
        for array in work.metadata.recordable:
            n_bytes = array.example_nbytes(self._layout)
            there = work.read_tokens(array, shard_idx, receipt) or b""
            kept = np.frombuffer(there[row * n_bytes : (row + 1) * n_bytes], array.numpy_dtype)
            fresh = np.asarray(recorded.token_arrays[array.name][i]).astype(array.numpy_dtype)
            if fresh.tobytes() != kept.tobytes():
                raise ResumeError(
                    f"{array.name} of example {example} are not what the source gives now: {int((fresh != kept).sum())} of "
                    f"{kept.size} differ",
                    where=self._store.url,
                    remedy="Continue with the source that it was begun with, or throw the store away with `discard_unfinished`.",
                )

    def _read(self, example: int) -> bytes:
        """The bytes of an example, all layers."""
        shard_idx, row = divmod(example, self._layout.examples_per_shard)
        nbytes = self._layout.example_nbytes
        (found,) = self._store.get_ranges(shard_name(shard_idx), starts=[row * nbytes], ends=[(row + 1) * nbytes])
        return bytes(np.asarray(found))
