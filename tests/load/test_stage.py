"""Copies on this machine's disk: the part that is trained on, made once, continued, replaced after a new recording, and checked."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from token_stores import token_store

from saev_store import ShardStore
from saev_store.errors import ArgumentError, CorruptShardError, DeadlineError, LayerNotFoundError, SaevStoreError
from saev_store.loaders import Loader, stage
from saev_store.transport import open_transport


def rows(path: object, **sel: object) -> np.ndarray:
    return ShardStore.open(path).sel(masked=True, **sel).rows(slice(None))


def test_stage_copies_what_is_asked_for_and_states_continue_on_it(tmp_path: Path) -> None:
    made = token_store(tmp_path / "far", n=13, layers=(2, 5, 7), content=5, per_shard=3)
    for layers, tokens, shape in (
        (5, "content", (13, 1, 5)), ([2, 5], "all", (13, 2, 6)), ("all", "special", (13, 3, 2)), ("all", "all", (13, 3, 6)),
    ):  # fmt: skip
        near = stage(made.path, tmp_path / "near", layers=layers, tokens=tokens)
        assert stage(made.path, str(tmp_path / "near"), layers=layers, tokens=tokens) == near
        assert ShardStore.open(near).shape[:3] == shape
        np.testing.assert_array_equal(
            rows(near, layer=5, tokens=tokens)[-3:], rows(made.path, layer=5, tokens=tokens)[-3:]
        )
    near = stage(made.path, tmp_path / "near", layers=5, tokens="content")
    far, close = (
        Loader(ShardStore.open(path).sel(layer=5, tokens="content", masked=True), batch_size=8, window_bytes=2048)
        for path in (made.path, near)
    )
    with far, close:
        expected = list(far)
        next(batches := iter(far))
        next(batches)
        close.load_state_dict({**far.state_dict(), "epoch": 0})
        for batch, one in zip(close, expected[2:], strict=True):
            np.testing.assert_array_equal(batch["act"], one["act"])


def test_stage_continues_replaces_and_checks_its_copy(tmp_path: Path) -> None:
    made, near = token_store(tmp_path / "a", n=13, content=5, per_shard=3, seed=1), tmp_path / "near"
    shard = made.path / "acts000003.bin"
    for layers in (5, "all"):
        shard.rename(tmp_path / "away")
        with pytest.raises(SaevStoreError):
            stage(made.path, near, layers=layers)
        (tmp_path / "away").rename(shard)
        copy = Path(stage(made.path, near, layers=layers))
        np.testing.assert_array_equal(rows(copy, layer=5), rows(made.path, layer=5))
        content = (copy / "acts000001.bin").read_bytes()
        (copy / "acts000001.bin").write_bytes(content[:100])
        with pytest.raises(CorruptShardError):
            stage(made.path, near, layers=layers)
        (copy / "acts000001.bin").write_bytes(content)
        (copy.parent / "staged.json").write_text("{")  # nothing is known of the copy
        assert stage(made.path, near, layers=layers) == str(copy)
    # Another recording of the same metadata, at another place and then at the same one.
    with ShardStore.create(
        tmp_path / "b", ShardStore.open(made.path).metadata, progress=False, on_nonfinite="allow"
    ) as writer:
        writer.append(made.acts[::-1], **made.arrays)
    other = tmp_path / "b" / made.path.name
    theirs = stage(other, near)
    np.testing.assert_array_equal(rows(theirs, layer=5), rows(other, layer=5))
    np.testing.assert_array_equal(rows(copy, layer=5), rows(made.path, layer=5))
    made.path.rename(tmp_path / "old")
    other.rename(made.path)
    assert stage(made.path, near) == str(copy)
    np.testing.assert_array_equal(rows(copy, layer=5), rows(made.path, layer=5))


def test_stage_of_several_callers_copies_once_and_waits_until_its_deadline(tmp_path: Path) -> None:
    made = token_store(tmp_path / "far", n=13, content=5, per_shard=3)
    near = tmp_path / "near"
    with ThreadPoolExecutor(4) as pool:
        copies = list(
            pool.map(lambda layers: stage(made.path, near, layers=layers), (5, [5], np.int64(5), np.array([5])))
        )
    assert len({*copies}) == 1
    assert len(list(Path(copies[0]).parent.glob("*/metadata.json"))) == 1
    (lock,) = near.glob("staged-*.lock")
    with open_transport(near).lock(lock.name), pytest.raises(DeadlineError):
        stage(made.path, near, layers=5, timeout_s=0)
    assert stage(made.path, near, layers=5, timeout_s=0) == copies[0]
    assert "copy" in json.loads((Path(copies[0]).parent / "staged.json").read_text())


def test_stage_refuses_what_is_not_a_folder_or_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = token_store(tmp_path / "far")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("NEAR", str(tmp_path / "near"))
    for to in ("", "$EMPTY", "${UNSET}/x", None, 3, "memory://near"):
        with pytest.raises(ArgumentError) as caught:
            stage(made.path, to)
        assert caught.value.where == "to"
    with pytest.raises(LayerNotFoundError):
        stage(made.path, tmp_path / "near", layers=99)
    assert not (tmp_path / "near").exists()
    assert stage(made.path, "${NEAR}").startswith(str(tmp_path / "near"))
