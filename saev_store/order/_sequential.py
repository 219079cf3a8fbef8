"""The ordered order: storage order, cut into batches and, for several ranks, each batch into slices."""

from __future__ import annotations

from dataclasses import dataclass

from saev_store.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Batching:
    """How many batches an epoch has, and which rows a rank takes of each; all closed forms.

    Args:
        n_rows: Rows of an epoch, over all ranks.
        batch_size: Rows of a full batch, over all ranks.
        drop_last: Leave out the last batch where it would not be full.
        world: How many ranks share the work; divides `batch_size`.

    Raises:
        ArgumentError: a number is out of range.

    >>> batching = Batching(n_rows=10, batch_size=4, drop_last=False, world=2)
    >>> len(batching), [batching.rows_of_rank(2, rank) for rank in (0, 1)]
    (3, [(8, 9), (9, 10)])
    """

    n_rows: int
    batch_size: int
    drop_last: bool
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world < 1 or self.batch_size % self.world:
            raise ArgumentError(
                f"a batch of {self.batch_size} rows cannot be shared by {self.world} ranks; it must be a positive multiple",
                where="batch_size",
            )

    def __len__(self) -> int:
        return self.n_rows // self.batch_size if self.drop_last else -(-self.n_rows // self.batch_size)

    @property
    def n_samples(self) -> int:
        """Rows that are handed out in an epoch, over all ranks, without those that fill up."""
        return len(self) * self.batch_size if self.drop_last else self.n_rows

    def rows_of_rank(self, batch: int, rank: int) -> tuple[int, int]:
        """The half-open range of rows of a batch that a rank takes.

        All ranks take equally many. Where that does not come out even (only in a last, partial batch), ranges reach past
        `n_rows`; the caller repeats the last row.
        """
        here = min(self.batch_size, self.n_rows - batch * self.batch_size)
        per_rank = -(-here // self.world)
        start = batch * self.batch_size + rank * per_rank
        return start, start + per_rank
