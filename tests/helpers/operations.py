"""Things that write below a folder, each with what must hold whenever it was cut short: for kills, faults and races."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from written import Case, a_case, append_missing, content, copy_whole, create, finalize_store, finish, repair

from saev_store import ShardStore
from saev_store.errors import IncompleteStoreError, SaevStoreError
from saev_store.transport import open_transport
from saev_store.writer import copy_store


class Operation(Protocol):
    """Something that writes below a folder."""

    def set_up(self, folder: Path) -> None:
        """What is there before."""
        ...

    def run(self, folder: Path) -> None:
        """The operation, also when an earlier run of it was cut short."""
        ...

    def check(self, folder: Path, *, finished: bool) -> None:
        """Fail if what is there as a store is wrong; with `finished` also if there is none."""
        ...


def check_store(folder: Path, this: Case, *, finished: bool) -> None:
    """A folder with a metadata.json holds every byte of the case, and reads so."""
    if (folder / "metadata.json").exists() and (folder / "metadata.json").stat().st_size:
        visible = {name: data for name, data in content(folder).items() if ".saev_store" not in name}
        this.check(visible)
        assert this.matches(ShardStore.open(folder))
        return
    assert not finished, "there is no store"
    try:
        ShardStore.open(folder)
    except SaevStoreError:
        return
    raise AssertionError("what was never published opens")


class Write:
    """One process writes a store."""

    def __init__(self, protocol: str = "2.0", **options) -> None:
        self.case = a_case(protocol=protocol, **options)

    def set_up(self, folder: Path) -> None: ...

    def run(self, folder: Path) -> None:
        finish(folder, self.case)

    def check(self, folder: Path, *, finished: bool) -> None:
        check_store(folder / self.case.name, self.case, finished=finished)


class WriteInParts(Write):
    """As many processes as `world` says write a store, each its part, and publish it; here one after the other."""

    world = 4

    def run(self, folder: Path) -> None:
        # os.path, because Path.exists raises what a test injects
        if os.path.exists(folder / self.case.name / "metadata.json"):
            return
        for rank in range(self.world):
            finish(folder, self.case, part=(rank, self.world))
        finalize_store_at(folder, self.case)


class Publish(Write):
    """A store of which nothing is missing but its publication."""

    def set_up(self, folder: Path) -> None:
        with create(folder, self.case, part=(0, 1)) as writer:
            self.case.append(writer, 0, self.case.n)

    def run(self, folder: Path) -> None:
        try:
            finalize_store_at(folder, self.case)
        except IncompleteStoreError:
            finish(folder, self.case)


class Repair(Write):
    """Of a store a shard is gone, another one is cut, a third one is rotten; in 3.0 the mask is gone too."""

    def set_up(self, folder: Path) -> None:
        finish(folder, self.case)
        store = folder / self.case.name
        (store / "acts000000.bin").unlink()
        with open(store / "acts000002.bin", "r+b") as file:
            file.truncate(10)
        with open(store / "acts000001.bin", "r+b") as file:
            byte = file.read(1)[0]
            file.seek(0)
            file.write(bytes([byte ^ 1]))
        if self.case.arrays:
            (store / "mask.bin").unlink()

    def run(self, folder: Path) -> None:
        with repair(folder, self.case) as writer:
            for name in writer.lost_arrays:
                writer.restore_array(name, self.case.recorded[name])
            append_missing(writer, self.case)

    def check(self, folder: Path, *, finished: bool) -> None:
        if finished:
            check_store(folder / self.case.name, self.case, finished=True)
            return
        # Each file is as it was damaged, or right; digests.json too.
        found, right = content(folder / self.case.name), self.case.files()
        for name in ("acts000003.bin", "metadata.json", "digests.json"):
            assert found[name] == right[name]
        damaged = {"acts000000.bin": None, "acts000001.bin": len(right["acts000001.bin"]), "acts000002.bin": 10}
        for name, nbytes in damaged.items():
            there = found.get(name)
            assert there == right[name] or (None if there is None else len(there)) == nbytes


class Copy(Write):
    """A store is copied, or linked as one of another protocol version."""

    def set_up(self, folder: Path) -> None:
        finish(folder / "from", self.case)

    def run(self, folder: Path) -> None:
        with ShardStore.open(folder / "from" / self.case.name) as store:
            copy_whole(store, open_transport(folder / "to"))

    def check(self, folder: Path, *, finished: bool) -> None:
        check_store(folder / "to" / self.case.name, self.case, finished=finished)
        check_store(folder / "from" / self.case.name, self.case, finished=True)


class CopyPart(Write):
    """A layer of a store is copied in another dtype."""

    def set_up(self, folder: Path) -> None:
        finish(folder / "from", self.case)
        self.copy(folder, folder / "right")

    def copy(self, folder: Path, to: Path) -> None:
        dtype = "bfloat16" if self.case.acts.dtype == "<f4" else "float16"
        layer = self.case.metadata.layers[0]
        source = folder / "from" / self.case.name
        copy_store(source, to, layers=[layer], dtype=dtype, on_overflow="saturate", progress=False)

    def run(self, folder: Path) -> None:
        self.copy(folder, folder / "to")

    def check(self, folder: Path, *, finished: bool) -> None:
        (right,) = (folder / "right").iterdir()
        found = {name: data for name, data in content(folder / "to").items() if ".saev_store" not in name}
        if finished or f"{right.name}/metadata.json" in found:
            assert found == content(folder / "right")


class Import(CopyPart):
    """An array becomes a store."""

    def copy(self, folder: Path, to: Path) -> None:
        given = {"family": "gpt2", "ckpt": "tiny", "layers": self.case.metadata.layers, "max_tokens_per_shard": 50}
        ShardStore.from_array(self.case.acts, to, **given, on_nonfinite="allow", progress=False)


def finalize_store_at(folder: Path, this: Case) -> bool:
    """Publish, as any process may."""
    return finalize_store(open_transport(folder), this.metadata)


#: How each is made of a seed.
OPERATIONS: dict[str, Callable[[int], Operation]] = {
    "write": lambda seed: Write(("2.0", "3.0")[seed % 2], seed=seed, labelled=bool(seed % 5)),
    "parts": lambda seed: WriteInParts(("2.0", "3.0")[seed % 2], seed=seed, n=14, per_shard=2),
    "repair": lambda seed: Repair(("2.0", "3.0")[seed % 2], seed=seed),
    "copy": lambda seed: Copy(("2.0", "3.0")[seed % 2], seed=seed),
    "part": lambda seed: CopyPart(("2.0", "3.0")[seed % 2], seed=seed),
    "import": lambda seed: Import(("2.0", "3.0")[seed % 2], seed=seed),
    "publish": lambda seed: Publish(("2.0", "3.0")[seed % 2], seed=seed),
}
