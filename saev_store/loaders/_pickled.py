"""Pickles of loaders: what they were made with, and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from saev_store.loaders.options import ReadOptions


class _Stateful(Protocol):
    """A loader of one store or of two."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def state_dict(self) -> dict[str, object]: ...
    @property
    def is_bound(self) -> bool: ...
    def stand_as(self, state: Mapping[str, object], *, is_bound: bool) -> None: ...


def pickled(loader: _Stateful, rows: object, options: ReadOptions, given: Mapping[str, object]) -> tuple[object, ...]:
    """What `__reduce__` of a loader returns.

    Args:
        loader: The loader.
        rows: What it loads.
        options: How.
        given: Its other arguments.
    """
    if get_spawning_popen() is not None and loader.world > 1:
        # In a process that is started now, torch.distributed is not initialised.
        options = replace(options, rank=loader.rank, world=loader.world)
    return _again, (type(loader), rows, options, dict(given), loader.state_dict(), loader.is_bound)


def _again(
    make: Callable[..., _Stateful],
    rows: object,
    options: ReadOptions,
    given: Mapping[str, object],
    state: Mapping[str, object],
    is_bound: bool,
) -> _Stateful:
    """The loader that was pickled, at its place."""
    loader = make(rows, options, **given)
    loader.stand_as(state, is_bound=is_bound)
    return loader
