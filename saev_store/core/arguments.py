"""Checks of arguments that every room has: booleans, counts and other numbers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import SupportsFloat, SupportsIndex, TypeGuard, TypeVar, cast, overload

import numpy as np

from saev_store.errors import ArgumentError, brief

T = TypeVar("T")

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
def check_flag(value: object, *, name: str, other: T) -> bool | T: ...
def check_flag(value: object, *, name: str, other: object = ...) -> object:
    """A boolean argument, Python's or NumPy's, as Python's.

    Args:
        value: What the caller gave.
        name: The argument.
        other: One more value that is allowed, such as None; no array.

    Raises:
        ArgumentError: it is neither, such as the text "no", which would count as true.

    >>> check_flag(np.True_, name="masked"), check_flag(None, name="pad", other=None)
    (True, None)
    """
    if isinstance(value, BOOLEANS):
        return bool(value)
    if other is not ... and type(value) is type(other) and value == other:
        return value
    rule = "True or False" if other is ... else f"True, False or {other!r}"
    raise ArgumentError(f"{name} is {brief(value)}; it must be {rule}", where=name)


def check_choice(value: object, choices: Sequence[str], *, name: str) -> None:
    """Refuse what is none of some texts.

    Raises:
        ArgumentError: it is another text, or none.
    """
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} is {brief(value)}; it must be {' or '.join(map(repr, choices))}", where=name)


def check_count(value: object, *, name: str, least: int = 1, most: int = 2**63 - 1) -> int:
    """An integer argument within its bounds.

    Raises:
        ArgumentError: it is not an integer (booleans are not), or outside.
    """
    if not isinstance(value, bool):
        try:
            number = operator.index(cast("SupportsIndex", value))
        except TypeError:
            number = least - 1
        if least <= number <= most:
            return number
    raise ArgumentError(f"{name} is {brief(value)}; it must be an integer from {least} to {most}", where=name)


def check_number(value: object, *, name: str, zero_ok: bool = False) -> float:
    """A number of more than 0, such as a limit or a time; infinity is one.

    Raises:
        ArgumentError: it is not a real number (booleans are not), not more than 0, or NaN.

    >>> check_number(3, name="timeout_s")
    3.0
    """
    if isinstance(value, _NUMBERS) and not isinstance(value, BOOLEANS):
        with contextlib.suppress(OverflowError):  # an integer of a thousand digits
            number = float(cast("SupportsFloat", value))
            if number > 0 or (zero_ok and number == 0):
                return number
    rule = "of at least 0" if zero_ok else "of more than 0"
    raise ArgumentError(f"{name} is {brief(value)}; it must be a number {rule}", where=name)
