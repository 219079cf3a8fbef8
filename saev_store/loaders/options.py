"""The options of a loader, and the rank of a process if none is given."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeVar, cast, get_args

from saev_store.core.arguments import check_choice, check_count, check_flag, check_number
from saev_store.errors import ArgumentError, brief, kind_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Order = Literal["shuffled", "stored"]
#: Fixed, because the order depends on it.
WINDOW_BYTES = 4 << 30
#: Streams of a shuffled order if none are given. Any number of ranks that divides it can continue a state.
_N_PARTITIONS = 8


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of order, reads and batches.

    Attributes:
        batch_size: Rows of a batch of this rank.
        order: `"shuffled"`, or `"stored"` for storage order.
        seed: Any integer. A shuffled order is a function of it and of the epoch.
        window_bytes: Memory for rows of this rank, in the dtype of the batches; half of it is one pool. A larger window mixes better.
            The order depends on it. Pools of storage order have 64 MiB at most, or one batch.
        early_start: Begin an epoch with small pools, so that its first batch comes early. The first batches are mixed less.
        n_partitions: Streams of a shuffled order: a multiple of `world` that divides the global batch. Default: 8 if possible.
        drop_last: Leave out a last batch that is not full.
        rank: Number of this process among `world`. Default: found when an iteration begins, by torch.distributed if it is initialised,
            otherwise by the environment variables RANK and WORLD_SIZE.
        world: Number of processes that share the work. Each takes an equal part of every global batch. Default: as for `rank`.
        token_arrays: Names of token arrays of the store to have in the batches, such as `("token_ids",)`.
        labels: Have `token_labels` in the batches if the store has labels.
        n_threads: Threads that read. Default: 16 for a remote store, otherwise one per core, from 4 to 16.
        batch_timeout_s: Seconds without a batch and without any finished read before `DeadlineError`.

    Raises:
        ArgumentError: an option is out of range.

    >>> LoaderOptions(batch_size=256, order="stored").drop_last
    False
    """

    batch_size: int = 16_384
    order: Order = "shuffled"
    seed: int = 17
    window_bytes: int = WINDOW_BYTES
    early_start: bool = True
    n_partitions: int | None = None
    drop_last: bool = False
    rank: int | None = None
    world: int | None = None
    token_arrays: Sequence[str] = ()
    labels: bool = False
    n_threads: int | None = None
    batch_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        found: dict[str, object] = {"batch_timeout_s": check_number(self.batch_timeout_s, name="batch_timeout_s")}
        check_choice(self.order, get_args(Order), name="order")
        for name in ("batch_size", "window_bytes", "n_partitions", "world", "n_threads"):
            value = cast("object", getattr(self, name))
            if value is not None or name not in ("n_partitions", "world", "n_threads"):
                found[name] = check_count(value, name=name)
        if self.rank is not None:
            found["rank"] = check_count(self.rank, name="rank", least=0)
        found["seed"] = check_count(self.seed, name="seed", least=-(2**63))
        for name in ("early_start", "drop_last", "labels"):
            found[name] = check_flag(getattr(self, name), name=name)
        names = self.token_arrays
        # Callers may not check types, and a text is a sequence of texts.
        if not isinstance(names, (list, tuple)) or not all(isinstance(cast("object", one), str) for one in names):
            raise ArgumentError(f"token_arrays is {brief(names)}; it must be a list of names", where="token_arrays")
        found["token_arrays"] = tuple(self.token_arrays)
        self.__dict__.update(found)

    def partitions_for(self, world: int) -> int | None:
        """Return the number of streams for a number of ranks; None for storage order."""
        if self.order == "stored":
            return None
        if self.n_partitions is not None:
            return self.n_partitions
        whole = self.batch_size * world
        return max((n for n in range(world, _N_PARTITIONS + 1, world) if whole % n == 0), default=world)


def chosen(kind: type[T], options: object, changed: Mapping[str, object]) -> T:
    """Return options, by default those of their class, with other values of some fields.

    Raises:
        ArgumentError: they are of another class, a name is not a field, or a value is out of range.
    """
    given = kind() if options is None else options
    if not isinstance(given, kind):
        raise ArgumentError(f"options is {kind_of(given)}; it must be {kind.__name__}(…)", where="options")
    known = {field.name for field in fields(given)}
    for name in changed:
        if name not in known:
            raise ArgumentError(f"{name} is not an option", where=name)
    return replace(given, **changed)


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return the rank of this process and the number of processes, as they are now.

    They are those of torch.distributed if it is initialised, which is not imported for it; otherwise RANK and WORLD_SIZE if the environment
    has both (as torchrun sets them); otherwise it is one process.

    Raises:
        ArgumentError: one is given without the other, or `rank` is not below `world`.

    >>> rank_and_world(1, 4)
    (1, 4)
    """
    where, found = "rank", (rank, world)
    if found == (None, None):
        module = sys.modules.get("torch.distributed")
        if module is not None and module.is_available() and module.is_initialized():
            return module.get_rank(), module.get_world_size()
        texts = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not all(texts):
            return 0, 1
        where, found = "RANK", tuple(int(text) if text.isdecimal() else None for text in texts)
    if found[0] is None or found[1] is None or found[0] >= found[1]:
        raise ArgumentError(
            f"rank is {found[0]} and world is {found[1]}; both are needed, and ranks count from 0 to world - 1",
            where=where,
            remedy="Give both rank and world, or neither.",
        )
    return found[0], found[1]
