"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saev_store.cli import main


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def padding_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder does not run two rows more to see whether the model hides padding: for tests that count what a model runs."""
    monkeypatch.setattr("saev_store.record._recorder.check_padding", lambda *_: True)
