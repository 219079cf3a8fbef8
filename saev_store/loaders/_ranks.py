"""Which of several processes this is."""

from __future__ import annotations

import os
import sys
from typing import Protocol, cast

from saev_store.errors import ArgumentError


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
