"""The options of loaders, each once for NumPy and for PyTorch, and the rank of a process where none is given."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol, TypedDict, cast, get_args

from saev_store.errors import ArgumentError
from saev_store.loaders._medium import Kind


class ReadArguments(TypedDict, total=False):
    """The fields of `ReadOptions` as keyword arguments."""

    batch_size: int
    drop_last: bool
    rank: int | None
    world: int | None
    n_threads: int | None
    prefetch_batches: int | None
    batch_timeout_s: float
    scale_norm: bool | float
    medium: Kind | None
    read_bytes: int | None
    keep_pages: bool | None


class ShuffleArguments(ReadArguments, total=False):
    """The fields of `ShuffleOptions` as keyword arguments."""

    seed: int
    window_bytes: int | None
    window_blocks: int | None
    examples_per_block: int | None
    n_partitions: int | None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How rows are read and handed out.

    Attributes:
        batch_size: Rows of a batch of this rank.
        drop_last: Leave out a last batch that is not full.
        rank: This process among `world`. Default: found when an iteration begins, by torch.distributed where it is
            initialised, else by the environment variables RANK and WORLD_SIZE.
        world: How many processes share the work. Each takes an equal part of every global batch. Default: as for `rank`.
        n_threads: Reads in flight. Default: by the medium.
        prefetch_batches: Batches that may be ready and wait. Default: 2.
        batch_timeout_s: Seconds without a batch and without any arrived bytes before `DeadlineError`.
        scale_norm: Scale activations so that their mean L2 norm is sqrt(d_model), by a seeded sample of these rows; or by a
            number, such as `store.stats().scale(…)`. The state carries the factor.
        medium: What the shards lie on, to overrule detection: `"memory"`, `"cached"`, `"flash"`, `"disk"`, `"parallel"` or
            `"remote"`. It decides how many threads read, and how much at once.
        read_bytes: About how many bytes one task reads. Default: by the medium.
        keep_pages: Whether the page cache keeps what was read. Default: unless the store is much larger than memory.

    Raises:
        ArgumentError: an option is out of range; the message lists all of these.
    """

    batch_size: int = 16_384
    drop_last: bool = False
    rank: int | None = None
    world: int | None = None
    n_threads: int | None = None
    prefetch_batches: int | None = None
    batch_timeout_s: float = 30.0
    scale_norm: bool | float = False
    medium: Kind | None = None
    read_bytes: int | None = None
    keep_pages: bool | None = None

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ArgumentError("; ".join(problems.values()), where=", ".join(problems))

    def _problems(self) -> dict[str, str]:
        """What is wrong, by option."""
        problems = self._not_integers({"batch_size": 1})
        lowest = {"prefetch_batches": 1, "rank": 0, "world": 1, "n_threads": 1, "read_bytes": 1}
        problems |= self._not_integers(lowest, optional=True)
        if not problems and self.rank is not None and self.world is not None and self.rank >= self.world:
            problems["rank"] = f"rank is {self.rank} in a world of {self.world}; ranks count from 0"
        if not _is_positive(self.batch_timeout_s, finite=False):
            problems["batch_timeout_s"] = f"batch_timeout_s is {self.batch_timeout_s!r}; it must be a positive number"
        if not isinstance(self.scale_norm, bool) and not _is_positive(self.scale_norm):
            problems["scale_norm"] = f"scale_norm is {self.scale_norm!r}; it must be True, False or a positive number"
        if self.medium is not None and self.medium not in get_args(Kind):
            problems["medium"] = f"medium is {self.medium!r}; it must be one of {', '.join(get_args(Kind))}"
        return problems

    def _not_integers(self, lowest: dict[str, int], *, optional: bool = False) -> dict[str, str]:
        """What is wrong with options that are integers from a lowest one on."""
        problems: dict[str, str] = {}
        for name, low in lowest.items():
            value: object = getattr(self, name)
            if value is None and optional:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < low:
                problems[name] = f"{name} is {value!r}; it must be an integer of at least {low}"
        return problems


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions(ReadOptions):
    """How rows are shuffled, besides how they are read.

    Attributes:
        seed: Any integer. The order is a function of it and of the epoch.
        window_bytes: Memory for the window, of this rank. More mixes better; a window as large as the data gives exact
            permutations. Default: 2 GiB.
        window_blocks: Blocks in the window of one partition, instead of `window_bytes`.
        examples_per_block: Examples that are read and shuffled as one. Default: 1, and more where requests are expensive and
            neighbouring examples are neighbours in the file.
        n_partitions: Streams of the order: a multiple of `world` that divides the global batch. Default: 8 where possible.

    Raises:
        ArgumentError: an option is out of range; the message lists all of these.
    """

    seed: int = 17
    window_bytes: int | None = None
    window_blocks: int | None = None
    examples_per_block: int | None = None
    n_partitions: int | None = None

    def _problems(self) -> dict[str, str]:
        problems = super()._problems()
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            problems["seed"] = f"seed is {self.seed!r}; it must be an integer"
        lowest = {"window_bytes": 1, "window_blocks": 1, "examples_per_block": 1, "n_partitions": 1}
        return problems | self._not_integers(lowest, optional=True)


def _is_positive(value: object, *, finite: bool = True) -> bool:
    """Whether a value is a positive number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return float(value) > 0 and (math.isfinite(float(value)) or not finite)


class _Distributed(Protocol):
    """The part of `torch.distributed` that is used here."""

    def is_available(self) -> bool: ...
    def is_initialized(self) -> bool: ...
    def get_rank(self) -> int: ...
    def get_world_size(self) -> int: ...


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """This process and how many there are, now.

    What is given wins. The rest comes from torch.distributed where it is initialised, else from RANK and WORLD_SIZE where the
    environment has both (as torchrun sets them), else it is one process.

    Raises:
        ArgumentError: what is given contradicts what is found, or is not enough.
    """
    if rank is not None and world is not None:
        return int(rank), int(world)
    if world == 1:
        return 0, 1
    found = _from_torch() or _from_environment()
    found_rank, found_world = found or (0 if world is None else None, 1)
    if world is not None and (found_rank is None or found_world != world):
        raise ArgumentError(
            f"world is {world} and no rank is given, but "
            + (f"{found_world} processes were found" if found else "neither torch.distributed nor RANK tells it"),
            where="world",
            remedy="Give rank as well.",
        )
    if rank is not None and rank >= found_world:
        raise ArgumentError(
            f"rank is {rank} in a world of {found_world}; ranks count from 0",
            where="rank",
            remedy="Give world as well.",
        )
    return int(rank if rank is not None else found_rank or 0), found_world


def _from_torch() -> tuple[int, int] | None:
    """What torch.distributed says, which is not imported for it."""
    module = sys.modules.get("torch.distributed")
    if module is None:
        return None
    distributed = cast("_Distributed", module)
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _from_environment() -> tuple[int, int] | None:
    """What RANK and WORLD_SIZE say, where both are set."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not rank or not world:
        return None
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ArgumentError(
            f"the environment says RANK={rank!r} and WORLD_SIZE={world!r}; ranks count from 0 to WORLD_SIZE - 1",
            where="RANK",
            remedy="Correct the variables, or give rank and world.",
        )
    return int(rank), int(world)
