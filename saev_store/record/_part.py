"""Recording by several processes: which shards one of them records, and publication when all are there.

What is done is counted in whole shards, so any number of ranks can continue what any other number has begun.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from saev_store.documents import METADATA_MAX_NBYTES, parse_metadata
from saev_store.errors import ArgumentError, NotFoundError
from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.sources.address import split_address
from saev_store.store.opening import exists
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.validation import merge_ranges
from saev_store.writer.create import check_part
from saev_store.writer.publish import publish
from saev_store.writer.work import Work, part_shards, read

if TYPE_CHECKING:
    from collections.abc import Mapping

#: (rank, number of ranks), ranks from 0; `"auto"`: as torchrun or Slurm has started this process.
Part: TypeAlias = tuple[int, int] | Literal["auto"]
_REMEDY = "Correct the variables, or give the part."


@dataclass(frozen=True)
class RecordedPart:
    """A part that is recorded, of a store that is not published yet because others are not.

    Attributes:
        url: Where the store will be.
        part: (rank, number of ranks) of this part.
        missing: The half-open ranges of examples that other ranks had not recorded when this one was done.
    """

    url: str
    part: tuple[int, int]
    missing: tuple[tuple[int, int], ...]


def this_part(part: Part | None) -> tuple[int, int] | None:
    """(rank, number of ranks) of this process, ranks from 0; None if no part was given.

    Raises:
        ArgumentError: it is neither a rank below a number of ranks nor `"auto"`, or the environment contradicts itself.

    >>> this_part((2, 16))
    (2, 16)
    """
    found = _started_as() if part == "auto" else part
    return found and check_part(found)


def _started_as() -> tuple[int, int]:
    """(rank, number of ranks) of this process as torchrun or Slurm has started it; (0, 1) if neither has.

    torchrun sets RANK and WORLD_SIZE. In a job of Slurm the tasks of `srun` are counted by SLURM_PROCID and SLURM_NTASKS,
    those of an array by SLURM_ARRAY_TASK_ID. Each task of an array may have several processes: ranks then count through all.

    Raises:
        ArgumentError: variables contradict each other, or the numbers of the array have gaps.
    """
    inner, n_inner = _counted("RANK", "WORLD_SIZE") or _counted("SLURM_PROCID", "SLURM_NTASKS") or (0, 1)
    array = "SLURM_ARRAY_TASK_"
    if not os.environ.get(f"{array}ID") or _number(f"{array}COUNT") == 1:
        return inner, n_inner
    task, n, first, last = (_number(array + name) for name in ("ID", "COUNT", "MIN", "MAX"))
    step = _number(f"{array}STEP") if os.environ.get(f"{array}STEP") else 1
    # `--array=1,5,9` has a first, a last and a count, and no variable has the place of 5.
    if task not in range(first, last + 1, step) or last - first != (n - 1) * step:
        raise ArgumentError(
            f"task {task} is one of {n} of a Slurm array from {first} to {last}, whose numbers have gaps",
            where="part",
            remedy="Give the part of each task, or start the array as 1-N.",
        )
    return (task - first) // step * n_inner + inner, n * n_inner


def _counted(rank_name: str, n_name: str) -> tuple[int, int] | None:
    """A rank and a number of ranks, from two variables; None if one of them is not set."""
    if not os.environ.get(rank_name) or not os.environ.get(n_name):
        return None
    return check_part((_number(rank_name), _number(n_name)))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if text.isdecimal():
        return int(text)
    raise ArgumentError(f"{name} is {text!r} in the environment; it must be a number", where="part", remedy=_REMEDY)


def this_device(device: str | None) -> str | None:
    """The device of this rank: if several share a machine, and `device` is `"cuda"`, a GPU for each of them."""
    text = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    if device != "cuda" or not text.isdecimal():
        return device
    import torch

    # If Slurm shows each task one GPU, that one is number 0 to all of them.
    return f"cuda:{int(text) % max(1, torch.cuda.device_count())}"


def part_examples(work: Work, part: tuple[int, int] | None) -> range:
    """The examples of a part, (rank, number of ranks); None: all of them."""
    shards = part_shards(work.layout.n_shards, *(part or (0, 1)))
    return (
        range(work.layout.example_range(shards[0])[0], work.layout.example_range(shards[-1])[1]) if shards else range(0)
    )


def missing_examples(work: Work, part: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    """The half-open ranges of examples of a part whose shards are not durable, neighbours merged; of a published store none."""
    shards = part_shards(work.layout.n_shards, *(part or (0, 1)))
    receipts = zip(shards, work.receipts(shards), strict=True)
    found = [work.layout.example_range(shard) for shard, receipt in receipts if receipt is None]
    return [] if found and work.is_published() else list(merge_ranges(found))


def finalize(url: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None) -> ShardStore:
    """Publish a store whose parts are all recorded, and open it; a published one is only opened.

    The last rank of `record(…, part=…)` publishes the store by itself. This is for when it could not.

    Args:
        url: The folder of the store: `RecordedPart.url`.
        storage_options: Options of its file system.

    Raises:
        IncompleteStoreError: examples are missing; the message names them. The same recording, by any number of ranks, adds them.
        NotFoundError: nothing was begun there.
        CorruptShardError: the file of a shard is not what was recorded.
    """
    transport = open_transport(url, storage_options)
    if not exists(transport, METADATA_NAME):
        folder, name = split_address(transport.url)
        root = open_transport(folder, storage_options)
        raw = read(root, f"{WORK_FOLDER}/{name}/{METADATA_NAME}", max_bytes=METADATA_MAX_NBYTES)
        if raw is None:
            raise NotFoundError(
                "no recording was begun there", where=transport.url, remedy="Name the folder of the store itself."
            )
        publish(Work(root, parse_metadata(raw, where=transport.url), name=name))
    return ShardStore.open(transport)
