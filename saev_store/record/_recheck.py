"""Whether a model still gives what a store holds of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from saev_store.core.dtypes import LARGEST
from saev_store.core.layout import shard_name
from saev_store.errors import ResumeError
from saev_store.transport import open_transport

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
        fresh, largest = recorded.acts[i], LARGEST[layout.dtype]
        if self._saturate:
            fresh = torch.where(fresh.isfinite(), fresh.clamp(-largest, largest), fresh)
        fresh = fresh.to(getattr(torch, layout.dtype)).contiguous()
        there = torch.frombuffer(bytearray(self._read(example)), dtype=fresh.dtype).reshape(fresh.shape)
        if torch.equal(fresh.view(torch.uint8), there.view(torch.uint8)):
            return
        difference = (fresh.double() - there.double()).abs().max().item()
        if recheck == "close" and difference <= _CLOSE * there.double().abs().max().item():
            return
        n_other = int((fresh != there).sum())
        raise ResumeError(
            f"example {example} is not what the model gives now: {n_other} of {fresh.numel()} numbers differ, by up to "
            f"{difference:.3g}",
            where=self._writer.url,
            remedy="Continue on a machine like the first one and with as many threads. If only rounding differs, "
            'recheck="close" continues; else throw the store away with `discard_unfinished`.',
        )

    def _read(self, example: int) -> bytes:
        """The bytes of an example, all layers."""
        if self._transport is None:
            self._transport = open_transport(self._writer.url, self._storage_options)
        layout = self._writer.layout
        shard, row = divmod(example, layout.examples_per_shard)
        start = row * layout.example_nbytes
        (found,) = self._transport.get_ranges(shard_name(shard), starts=[start], ends=[start + layout.example_nbytes])
        return bytes(np.asarray(found))
