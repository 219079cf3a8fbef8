"""Checks of arguments that every room has: booleans, counts and other numbers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import SupportsFloat, SupportsIndex, TypeGuard, cast, overload

import numpy as np

from saev_store.errors import ArgumentError, brief

#: Python's boolean and NumPy's, which is another type and means the same.
BOOLEANS: tuple[type[object], ...] = (bool, np.bool_)
_NUMBERS: tuple[type[object], ...] = (int, float, np.integer, np.floating)


def is_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    """Return True for a mapping, such as an object of JSON."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return True for a list or a tuple, such as an array of JSON."""
    return isinstance(value, (list, tuple))


@overload
def check_flag(value: object, *, name: str) -> bool: ...
@overload
def check_flag(value: object, *, name: str, other: None) -> bool | None: ...
def check_flag(value: object, *, name: str, other: object = ...) -> bool | None:
    """A boolean argument as Python's; the text "no", which would count as true, is an `ArgumentError`. `other` may be None."""
    if isinstance(value, BOOLEANS):
        return bool(value)
    if value is None and other is None:
        return None
    rule = "True or False" if other is ... else "True, False or None"
    raise ArgumentError(f"{name} is {brief(value)}; it must be {rule}", where=name)


def check_choice(value: object, choices: Sequence[str], *, name: str) -> None:
    """Raise `ArgumentError` for what is none of some texts."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} is {brief(value)}; it must be {' or '.join(map(repr, choices))}", where=name)


def check_count(value: object, *, name: str, least: int = 1, most: int = 2**63 - 1) -> int:
    """An integer argument; `ArgumentError` for booleans, other types, and what is outside of the bounds."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise ArgumentError(f"{name} is {brief(value)}; it must be an integer from {least} to {most}", where=name)
    return number


def check_number(value: object, *, name: str, zero_ok: bool = False) -> float:
    """A number of more than 0, such as a limit or a time, or infinity; `ArgumentError` for all else."""
    try:
        is_number = isinstance(value, _NUMBERS) and not isinstance(value, BOOLEANS)
        number = float(cast("SupportsFloat", value)) if is_number else -1.0
    except OverflowError:  # an integer of a thousand digits
        number = -1.0
    if not (number > 0 or (zero_ok and number == 0)):
        rule = "of at least 0" if zero_ok else "of more than 0"
        raise ArgumentError(f"{name} is {brief(value)}; it must be a number {rule}", where=name)
    return number
