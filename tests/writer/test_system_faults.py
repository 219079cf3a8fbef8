"""Every call of the system that a write, repair, copy, conversion, preparation or export makes fails once.

The outcome is one of our errors, and what is there afterwards is untouched or is continued to the right bytes; or the operation
went on, and the result is right. Nothing that opens is wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from kill_harness_oracle import Case, case
from kill_sources import Batches, Documents, Prepared
from system_faults import KINDS, SystemFaults

from saev_store import ShardStore
from saev_store.errors import SaevStoreError, StoreExistsError
from saev_store.sources.energon.prepare import prepare
from saev_store.transport import open_transport
from saev_store.writer import create_store
from saev_store.writer.copying import copy_store


class Operation(Protocol):
    """Something that writes below a folder."""

    def set_up(self, folder: Path) -> None:
        """What is there before."""
        ...

    def run(self, folder: Path) -> None:
        """The operation, also when an earlier run of it failed."""
        ...

    def check(self, folder: Path, *, finished: bool) -> None:
        """Fails if what opens is wrong; with `finished` also if nothing opens."""
        ...


def a_case(protocol: str = "2.0") -> Case:
    return case(n=11, per_shard=4, d_model=5, content=3, labelled=True, pad=False, block_bytes=64, protocol=protocol)


def write(root: Path, this: Case) -> None:
    with create_store(
        open_transport(str(root)), this.metadata, resume="auto", exist_ok=True, pad=this.pad, block_bytes=this.block_bytes,
        checkpoint_bytes=4 * this.block_bytes, on_nonfinite="allow", progress=False,
    ) as writer:  # fmt: skip
        while not writer.complete and writer.next_example < writer.example_range[1]:
            start = writer.next_example
            this.append(writer, start, min(start + 3, writer.example_range[1]))


def opens_right(folder: Path, this: Case, *, finished: bool) -> None:
    """A store that opens holds the right vectors, and what was recorded for tokens."""
    try:
        store = ShardStore.open(folder)
    except SaevStoreError:
        assert not finished
        return
    assert this.matches(store)


class Write:
    def __init__(self, protocol: str = "2.0") -> None:
        self.case = a_case(protocol)

    def set_up(self, folder: Path) -> None: ...

    def run(self, folder: Path) -> None:
        write(folder, self.case)

    def check(self, folder: Path, *, finished: bool) -> None:
        opens_right(folder / self.case.name, self.case, finished=finished)


class Repair:
    """Two of three shards are damaged: one is gone, one is cut. In 3.0 the mask is gone, too."""

    def __init__(self, protocol: str = "2.0") -> None:
        self.case = a_case(protocol)

    def set_up(self, folder: Path) -> None:
        write(folder, self.case)
        store = folder / self.case.name
        (store / "acts000000.bin").unlink()
        with open(store / "acts000002.bin", "r+b") as file:
            file.truncate(10)
        if self.case.arrays:
            (store / "mask.bin").unlink()

    def run(self, folder: Path) -> None:
        store = ShardStore.open(folder / self.case.name, damaged_ok=True)
        with store.repair(on_nonfinite="allow") as writer:
            for name in writer.lost_arrays:
                writer.restore_array(name, self.case.arrays[name])
            for first, end in list(writer.missing):
                self.case.append(writer, first, end)

    def check(self, folder: Path, *, finished: bool) -> None:
        opens_right(folder / self.case.name, self.case, finished=finished)


class Copy:
    def __init__(self, copy: Callable[[Path, Path], object], protocol: str = "2.0") -> None:
        self.case, self.copy = a_case(protocol), copy

    def set_up(self, folder: Path) -> None:
        write(folder / "from", self.case)

    def run(self, folder: Path) -> None:
        self.copy(folder / "from" / self.case.name, folder / "to")

    def check(self, folder: Path, *, finished: bool) -> None:
        opens_right(folder / "from" / self.case.name, self.case, finished=True)
        found = [path.parent for path in (folder / "to").rglob("metadata.json") if ".saev_store" not in str(path)]
        assert len(found) <= 1
        for path in found:
            opens_right(path, self.case, finished=finished)
        assert found or not finished


class Source:
    """A format's own writer, over an earlier version that stays readable."""

    def __init__(self, kind) -> None:
        self.kind = kind

    def set_up(self, folder: Path) -> None:
        self.kind.write(folder, 0, "auto")

    def run(self, folder: Path) -> None:
        self.kind.write(folder, 1, "auto")

    def check(self, folder: Path, *, finished: bool) -> None:
        version = self.kind.check(folder)
        # A pair of files cannot be replaced in one step: for an instant there is none.
        assert version == 1 if finished else version in (None, 0, 1)


class Again(Prepared):
    """The second version without looks of its own at the tars."""

    def write(self, folder: Path, version: int, engine: str) -> None:
        if version == 0:
            super().write(folder, version, engine)
        else:
            prepare(folder, split="0,1,0", overwrite=True, num_workers=1, progress=False)


class Statistics:
    """Written beside the store, and read again by the next process."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        random = a_case()
        self.case = replace(random, acts=rng.normal(size=random.acts.shape).astype(np.float32))

    def set_up(self, folder: Path) -> None:
        write(folder, self.case)

    def run(self, folder: Path) -> None:
        ShardStore.open(folder / self.case.name).stats(progress=False)

    def check(self, folder: Path, *, finished: bool) -> None:
        del finished
        opens_right(folder / self.case.name, self.case, finished=True)
        found = ShardStore.open(folder / self.case.name).stats(progress=False, save=False).mean_norm
        norms = np.linalg.norm(self.case.acts.astype(np.float64), axis=-1).mean(axis=0)
        np.testing.assert_allclose(found, norms, rtol=1e-5)


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "write": Write,
    "write 3.0": lambda: Write("3.0"),
    "repair": Repair,
    "repair 3.0": lambda: Repair("3.0"),
    "copy": lambda: Copy(lambda src, dst: copy_store(src, dst, progress=False)),
    "copy of layers": lambda: Copy(lambda src, dst: copy_store(src, dst, layers=[2, 5], progress=False)),
    "copy of layers 3.0": lambda: Copy(lambda src, dst: copy_store(src, dst, layers=[2, 5], progress=False), "3.0"),
    "llmbatch": lambda: Source(Batches(np.random.default_rng(1), stream=False)),
    "llmbatch stream": lambda: Source(Batches(np.random.default_rng(1), stream=True)),
    "mmididx": lambda: Source(Documents(np.random.default_rng(2))),
    "prepare": lambda: Source(Again(np.random.default_rng(3))),
    "statistics": Statistics,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_call_fails_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fails_once(name, OPERATIONS[name], tmp_path, monkeypatch)


def fails_once(name: str, make: Callable[[], Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of an operation fail, one after the other, and look at what comes of it."""
    faults = SystemFaults(monkeypatch, tmp_path)
    warnings.simplefilter("ignore")
    number = 0

    def fresh() -> tuple[Operation, Path]:
        nonlocal number
        operation, folder = make(), tmp_path / f"run{number}"
        number += 1
        folder.mkdir()
        operation.set_up(folder)
        return operation, folder

    operation, folder = fresh()
    with faults.counting() as counts:
        operation.run(folder)
    operation.check(folder, finished=True)
    assert counts, "no call was seen"
    cases = [
        (call, at, how, lasting)
        for call, n_calls in sorted(counts.items())
        for how in KINDS[call]
        for at in range(n_calls)
        for lasting in ((False, True) if how in ("ENOSPC", "EMFILE") else (False,))
    ]
    if not os.environ.get("SAEV_STORE_ALL_FAULTS"):
        # Some of each kind; all of them in the long tests.
        cases = random.Random(name).sample(cases, min(len(cases), 15))
    wrong: list[str] = []
    for call, at, how, lasting in cases:
        operation, folder = fresh()
        problem = _outcome(faults, operation, folder, (call, at, how, lasting))
        if problem:
            wrong.append(f"{call} {at} of {counts[call]}: {how}{', lasting' if lasting else ''}: {problem}")
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)


def _outcome(faults: SystemFaults, operation: Operation, folder: Path, fault: tuple[str, int, str, bool]) -> str | None:
    """What is wrong after a fault, if anything."""
    call, at, how, lasting = fault
    raised: BaseException | None = None
    with faults.failing(call, at, how, lasting=lasting):
        try:
            operation.run(folder)
        except SaevStoreError as error:
            raised = error
        except Exception as error:
            return f"raised {error!r}"
    try:
        operation.check(folder, finished=raised is None)
    except Exception as error:
        return f"after {raised!r}: {error!r}"[:600]
    try:
        operation.run(folder)
    except StoreExistsError:
        pass
    except Exception as error:
        return f"the next run, after {raised!r}: {error!r}"[:600]
    try:
        operation.check(folder, finished=True)
    except Exception as error:
        return f"after the next run: {error!r}"[:600]
    return None
