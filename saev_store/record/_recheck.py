"""Compares what a model and a source give now with what a store holds."""

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

Recheck = Literal["exact", "close"]
#: With `recheck="close"`: the largest difference, as a part of the largest number.
_CLOSE = 0.01


class KeptExamples:
    """The examples that a store holds; `work` is None if a published one is repaired, which compares token arrays itself."""

    def __init__(
        self, store: Transport, layout: Layout, recheck: Recheck, *, saturate: bool, work: Work | None = None
    ) -> None:
        self._store, self._layout, self._recheck, self._saturate, self._work = store, layout, recheck, saturate, work

    def compare(self, recorded: Recorded, i: int) -> None:
        """Check that example `i` of `recorded` is what is there; `ResumeError` if it is not."""
        import torch

        self._compare_token_arrays(recorded, i)
        dtype, largest, fresh = self._layout.dtype, LARGEST[self._layout.dtype], recorded.acts[i]
        if self._saturate:
            fresh = torch.where(fresh.isfinite(), fresh.clamp(-largest, largest), fresh)
        fresh = fresh.to(getattr(torch, dtype)).contiguous()
        example = recorded.first + i
        there = torch.frombuffer(bytearray(self._read(example)), dtype=fresh.dtype).reshape(fresh.shape)
        if torch.equal(fresh.view(torch.uint8), there.view(torch.uint8)):
            return
        apart = _CLOSE * there.double().nan_to_num(0, 0, 0).abs().max().item()
        if self._recheck == "close" and there.double().allclose(fresh.double(), rtol=0, atol=apart, equal_nan=True):
            return
        raise ResumeError(
            f"example {example} is not what the model gives now",
            where=self._store.url,
            remedy='Go on with the model, on a machine like the first one and with as many threads. recheck="close" (--recheck close) '
            "accepts other rounding. An unfinished store is thrown away by `discard_unfinished`.",
        )

    def _compare_token_arrays(self, recorded: Recorded, i: int) -> None:
        """Check the token arrays of an example of an unfinished store."""
        shard_idx, row = divmod(recorded.first + i, self._layout.examples_per_shard)
        receipt = None if self._work is None else self._work.receipt(shard_idx)
        if self._work is None or receipt is None or not receipt.tokens:
            return  # without labels, which the writer refuses to change
        for array in self._work.metadata.recordable:
            nbytes = array.example_nbytes(self._layout)
            there = self._work.read_tokens(array, shard_idx, receipt) or b""
            fresh = np.asarray(recorded.token_arrays[array.name][i]).astype(array.numpy_dtype)
            if fresh.tobytes() != there[row * nbytes : (row + 1) * nbytes]:
                raise ResumeError(
                    f"{array.name} of example {recorded.first + i} are not what the source gives now",
                    where=self._store.url,
                    remedy="Continue with the source that it was begun with.",
                )

    def _read(self, example: int) -> bytes:
        """The bytes of an example, all layers."""
        shard_idx, row = divmod(example, self._layout.examples_per_shard)
        nbytes = self._layout.example_nbytes
        (found,) = self._store.get_ranges(shard_name(shard_idx), starts=[row * nbytes], ends=[(row + 1) * nbytes])
        return bytes(np.asarray(found))
