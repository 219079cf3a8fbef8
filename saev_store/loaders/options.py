"""The options of loaders, each once for NumPy and for PyTorch, and the rank of a process where none is given."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field as DataclassField
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import wraps
from typing import Annotated, ClassVar, Protocol, TypedDict, TypeVar, cast, dataclass_transform

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.loaders._medium import Kind

T = TypeVar("T")


class _Options(Protocol):
    """Any dataclass of pydantic."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[object]]]
    __pydantic_fields__: ClassVar[dict[str, FieldInfo]]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def options_class(error: type[ArgumentError], *, kw_only: bool = True) -> Callable[[type[T]], type[T]]:
    """Makes a frozen dataclass whose values pydantic checks. All that is wrong comes in one error, without credentials.

    Args:
        error: Raised instead of pydantic's.
        kw_only: Whether fields are keyword-only.
    """

    def made_of(cls: type[T]) -> type[T]:
        """The dataclass."""
        settings = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        made = cast("type[T]", dataclass(config=settings, frozen=True, kw_only=kw_only)(cls))
        check: Callable[..., None] = made.__init__

        @wraps(check)
        def init(self: object, *args: object, **kwargs: object) -> None:
            """Check the values; all problems come in one error."""
            problems: dict[str, str] = {}
            try:
                check(self, *args, **kwargs)
            except pydantic.ValidationError as invalid:
                problems = _problems(made, invalid)
            if problems:
                raise error("; ".join(problems.values()), where=", ".join(problems))

        made.__init__ = init
        return made

    return made_of


def _problems(cls: type[object], invalid: pydantic.ValidationError) -> dict[str, str]:
    """What is wrong with each option, by name."""
    found = dict[str, str]()
    by_place = [field.name for field in fields(cast("type[_Options]", cls)) if not field.kw_only]
    for problem in invalid.errors():
        place, kind = problem["loc"][0], problem["type"]
        name = str(place)
        if isinstance(place, int):
            name = by_place[place] if place < len(by_place) else f"argument {place + 1}"
        if kind == "multiple_argument_values":
            found[name] = f"{name} is given twice"
        elif kind == "unexpected_positional_argument":
            found[name] = f"{cls.__name__} takes {len(by_place)} arguments without a name"
        elif kind == "unexpected_keyword_argument":
            found[name] = _no_option(cast("type[_Options]", cls), name)
        else:
            rule = problem["msg"].replace("Input should", "it must").removeprefix("Value error, ")
            # Options for file systems hold credentials, so their values are not shown.
            value = "" if name.startswith("storage") else f" is {brief(problem['input'])}"
            if name not in found:
                found[name] = f"{name}{value}; {rule}"
            elif not found[name].endswith(rule):
                found[name] += f", or {rule}"
    return found


def _no_option(cls: type[_Options], name: str) -> str:
    """What is said of an option that a class does not have; its value may be a credential."""
    for option, spelled in cls.__pydantic_fields__.items():  # of both spellings the other one was taken
        alias = spelled.validation_alias
        if isinstance(alias, pydantic.AliasChoices) and name in alias.choices:
            return f"{option} is given twice: {name} is another name of it"
    kinds = {kind: [field.name for field in fields(kind)] for kind in (cls, *cls.__subclasses__())}
    near = get_close_matches(name, kinds[cls], 1)
    owners = [kind.__name__ for kind, names in kinds.items() if name in names]
    hint = f"; is {near[0]} meant?" if near else f"; it is one of {owners[0]}" if owners else ""
    return f"{cls.__name__} has no option {name}{hint}"


def _plain(value: object) -> object:
    """NumPy's numbers as Python's."""
    return cast("object", value.item()) if isinstance(value, np.generic) else value


_number = BeforeValidator(_plain)
#: True or false, also NumPy's; never a text or a number that could be taken for one.
Flag = Annotated[pydantic.StrictBool, _number]
Count = Annotated[int, _number, Field(strict=True, ge=1)]
#: Smallest and largest factor: with others all numbers would become 0 or infinite.
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def is_factor(value: float) -> bool:
    """Whether vectors can be multiplied by a number: a float32 holds it, and it is positive."""
    return _LEAST <= value <= _MOST


def _factor(value: float) -> float:
    """The same number; pydantic turns the error into its own."""
    if not is_factor(value):
        raise ValueError(f"it must be a factor that float32 holds, from {_LEAST:.2g} to {_MOST:.2g}")
    return value


Factor = Annotated[float, Field(strict=True), AfterValidator(_factor)]


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
    token_arrays: Sequence[str]


class ShuffleArguments(ReadArguments, total=False):
    """The fields of `ShuffleOptions` as keyword arguments."""

    seed: int
    window_bytes: int | None
    window_blocks: int | None
    examples_per_block: int | None
    n_partitions: int | None
    early_start: bool


def chosen_options(given: T | None, kind: type[T], changed: Mapping[str, object]) -> T:
    """The options that a loader is given, or the defaults, with some changed.

    Raises:
        ArgumentError: they are no such options, or a changed one breaks its rule.
    """
    options = kind() if given is None else given
    if not isinstance(options, kind):
        raise ArgumentError(f"options is {kind_of(options)}; it must be {kind.__name__}(…)", where="options")
    return replace(options, **changed)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]  # both classes are dataclasses


@options_class(ArgumentError)
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
        token_arrays: Names of token arrays of the store to have in the batches, such as `("token_ids",)`.

    Raises:
        ArgumentError: an option is out of range; the message lists all of these.
    """

    batch_size: Count = 16_384
    drop_last: Flag = False
    rank: Annotated[int, _number, Field(strict=True, ge=0)] | None = None
    world: Count | None = None
    n_threads: Count | None = None
    prefetch_batches: Count | None = None
    batch_timeout_s: Annotated[float, _number, Field(strict=True, gt=0)] = 30.0
    scale_norm: Annotated[pydantic.StrictBool | Factor, _number] = False
    medium: Kind | None = None
    read_bytes: Count | None = None
    keep_pages: Flag | None = None
    token_arrays: tuple[str, ...] = ()


@options_class(ArgumentError)
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
        early_start: Begin an epoch with a small window that grows to its full size, for slow links: the first batch waits for
            a few batches' bytes instead of half the window (at least a block or two of each partition). Until as many bytes
            as half the window have been handed out, batches are mixed less; in an epoch of fewer than about two windows, all
            of them.

    Raises:
        ArgumentError: an option is out of range; the message lists all of these.
    """

    seed: Annotated[int, _number, Field(strict=True)] = 17
    window_bytes: Count | None = None
    window_blocks: Count | None = None
    examples_per_block: Count | None = None
    n_partitions: Count | None = None
    early_start: Flag = False


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
    if rank is None and world == 1:
        return 0, 1
    found = (rank, world) if rank is not None and world is not None else _found_ranks()
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
            remedy="Give both rank and world, as they are.",
        )
    return rank if rank is not None else found_rank or 0, found_world


def _found_ranks() -> tuple[int, int] | None:
    """What torch.distributed says, which is not imported for it, else RANK and WORLD_SIZE where both are set."""
    module = sys.modules.get("torch.distributed")
    if module is not None:
        distributed = cast("_Distributed", module)
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
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
