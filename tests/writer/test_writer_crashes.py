"""Every operation of a write, a resume, a publication and a repair is once the last one before a power cut."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from kill_harness_disk import Disk, PowerCut
from kill_harness_oracle import Case, case

from saev_store.errors import SaevStoreError, SaevStoreWarning, StoreExistsError, TransportError
from saev_store.transport import open_transport
from saev_store.writer import create_store, finalize_store

#: 3.0 has bfloat16 and token arrays.
PROTOCOLS = ("2.0", "3.0")


def write(disk: Disk, this: Case, *, batch: int, part: tuple[int, int] | None = None, **options: object) -> bool:
    """Write (the rest of) a store; False if the machine went off on the way."""
    try:
        with create_store(
            disk,
            this.metadata,
            resume="auto",
            exist_ok=True,
            part=part,
            pad=this.pad,
            block_bytes=this.block_bytes,
            checkpoint_bytes=2 * this.block_bytes,
            on_nonfinite="allow",
            **options,
        ) as writer:
            while writer.next_example < writer.example_range[1] and not writer.complete:
                start = writer.next_example
                end = min(start + batch, writer.example_range[1])
                this.append(writer, start, end)
        return True
    except PowerCut:
        return False
    except (SaevStoreError, RuntimeError) as error:
        # After the cut the writer's own thread is what fails first; the caller hears of that.
        assert disk.dies_before is not None, error
        assert disk.n_operations >= disk.dies_before, error
        return False


def never_mistaken(disk: Disk, this: Case) -> None:
    """Whoever finds a metadata.json finds a whole store with it."""
    content = disk.content(this.name)
    if "metadata.json" in content:
        expected = this.files()
        for name in expected:
            if name != "shards.json":
                assert content[name] == expected[name], name


@pytest.mark.parametrize("posix", [True, False], ids=["posix", "bucket"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"labelled": False},
        {"n": 8, "per_shard": 4, "block_bytes": 48},  # shards end where checkpoints do
        {"n": 6, "per_shard": 2, "block_bytes": 32},
        {"n": 3, "per_shard": 1, "block_bytes": 4096},
        {"n": 2, "per_shard": 9, "block_bytes": 16, "d_model": 5},
        {"protocol": "3.0"},
        {"protocol": "3.0", "n": 6, "per_shard": 2, "block_bytes": 16},
    ],
    ids=str,
)
def test_every_crash_point_resumes_to_the_same_bytes(posix: bool, shape: dict[str, object]) -> None:
    this = case(pad=posix, **shape)
    whole = Disk(posix=posix)
    assert write(whole, this, batch=2)
    this.check(whole.content(this.name))
    rng = np.random.default_rng(1)
    for n in range(whole.n_operations):
        disk = Disk(posix=posix, dies_before=n)
        assert not write(disk, this, batch=2)
        disk = disk.rebooted(rng)
        never_mistaken(disk, this)
        assert write(disk, this, batch=3), n
        this.check(disk.content(this.name))


@pytest.mark.parametrize("posix", [True, False], ids=["posix", "bucket"])
def test_crashes_while_resuming(posix: bool) -> None:
    """Crash after crash, a few operations further each time, until it is done."""
    for seed in range(60):
        this = case(pad=posix, protocol=PROTOCOLS[seed % 2])
        rng = np.random.default_rng(seed)
        disk = Disk(posix=posix, dies_before=int(rng.integers(0, 40)))
        for _ in range(400):
            if write(disk, this, batch=int(rng.integers(1, 5))):
                break
            disk = disk.rebooted(rng, dies_before=int(rng.integers(0, 60)))
            never_mistaken(disk, this)
        this.check(disk.content(this.name))


def test_crashes_of_parts_and_of_the_publisher() -> None:
    for seed in range(40):
        this = case(n=11, per_shard=2, protocol=PROTOCOLS[seed % 2])
        rng = np.random.default_rng(seed)
        disk, done = Disk(dies_before=int(rng.integers(0, 60))), False
        while not done:
            order = rng.permutation(3)
            done = all(write(disk, this, batch=2, part=(int(rank), 3)) for rank in order)
            if done:
                try:
                    finalize_store(disk, this.metadata)
                except PowerCut:
                    done = False
            if not done:
                disk = disk.rebooted(rng, dies_before=int(rng.integers(20, 120)))
                never_mistaken(disk, this)
        with contextlib.suppress(StoreExistsError), create_store(disk, this.metadata, resume=True, part=(0, 3)):
            pass
        this.check(disk.content(this.name))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("posix", [True, False], ids=["posix", "bucket"])
def test_every_failing_operation_is_an_error_that_can_be_resumed(posix: bool, protocol: str) -> None:
    """A full disk or a failing one, at every operation once: a clear error, no wrong claim, and the rest goes on."""
    this = case(pad=posix, protocol=protocol)
    whole = Disk(posix=posix)
    write(whole, this, batch=2)
    for n in range(whole.n_operations):
        disk = Disk(posix=posix)
        error = OSError(28, "No space left on device") if n % 2 else TransportError("the disk fails", where="disk")
        disk.fails[n] = error
        try:
            with create_store(
                disk, this.metadata, pad=posix, block_bytes=64, checkpoint_bytes=128, on_nonfinite="allow"
            ) as writer:
                for i in range(this.n):
                    this.append(writer, i, i + 1)
        except OSError as caught:  # ours is one as well
            assert "No space left" in str(caught) or "the disk fails" in str(caught), whole.log[n]
        else:
            assert "delete" in whole.log[n] or "create" in whole.log[n], whole.log[n]  # tidying up, or read back
        never_mistaken(disk, this)
        assert not disk.held
        assert write(disk, this, batch=3)
        this.check(disk.content(this.name))


def test_damage_found_on_resuming_is_dropped_and_told() -> None:
    this = case(n=9, per_shard=3)
    for path, at in (("acts000001.bin", 100), ("acts000000.bin", 0), ("acts000002.bin", 50)):
        disk = Disk()
        with (
            contextlib.suppress(SaevStoreError),
            create_store(disk, this.metadata, block_bytes=64, checkpoint_bytes=128, on_nonfinite="allow") as writer,
        ):
            this.append(writer, 0, 8)
        disk.files[f"{this.name}/{path}"].seen[at] ^= 1
        with pytest.warns(SaevStoreWarning, match=path) as told:
            writer = create_store(disk, this.metadata, resume=True, block_bytes=64, on_nonfinite="allow")
        shard, kept = int(path[4:10]), at // 64 * 64 // this.metadata.layout.example_nbytes
        assert writer.next_example == shard * 3 + kept
        after = ["and the 2 shards after it ", "and the 1 shard after it ", ""][shard]
        ending = f"; {kept} of its examples are kept, the rest of it {after}has to be appended again, from example {shard * 3 + kept} on."
        assert str(told[0].message).endswith(ending)
        with writer:
            this.append(writer, writer.next_example, 9)
        this.check(disk.content(this.name))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lost_token_rows_are_found_on_resuming(protocol: str) -> None:
    this = case(n=9, per_shard=3, protocol=protocol)
    disk = Disk()
    with (
        contextlib.suppress(SaevStoreError),
        create_store(disk, this.metadata, block_bytes=64, on_nonfinite="allow") as writer,
    ):
        this.append(writer, 0, 8)
    disk.files[f"{this.name}/.saev_store/tokens/acts000001.bin"].seen[0] ^= 1
    with pytest.warns(SaevStoreWarning, match="acts000001"):
        writer = create_store(disk, this.metadata, resume=True, block_bytes=64, on_nonfinite="allow")
    assert writer.next_example == 3
    with writer:
        this.append(writer, 3, 9)
    this.check(disk.content(this.name))


def test_verify_sizes_still_finds_a_short_file() -> None:
    this = case(n=9, per_shard=3)
    disk = Disk()
    with (
        contextlib.suppress(SaevStoreError),
        create_store(disk, this.metadata, block_bytes=64, on_nonfinite="allow") as writer,
    ):
        this.append(writer, 0, 7)
    del disk.files[f"{this.name}/acts000000.bin"].seen[-1:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = create_store(disk, this.metadata, resume=True, block_bytes=64, verify="sizes", on_nonfinite="allow")
    assert "acts000000" in str(caught[0].message)
    with writer:
        this.append(writer, writer.next_example, 9)
    this.check(disk.content(this.name))


@pytest.mark.parametrize("kept", [None, 0, 64, 100, 191, 192, 239, 240])
@pytest.mark.parametrize("verify", ["sizes", "digests"])
def test_what_is_gone_of_a_checkpointed_shard_is_never_kept_as_zeros(
    tmp_path: Path, verify: str, kept: int | None
) -> None:
    """A resumed file grows to its full size before it is looked at: what was cut off, or all of it, reads as zeros.

    The whole examples in the blocks that are left are kept, the last one of these included.
    """
    this = case(n=6, per_shard=6)
    root, path = open_transport(tmp_path), tmp_path / this.name / "acts000000.bin"
    with (
        contextlib.suppress(SaevStoreError),
        create_store(root, this.metadata, block_bytes=64, on_nonfinite="allow") as writer,
    ):
        this.append(writer, 0, 5)
    assert this.metadata.layout.example_nbytes * 5 == 240
    if kept is None:
        path.unlink()
    else:
        os.truncate(path, kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = create_store(root, this.metadata, resume=True, block_bytes=64, verify=verify, on_nonfinite="allow")
    assert ["acts000000" in str(warning.message) for warning in caught] == [True] * (kept != 240)
    with writer:
        whole_blocks = 240 if kept == 240 else (kept or 0) // 64 * 64
        assert writer.next_example == whole_blocks // this.metadata.layout.example_nbytes
        this.append(writer, writer.next_example, this.n)
    this.check({file.name: file.read_bytes() for file in path.parent.iterdir()})
