"""Settings and fixtures that every test shares."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# gcsfs reads this when it is first imported, by any test. It would ask for every bucket's type over gRPC, which no emulator answers.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

#: Modules that tests import and scripts that they start; no tests.
collect_ignore = ["helpers"]

# Sizes are chosen so that the whole suite stays quick; `deadline=None` because the machine may be shared, and no test
# of ours judges time. `default` and `ci` are deterministic; `nightly` looks for what nobody thought of.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("default", max_examples=60, derandomize=True, database=None, **_COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=3000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))

# A shell that runs a job in the background makes it ignore Ctrl-C, and its children inherit that. Tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _disks_keep_everything() -> Iterator[None]:
    """No test cuts the power: those that simulate it put a disk of their own in the place of these calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, os.fstat)  # a descriptor that is closed is an error still
        yield


@pytest.fixture(scope="module", autouse=True)
def _young_garbage() -> None:
    """Tests that collect garbage look at their own objects: millions that live on anyway would take a second each time."""
    gc.collect()
    gc.freeze()


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The one document that it printed."""
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def error(self) -> dict:
        """The error that it printed as a document."""
        assert self.out == ""
        return json.loads(self.err)["error"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """A command in this process."""

    from saev_store.cli import main

    def call(*arguments: object) -> Done:
        code = main([str(argument) for argument in arguments])
        return Done(code, *capfd.readouterr())

    return call
