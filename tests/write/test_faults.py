"""Every call of the system that writing makes fails once, or from then on.

The outcome is one of our errors, and what is there afterwards is untouched or is continued to the right bytes. Nothing that is
wrong looks complete.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from operations import OPERATIONS, Operation
from system_faults import KINDS, SystemFaults

from saev_store.errors import SaevStoreError

#: All faults in the long tests, else so many of each operation.
N_FAULTS = 10**6 if os.environ.get("SAEV_STORE_ALL_FAULTS") else 25


def outcome(faults: SystemFaults, operation: Operation, folder: Path, fault: tuple[str, int, str, bool]) -> str:
    """What is wrong after a fault; "" if nothing is."""
    call, at, how, lasting = fault
    raised: Exception | None = None
    with faults.failing(call, at, how, lasting=lasting):
        try:
            operation.run(folder)
        except SaevStoreError as error:
            raised = error
        except Exception as error:
            return f"raised {error!r}"
    try:
        operation.check(folder, finished=raised is None)
        operation.run(folder)
        operation.check(folder, finished=True)
    except Exception as error:
        return f"after {raised!r}: {error!r}"[:900]
    return ""


@pytest.mark.parametrize("name", [*OPERATIONS])
def test_failing_system_call_is_our_error_and_the_next_run_is_right(tmp_path, monkeypatch, name):
    make: Callable[[int], Operation] = OPERATIONS[name]
    faults, n_made = SystemFaults(monkeypatch, tmp_path), 0
    warnings.simplefilter("ignore")  # damage that is found, and locks that are not to be had

    def fresh() -> tuple[Operation, Path]:
        nonlocal n_made
        operation, folder = make(n_made := n_made + 1), tmp_path / str(n_made)
        folder.mkdir()
        operation.set_up(folder)
        return operation, folder

    operation, folder = fresh()
    with faults.counting() as counts:
        operation.run(folder)
    operation.check(folder, finished=True)
    cases = [
        (call, at, how, lasting)
        for call, n_calls in sorted(counts.items())
        for how in KINDS[call]
        for at in range(n_calls)
        for lasting in ((False, True) if how in ("ENOSPC", "EMFILE") else (False,))
    ]
    assert len(cases) > 20
    wrong: list[str] = []
    for case in random.Random(name).sample(cases, min(len(cases), N_FAULTS)):
        operation, folder = fresh()
        if problem := outcome(faults, operation, folder, case):
            wrong.append(f"{case} of {counts[case[0]]}: {problem}")
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
