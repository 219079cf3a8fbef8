"""Part of a recording that belongs to this process: as the caller gives it, or as torchrun and Slurm number their processes."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias, cast

from saev_store.errors import ArgumentError, brief

#: (rank, number of ranks), ranks from 0; `"auto"`: as this process was started.
Part: TypeAlias = tuple[int, int] | Literal["auto"]


def this_part(part: object) -> tuple[int, int] | None:
    """(rank, number of ranks) of this process, ranks from 0; None where no part was given.

    Args:
        part: `(rank, n)`, `"auto"` or None. `"auto"` is one process of one where the environment has no numbers.

    Raises:
        ArgumentError: it is none of these, or the environment contradicts itself.

    >>> this_part((2, 16))
    (2, 16)
    """
    if part is None:
        return None
    if part == "auto":
        return started_as()
    pair = cast("tuple[object, ...]", part) if isinstance(part, tuple) else ()
    if len(pair) == 2 and all(isinstance(value, int) and not isinstance(value, bool) for value in pair):
        rank, n = cast("tuple[int, int]", pair)
        if 0 <= rank < n:
            return rank, n
    raise ArgumentError(
        f"part is {brief(cast('object', part))}; it must be (rank, n) with 0 <= rank < n, or 'auto'",
        where="part",
        remedy="Ranks count from 0: of four processes the last one is part=(3, 4).",
    )


def started_as() -> tuple[int, int]:
    """(rank, number of ranks) of this process as torchrun or Slurm has started it; (0, 1) where neither has.

    torchrun sets RANK and WORLD_SIZE. In a job of Slurm the tasks of `srun` are counted by SLURM_PROCID and SLURM_NTASKS,
    those of an array by SLURM_ARRAY_TASK_ID. Each task of an array may have several processes: ranks then count through all.

    Raises:
        ArgumentError: variables contradict each other, or the numbers of the array have gaps.
    """
    array = "SLURM_ARRAY_TASK_"
    inner, n_inner = _counted("RANK", "WORLD_SIZE") or _counted("SLURM_PROCID", "SLURM_NTASKS") or (0, 1)
    if not os.environ.get(f"{array}ID") or _number(f"{array}COUNT") == 1:
        return inner, n_inner
    task, n, first, last = (_number(array + name) for name in ("ID", "COUNT", "MIN", "MAX"))
    step = max(1, _number(f"{array}STEP")) if os.environ.get(f"{array}STEP") else 1
    outer, rest = divmod(task - first, step)
    # `--array=1,5,9` has a first, a last and a count, and no variable has the place of 5.
    if rest or last - first != (n - 1) * step or not 0 <= outer < n:
        raise ArgumentError(
            f"task {task} is one of {n} of a Slurm array from {first} to {last}, whose numbers have gaps",
            where="part",
            remedy="Give the part of each task, or start the array as 1-N.",
        )
    return outer * n_inner + inner, n * n_inner


def this_device(device: str | None) -> str | None:
    """The device of this rank: where several share a machine, and `device` is `"cuda"`, a GPU for each of them."""
    text = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    if device != "cuda" or not text.isdecimal():
        return device
    import torch

    # Where Slurm shows each task one GPU, that one is number 0 to all of them.
    return f"cuda:{int(text) % max(1, torch.cuda.device_count())}"


def starts_several() -> bool:
    """Return True if this process is one of several, as far as the environment has numbers; never raises."""
    try:
        return started_as()[1] > 1
    except ArgumentError:
        return True


def _counted(rank_name: str, n_name: str) -> tuple[int, int] | None:
    """A rank and how many there are, from two variables; None where one of them is not set."""
    if not os.environ.get(rank_name) or not os.environ.get(n_name):
        return None
    rank, n = _number(rank_name), _number(n_name)
    if rank < n:
        return rank, n
    raise ArgumentError(
        f"the environment has {rank_name}={rank} and {n_name}={n}; ranks count from 0 to {n_name} - 1",
        where="part",
        remedy="Correct the variables, or give the part.",
    )


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if text.isdecimal():
        return int(text)
    raise ArgumentError(
        f"{name} is {text!r} in the environment; it must be a number",
        where="part",
        remedy="Correct it, or give the part.",
    )
