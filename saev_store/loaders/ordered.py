"""Batches in storage order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from saev_store.loaders._base import Loader
from saev_store.loaders._batches import Equipment, OrderedBatches, plan_of_rows
from saev_store.loaders._explain import Plan
from saev_store.loaders._reads import Runs
from saev_store.loaders._run import Batch


class OrderedLoader(Loader):
    """Batches in storage order: example by example, in it layer by layer, in that token by token. Always the same.

    A batch is a dict: `act` float32 (n, d_model), `example_idx` and `token_idx` int64 (n,), with several layers `layer`
    int64 (n,), and `token_labels` uint8 (n,) where labels were given (255 for special tokens, which have none).
    `token_idx` counts content tokens from 0; -1 is the special token. Memory of a batch is the consumer's for as long as
    he holds it, then it is used again.

    Args:
        rows: What to load: `store.sel(…)`.
        batch_size: Rows of a batch of this rank.
        drop_last: Leave out a last batch that is not full.
        labels: `store.labels`, to have them in the batches.
        rank: This process among `world`; each takes an equal slice of every global batch.
        world: How many processes share the work.
        n_threads: Reads in flight; default: what suits the medium.
        prefetch_batches: Batches that may be ready and wait.
        batch_timeout_s: How long to wait for a batch before `DeadlineError`.
        scale_norm: Scale activations so that their mean L2 norm is sqrt(d_model), by a seeded sample of these rows; or by a
            number, such as `store.stats().scale(…)`. The state carries the factor.
        medium: What the shards lie on, where what is found out is not right: `"memory"`, `"cached"`, `"flash"`, `"disk"`,
            `"parallel"` or `"remote"`. It decides how many threads read, and how much at once.
        read_bytes: About how much one read brings; default: what suits the medium.
        keep_pages: Whether what was read stays in the page cache; default: unless the store is much larger than memory.
        make_buffer: Makes the memory of a batch, such as pinned memory; default: plain memory.

    Raises:
        ArgumentError: a number is out of range.

    >>> from saev_store import ShardStore
    >>> store = ShardStore.open(SAMPLE)
    >>> with OrderedLoader(store.sel(layer=5, tokens="content"), batch_size=8) as loader:
    ...     [batch["act"].shape for batch in loader]
    [(8, 8), (8, 8), (8, 8), (4, 8)]
    """

    kind = "ordered"
    _n_extra_buffers = 3

    @property
    def _n_ahead(self) -> int:
        """Enough batches under way that all threads have something to read."""
        batch_bytes = self.batch_size * self._space.layout.vector_nbytes
        return min(1 + self._n_threads * self._read_bytes // max(batch_bytes, 1), 64)

    def _batches(self, epoch: int, equipment: Equipment) -> Callable[[int, int], Iterator[Batch]]:
        del epoch
        return OrderedBatches(
            self._space, self._batching, self._rank, n_ahead=self._n_ahead, equipment=equipment
        ).batches

    def _plan(self) -> Plan:
        layout, space = self._space.layout, self._space

        def runs(number: int) -> Runs:
            return plan_of_rows(space, *self._batching.rows_of_rank(number, self._rank))[1]

        plane_bytes = space.tokens.count * layout.vector_nbytes
        contiguous = len(space.layer_idx) == layout.n_layers and space.tokens.count == layout.tokens_per_example
        return Plan(
            extent_bytes=self._read_bytes if contiguous else min(plane_bytes, self._read_bytes),
            n_parts=len(self),
            runs=runs,
            n_vectors=-(-len(space) // self._world),
            n_buffers=self._prefetch + self._n_ahead + 2,
        )
