"""Which part of a recording this process records: as the caller says, or as torchrun and Slurm number their processes."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias, cast

from saev_store.errors import ArgumentError, brief

#: (rank, number of ranks), ranks from 0; `"auto"`: as this process was started.
Part: TypeAlias = tuple[int, int] | Literal["auto"]


def this_part(part: object) -> tuple[int, int] | None:
    """(rank, number of ranks) of this process, ranks from 0; None where nothing was said of parts.

    Args:
        part: `(rank, n)`, `"auto"` or None. `"auto"` is one process of one where the environment says nothing.

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
    outer, n_outer = _in_array()
    inner, n_inner = _counted("RANK", "WORLD_SIZE") or _counted("SLURM_PROCID", "SLURM_NTASKS") or (0, 1)
    return outer * n_inner + inner, n_outer * n_inner


def this_device(device: str | None) -> str | None:
    """The device of this rank: where several share a machine, and `device` is `"cuda"`, a GPU for each of them."""
    text = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    if device != "cuda" or not text.isdecimal():
        return device
    import torch

    # Where Slurm shows each task one GPU, that one is number 0 to all of them.
    return f"cuda:{int(text) % max(1, torch.cuda.device_count())}"


def starts_several() -> bool:
    """Whether this process is one of several, as far as the environment says; never raises."""
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
        f"the environment says {rank_name}={rank} and {n_name}={n}; ranks count from 0 to {n_name} - 1",
        where="part",
        remedy="Correct the variables, or give the part.",
    )


def _in_array() -> tuple[int, int]:
    """The position of this task in a Slurm array, and the number of its tasks."""
    if not os.environ.get("SLURM_ARRAY_TASK_ID") or _number("SLURM_ARRAY_TASK_COUNT") == 1:
        return 0, 1
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")
    task, n, first, last = map(_number, names)
    step = max(1, _number("SLURM_ARRAY_TASK_STEP")) if os.environ.get("SLURM_ARRAY_TASK_STEP") else 1
    position, rest = divmod(task - first, step)
    # `--array=1,5,9` has a first, a last and a count, but which one is 5 is not told.
    if rest or last - first != (n - 1) * step or not 0 <= position < n:
        raise ArgumentError(
            f"task {task} is one of {n} of a Slurm array from {first} to {last}, whose numbers have gaps",
            where="part",
            remedy="Give the part of each task, or start the array as 1-N.",
        )
    return position, n


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if text.isdecimal():
        return int(text)
    said = f"{name}={text!r}" if text else f"nothing of {name}"
    raise ArgumentError(
        f"the environment says {said}; it must be a number", where="part", remedy="Correct it, or give the part."
    )
