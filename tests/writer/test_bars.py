"""Bars of everything that writes or checks a store: none where `progress` is false, also on a terminal, and each to its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store._runtime import progress as progress_module
from saev_store._runtime.progress import counted_so_far, counting
from saev_store.loaders import stage
from saev_store.writer.copying import copy_store
from saev_store.writer.repair import open_repair

Call = Callable[[Plain, Path, bool | None], object]


def copied(**choices: object) -> Call:
    return lambda plain, to, shown: copy_store(plain.path, to, progress=shown, **choices)  # pyright: ignore[reportArgumentType]  # of the cases below


def copied_twice(plain: Plain, to: Path, shown: bool | None) -> None:
    for _ in range(2):
        copy_store(plain.path, to, layers=[5], resume=True, progress=shown)


def copied_after_another_recording(plain: Plain, to: Path, shown: bool | None) -> None:
    copy_store(plain.path, to, layers=[5], progress=False)
    plain.shard(0).write_bytes((2 * plain.truth(0)).tobytes())
    plain.acts[: plain.per_shard] *= 2
    plain.write_digests(block_bytes=64)
    copy_store(plain.path, to, layers=[5], resume=True, replace=True, progress=shown)


def repaired(plain: Plain, to: Path, shown: bool | None) -> None:
    del to
    plain.shard(1).write_bytes(b"")
    store = ShardStore.open(plain.path, damaged_ok=True)
    with open_repair(store.transport, store.metadata, deep=True, progress=shown) as writer:
        for start, end in writer.missing:
            writer.append(plain.acts[start:end])


def from_array(plain: Plain, to: Path, shown: bool | None) -> None:
    ShardStore.from_array(plain.acts, to, family="x", ckpt="x", cls_token=True, layers=[2, 5, 11], progress=shown)


EXAMPLES = 7
CALLS: list[tuple[Call, dict[str, int]]] = [
    (copied(), {}),
    (copied(layers=[5, 2]), {"writing": EXAMPLES}),
    (copied(dtype="bfloat16"), {"writing": EXAMPLES}),
    (copied_twice, {"writing": EXAMPLES}),
    (copied_after_another_recording, {}),
    (repaired, {}),
    (from_array, {}),
    (lambda plain, to, shown: ShardStore.open(plain.path).validate(deep=True, progress=shown), {}),
    (lambda plain, to, shown: ShardStore.open(plain.path).stats(progress=shown), {}),
]


@pytest.mark.parametrize(("call", "expected"), CALLS)
def test_no_bar_where_progress_is_false_and_one_to_the_end_on_a_terminal(
    call: Call,
    expected: dict[str, int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "shows_lines_anew", lambda: True)
    for shown in (False, None):
        plain = plain_store(tmp_path / f"source-{shown}", n=EXAMPLES)
        plain.write_digests(block_bytes=64)
        with counting():
            call(plain, tmp_path / f"target-{shown}", shown)
            counted = {bar.title: bar.n for bar in counted_so_far()}
        assert counted
        assert expected.items() <= counted.items()
        assert np.array_equal(ShardStore.open(plain.path)[:], plain.acts)
        assert ("%|" in capfd.readouterr().err) is (shown is None)


def test_staging_shows_no_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a finished copy is compared with its digests again: every process of a machine stages."""
    monkeypatch.setattr(progress_module, "shows_lines_anew", lambda: True)
    plain = plain_store(tmp_path / "source", n=EXAMPLES)
    plain.write_digests(block_bytes=64)
    copy = stage(plain.path, tmp_path / "near")
    for file in Path(copy).iterdir():
        os.utime(file, ns=(1, 1))
    assert stage(plain.path, tmp_path / "near") == copy
    assert capfd.readouterr().err == ""
