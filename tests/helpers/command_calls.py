"""Functions of the library that write down what a command gives them, and end it there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

import pytest

#: What the fakes end a command with.
DONE = 77


class Calls:
    """Replaces functions of the library by ones that write down what they get, by the names of their parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.found: list[dict[str, object]] = []

    def catch(self, owner: object, name: str, then: Callable[[], object] | None = None) -> None:
        """Replace a function; `then` gives what it returns, else the command ends there."""
        real = inspect.signature(getattr(owner, name))

        def fake(*args: object, **kwargs: object) -> object:
            bound = real.bind(*args, **kwargs)
            found: dict[str, object] = {}
            for key, value in bound.arguments.items():
                is_many = real.parameters[key].kind is inspect.Parameter.VAR_KEYWORD
                found.update(value if is_many else {key: value})
            self.found.append(found)
            return end() if then is None else then()

        self._monkeypatch.setattr(owner, name, fake)

    def catch_at(self, path: str, then: Callable[[], object] | None = None) -> None:
        """The same for `module.function`."""
        module, _, name = path.rpartition(".")
        self.catch(import_module(module), name, then)


def end() -> NoReturn:
    raise SystemExit(DONE)
