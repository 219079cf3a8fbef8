"""What a copy of some layers, or in another dtype, reads of its source; nothing of a block that is not what was promised."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store._runtime.threads import ahead
from saev_store.core.indexing import Progression
from saev_store.core.layout import RESID_POST, shard_name
from saev_store.documents import Metadata
from saev_store.errors import CorruptShardError
from saev_store.names import DIGESTS_NAME
from saev_store.store.reader import NumberArray
from saev_store.store.store import ShardStore
from saev_store.transport import Buffer
from saev_store.validation import Promised, promised_digests
from saev_store.writer import FileDigests
from saev_store.writer._digests import block_ranges, digest
from saev_store.writer.folder import Folder

#: How much is read, and kept in memory, at a time.
_BATCH_BYTES = 64 << 20
_N_AHEAD = 4


def damaged(source: Folder, name: str, block_idx: int) -> CorruptShardError:
    """What a block of the source is that is not what was promised."""
    return CorruptShardError(
        f"block {block_idx} of the source is not what its digests.json says",
        where=source.where(name),
        remedy="Run `saev-store validate --deep` on the source; repair it first.",
    )


def usable_digests(store: ShardStore) -> Promised:
    """The digests of the source; of no file where it has no digests.json.

    Raises:
        CorruptShardError: they cannot be used, or do not speak of all large files: those of the copy would call damaged vectors
            right.
    """
    are_declared, arrays = store.metadata.declares_token_arrays, store.token_arrays.described()
    promised = promised_digests(store.transport, store.layout, arrays, are_declared=are_declared, must_read=True)
    if problems := [problem for problem in promised.problems if problem.severity == "error"]:
        raise CorruptShardError(
            "; ".join(problem.message for problem in problems),
            where=f"{store.url}/{DIGESTS_NAME}",
            remedy="Or delete it, and what is there now is taken for right.",
            problems=problems,
        )
    return promised


def promises(store: ShardStore) -> Promised | None:
    """The digests of the source, which its token arrays have; None where it has no digests.

    Raises:
        CorruptShardError: a block of a token array is not what was promised; and as `usable_digests`.
    """
    arrays, source, promised = store.token_arrays.described(), Folder(store.transport, ""), usable_digests(store)
    for array in arrays:
        if (digests := promised.files.get(array.file_name)) is not None:
            of_file = FileDigests(array.nbytes(store.layout), digests)
            wrong = source.first_difference(array.file_name, of_file, promised.block_bytes)
            if wrong is not None:
                raise damaged(source, array.file_name, wrong[0] // promised.block_bytes)
    return promised if promised.files else None


class Kept(NamedTuple):
    """What a copy has of each example of its source.

    Attributes:
        layers: Positions of the layers.
        tokens: Positions of the tokens.
    """

    layers: list[int]
    tokens: slice

    @classmethod
    def of(cls, store: ShardStore, metadata: Metadata, tokens: Progression) -> Kept:
        """What a copy with this metadata and these tokens has."""
        layout = metadata.layout
        # Pairs also where the copy has no hook points: the source may have several of a layer.
        hook_points = layout.hook_points or (RESID_POST,) * layout.n_layers
        layers = [store.layout.layer_index(pair) for pair in zip(layout.layers, hook_points, strict=True)]
        return cls(layers, slice(tokens.start, tokens.start + tokens.count))


def batches(
    store: ShardStore, kept: Kept, *, promised: Promised | None, first: int, end: int
) -> Generator[tuple[int, NumberArray]]:
    """The first example of each batch and its activations, (examples, layers, tokens, d_model), as they are stored.

    Where the source promises digests, the blocks that these examples are in (of examples larger than a batch, those that the kept layers
    are in) are read, once, and compared; else only what is kept.

    Raises:
        CorruptShardError: a block is not what was promised.
    """
    layout, (layers, tokens) = store.layout, kept
    n_tokens = tokens.stop - tokens.start
    compared = None if promised is None else _Compared(store, promised)
    nbytes = len(layers) * n_tokens * layout.vector_nbytes if compared is None else layout.example_nbytes
    step = max(1, _BATCH_BYTES // nbytes)
    for start in range(first, end, step):
        stop = min(start + step, end)
        # Layer by layer, so that each is contiguous where it is measured.
        batch = np.empty((len(layers), stop - start, n_tokens, layout.d_model), dtype=store.dtype)
        if compared is not None:
            compared.fill(batch, kept, start)
        else:
            for into, layer_idx in zip(batch, layers, strict=True):
                store.read((slice(start, stop), layer_idx, tokens), dtype="stored", out=into)
        yield start, batch.swapaxes(0, 1)


class _Compared:
    """Reads examples, and compares each block that they are in; the last one is kept, for what follows begins in it."""

    def __init__(self, store: ShardStore, promised: Promised) -> None:
        self._source, self._promised, self._layout = Folder(store.transport, ""), promised, store.layout
        self._dtype = store.dtype
        self._last: tuple[int, int, Buffer] | None = None

    def fill(self, batch: NumberArray, kept: Kept, start: int) -> None:
        """Fill (layers, examples, tokens, d_model) with what is kept of the examples from `start` on."""
        layout, n = self._layout, batch.shape[1]
        if n * layout.example_nbytes <= _BATCH_BYTES:
            whole = self._read(start, n, 0, layout.n_layers)
            for into, layer_idx in zip(batch, kept.layers, strict=True):
                into[...] = whole[:, layer_idx, kept.tokens]
            return
        for into, layer_idx in zip(batch, kept.layers, strict=True):  # one large example
            into[...] = self._read(start, n, layer_idx, 1)[:, 0, kept.tokens]

    def _read(self, start: int, n: int, layer_idx: int, n_layers: int) -> NumberArray:
        """(examples, layers, tokens, d_model) as they are stored: several whole examples, or some layers of one."""
        layout = self._layout
        found = np.empty((n, n_layers, *layout.shape[2:]), dtype=self._dtype)
        memory, stop = found.reshape(-1).view(np.uint8), start + n
        while start < stop:
            shard_idx, in_shard = divmod(start, layout.examples_per_shard)
            n = min(stop - start, layout.examples_in(shard_idx) - in_shard)
            nbytes = n * n_layers * layout.tokens_per_example * layout.vector_nbytes
            at = (in_shard * layout.n_layers + layer_idx) * layout.tokens_per_example * layout.vector_nbytes
            self._fill(memory[:nbytes], shard_idx, at)
            memory, start = memory[nbytes:], start + n
        return found

    def _fill(self, memory: npt.NDArray[np.uint8], shard_idx: int, at: int) -> None:
        """Fill memory with what stands in a shard from `at` on."""
        name, nbytes = shard_name(shard_idx), self._layout.used_nbytes(shard_idx)
        blocks = list(block_ranges(nbytes, self._promised.block_bytes))
        first, end = at // self._promised.block_bytes, at + len(memory)
        wanted = [(number, *block) for number, block in enumerate(blocks[first:], first) if block[0] < end]

        def read(block: tuple[int, int, int]) -> Buffer:
            number, start, stop = block
            if self._last is not None and self._last[:2] == (shard_idx, number):
                return self._last[2]
            return self._source.get_range(name, start, stop)

        digests = self._promised.files.get(name)
        if digests is None:  # a worker of a cluster reads them later
            raise CorruptShardError("digests.json was replaced meanwhile", where=self._source.where(DIGESTS_NAME))
        with closing(ahead(read, wanted, _N_AHEAD)) as found:
            for (number, start, stop), block in zip(wanted, found, strict=True):
                if digest(block) != digests[number]:
                    raise damaged(self._source, name, number)
                begin, last = max(start, at), min(stop, end)
                memory[begin - at : last - at] = np.frombuffer(block, np.uint8)[begin - start : last - start]
                self._last = (shard_idx, number, block)
