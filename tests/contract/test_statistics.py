"""Statistics against exact arithmetic and dense NumPy in float64; masks; the file that keeps them; scales."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import plain_store as random_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from plain_stores import plain_store
from servers import s3_bucket  # noqa: F401  # a fixture

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    LayerNotFoundError,
    ReadOnlyError,
    TransportError,
)
from saev_store.stats import STATISTICS, Stats, compute, kept_stats, moments, moments_of
from saev_store.stats.moments import Moments, merge


def dense_stats(acts: np.ndarray, kept: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Dull: all statistics of (example, layer, token, d_model), one layer and token after the other."""
    found: dict[str, np.ndarray] = {name: np.full(acts.shape[1:3], np.nan) for name in STATISTICS}
    for place in np.ndindex(acts.shape[1:3]):
        chosen = slice(None) if kept is None else kept[:, place[1]]
        with np.errstate(invalid="ignore"):
            vectors = acts[chosen, place[0], place[1]].astype(np.float64)
        finite = vectors[np.isfinite(vectors)]
        whole = vectors[np.isfinite(vectors).all(axis=1)]
        found["count"][place] = finite.size
        if vectors.size:
            found["zero_fraction"][place] = (vectors == 0).mean()
            found["nonfinite_fraction"][place] = 1 - finite.size / vectors.size
        if finite.size:
            found["mean"][place], found["std"][place] = finite.mean(), finite.std()
            found["min"][place], found["max"][place] = finite.min(), finite.max()
        if whole.size:
            found["mean_norm"][place] = np.sqrt((whole**2).sum(axis=1)).mean()
    return found


def stats_of(layout: Layout, acts: np.ndarray) -> Stats:
    return Stats(layout, moments_of(acts), len(acts))


def assert_same(stats: Stats, acts: np.ndarray, kept: np.ndarray | None = None, *, rtol: float = 1e-12) -> None:
    for name, wanted in dense_stats(acts, kept).items():
        np.testing.assert_allclose(getattr(stats, name), wanted, rtol=rtol, atol=1e-15, err_msg=name)


@pytest.fixture
def n_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each block that is really read."""
    calls, original = list[int](), compute.moments_of
    monkeypatch.setattr(compute, "moments_of", lambda *block: (calls.append(1), original(*block))[1])
    return calls


# -- values ------------------------------------------------------------------------------------------------------------


def test_stats_equal_dense_numpy(tmp_path: Path) -> None:
    for engine, padded in (("mmap", True), ("pread", False), ("fsspec", True)):
        plain = plain_store(tmp_path / engine, n=11, padded=padded)
        stats = ShardStore.open(plain.path, engine=engine).stats()
        assert_same(stats, plain.acts)
        together = dense_stats(plain.acts.transpose(0, 2, 1, 3).reshape(-1, 3, 1, 8))
        for name, found in stats.per_layer().items():
            np.testing.assert_allclose(found, together[name][:, 0], rtol=1e-12, err_msg=name)
    bits = random_bits(Layout(18, (2, 5, 11), 4, True, 8, 3), empty_trailer=True)  # NaN payloads, infinities, denormals
    assert_same(ShardStore.open(MemoryTransport(bits.files, label=bits.name)).stats(save=False), bits.dense, rtol=1e-9)


def test_stats_are_the_same_however_the_work_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_store(tmp_path, n=23, per_shard=5)
    store = ShardStore.open(plain.path)
    for piece, read, task in ((64, 100, 100), (64, 2000, 481), (1 << 20, 960, 2000), (32, 1, 1)):
        monkeypatch.setattr(moments, "_PIECE_BYTES", piece)
        monkeypatch.setattr(compute, "_READ_BYTES", read)
        monkeypatch.setattr(compute, "_TASK_BYTES", task)
        found, again = (store.stats(save=False) for _ in range(2))
        assert_same(found, plain.acts, rtol=1e-12)
        assert all(np.array_equal(getattr(found, name), getattr(again, name)) for name in STATISTICS)


def test_stats_large_offsets_cost_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with rational numbers, where a sum of squares has no digits left."""
    monkeypatch.setattr(moments, "_PIECE_BYTES", 1024)
    rng = np.random.default_rng(3)
    for offset, spread, n_first in ((0.0, 1, 10), (1e4, 1, 10), (1e6, 0.1, 20), (-3e7, 1, 10)):
        block = (offset + rng.normal(0, spread, (50, 1, 1, 16))).astype(np.float32)
        for first in (offset, 0.0):  # what a shift by the first piece would have to live with
            block[:n_first] = first
            numbers = [Fraction(float(value)) for value in block.ravel()]
            mean = sum(numbers) / len(numbers)
            std = math.sqrt(sum((number - mean) ** 2 for number in numbers) / len(numbers))
            stats = stats_of(Layout(50, (0,), 1, False, 16, 50), block)
            assert stats.mean.item() == pytest.approx(float(mean), rel=1e-14, abs=1e-15)
            assert stats.std.item() == pytest.approx(std, rel=1e-10)


@given(
    hnp.arrays(np.float32, (5, 2, 3, 4), elements=st.floats(width=32)),
    st.lists(st.integers(0, 5), max_size=4),
    hnp.arrays(np.bool_, (5, 3)),
)
def test_moments_merged_in_any_cut_are_those_of_the_whole(block: np.ndarray, cuts: list[int], kept: np.ndarray) -> None:
    bounds, merged = [0, *sorted(cuts), 5], Moments.empty((2, 3))
    for start, end in pairwise(bounds):
        part = moments_of(block[start:end], kept[start:end]) if end > start else Moments.empty((2, 3))
        merged = merge(merged, part)
    stats, wanted = Stats(Layout(5, (0, 1), 3, False, 4, 5), merged, 5), dense_stats(block, kept)
    scale = np.where(np.isfinite(block), np.abs(block.astype(np.float64)), 0).max() + 1e-300
    for name, value in wanted.items():
        unit = scale if name in {"mean", "std", "mean_norm"} else 1.0
        np.testing.assert_allclose(getattr(stats, name) / unit, value / unit, rtol=1e-7, atol=1e-13, err_msg=name)


def test_stats_leave_out_what_the_mask_leaves_out(tmp_path: Path) -> None:
    for cls_token in (False, True):
        rng = np.random.default_rng(0)
        meta = new_metadata(
            family="gpt2", ckpt="x", layers=[0, 4], content_tokens_per_example=4, cls_token=cls_token, d_model=6,
            n_examples=9, max_tokens_per_shard=40, token_arrays={"mask": "bool"},
        )  # fmt: skip
        acts = rng.normal(size=meta.layout.shape).astype(np.float32)
        acts[2, 0, 1, 3], acts[3, 1, 0] = np.nan, 0
        mask = rng.random((9, 4)) < 0.6
        mask[:, 3] = False
        acts[:, :, -4:][~np.broadcast_to(mask[:, None], (9, 2, 4))] = np.array([0, 1e30, np.inf, 0, -7, 0], np.float32)
        with ShardStore.create(tmp_path, meta, on_nonfinite="allow") as writer:
            writer.append(acts, mask=mask)
        store = ShardStore.open(tmp_path / meta.hash)
        kept = np.concatenate((np.ones((9, int(cls_token)), bool), mask), axis=1)
        assert_same(store.stats(), acts, kept)
        assert_same(store.stats(), acts, kept)  # from the file
        rows = store.sel(layer=4, tokens="content")[:].astype(np.float64)
        norms = np.linalg.norm(rows[np.isfinite(rows).all(1)], axis=1)
        np.testing.assert_allclose(store.stats().scale(4), np.sqrt(6) / norms.mean())
        (tmp_path / meta.hash / "mask.bin").unlink()
        with ShardStore.open(tmp_path / meta.hash, damaged_ok=True).repair() as writer:
            writer.restore_array("mask", ~mask)
        kept[:, -4:] = ~mask
        assert_same(ShardStore.open(tmp_path / meta.hash).stats(), acts, kept)


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_scale_makes_the_mean_norm_the_root_of_d_model(tmp_path: Path) -> None:
    plain = plain_store(tmp_path)
    stats = ShardStore.open(plain.path).stats()
    for kwargs, part in (
        ({"layer": 5, "tokens": "content"}, plain.acts[:, 1, 1:]),
        ({"layer": 5, "tokens": "special"}, plain.acts[:, 1, :1]),
        ({"layer": (11, 2), "tokens": "all"}, plain.acts[:, [2, 0]]),
        ({}, plain.acts[:, :, 1:]),
    ):
        scaled = part.astype(np.float64) * stats.scale(**kwargs)
        assert np.linalg.norm(scaled, axis=-1).mean() == pytest.approx(math.sqrt(8), rel=1e-12)
    with pytest.raises(LayerNotFoundError):
        stats.scale(layer=3)
    for value in (0.0, np.nan):
        flat = stats_of(Layout(2, (3, 7), 2, True, 4, 2), np.full((2, 2, 3, 4), value, np.float32))
        with pytest.raises(ArgumentError) as refused:
            flat.scale(7)
        assert refused.value.where == "scale"


def test_stats_as_text_and_json_name_layers_and_hook_points() -> None:
    acts = np.array([[[[3, 4]], [[np.nan, 1]]], [[[0, 0]], [[1e30, -1e30]]]], np.float32)
    for hook_points, labels in ((None, ["5", "11"]), (("resid_post", "mlp_out"), ["5:resid_post", "5:mlp_out"])):
        layout = Layout(12_345, (5, 5) if hook_points else (5, 11), 1, False, 2, 2, hook_points=hook_points)
        stats = stats_of(layout, acts)
        lines = [line.split() for line in str(stats).splitlines()]
        assert lines[0] == ["layer", *STATISTICS]
        assert lines[1] == [labels[0], "4", "1.75", "1.785", "2.5", "0", "4", "0.5", "0"]
        assert (lines[2][0], "12,345" in str(stats)) == (labels[1], True)
        found = json.loads(json.dumps(stats.to_dict()))
        assert (found["n_examples"], found["is_sample"], found["n_special_tokens"]) == (2, True, 0)
        assert found.get("hook_points") == (list(hook_points) if hook_points else None)
        assert found["per_layer"]["count"] == [4, 3]
        assert found["per_layer_and_token"]["count"] == [[4], [3]]


# -- samples, and the file ---------------------------------------------------------------------------------------------


def test_stats_of_a_sample_are_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_TASK_BYTES", 2000)
    plain = plain_store(tmp_path, n=40, per_shard=7)
    store = ShardStore.open(plain.path)
    chosen = np.sort(np.random.default_rng(5).choice(40, 12, replace=False, shuffle=False))
    for n_read in (1, 2, 4):
        monkeypatch.setattr(compute, "_READ_BYTES", 480 * n_read)
        stats = store.stats(sample=12, seed=5, save=False)
        assert (stats.is_sample, stats.n_examples, stats.seed) == (True, 12, 5)
        assert_same(stats, plain.acts[chosen])
    assert not store.stats(sample=99, save=False).is_sample


def test_kept_stats_answer_the_same_question_only(tmp_path: Path, n_computed: list[int]) -> None:
    plain = plain_store(tmp_path)
    assert kept_stats(ShardStore.open(plain.path)) is None
    for sample, seed, n_calls in (
        (3, 0, 1),
        (3, 0, 1),
        (3, 1, 2),
        (4, 1, 3),
        (4, 1, 3),
        (None, 0, 4),
        (4, 1, 4),
        (7, 5, 4),
    ):
        store = ShardStore.open(plain.path)
        store.stats(sample=sample, seed=seed)
        assert len(n_computed) == n_calls
    assert_same(kept_stats(store), plain.acts)
    assert store.validate(deep=True, progress=False).ok


def test_kept_stats_of_other_bytes_are_computed_again(tmp_path: Path) -> None:
    plain = plain_store(tmp_path)
    plain.write_digests(64)
    assert_same(ShardStore.open(plain.path).stats(), plain.acts)
    plain.shard(1).unlink()
    with pytest.raises(CorruptShardError):
        ShardStore.open(plain.path, damaged_ok=True).stats()
    with ShardStore.open(plain.path, damaged_ok=True).repair() as writer:
        for some in writer.missing:
            plain.acts[some] *= 3
            writer.append(plain.acts[some])
    assert kept_stats(ShardStore.open(plain.path)) is None
    assert_same(ShardStore.open(plain.path).stats(), plain.acts)
    file = plain.path / "stats.json"
    right = json.loads(file.read_text())
    changes: tuple[dict[str, object], ...] = (
        {"metadata_sha256": "0" * 64}, {"version": 3}, {"recording": "sizes:1"}, {"mean": [[1.0]]}, {"mean": [[1.0], []]},
        {"mean": [["x"] * 5] * 3}, {"n_zeros": [[0] * 4] * 3}, {"mean": None}, {"n_vectors": [[10**30] * 5] * 3},
        {"n_examples": 8}, {"n_examples": True}, {"n_examples": 0},
    )  # fmt: skip
    broken = [json.dumps(right | change).encode() for change in changes]
    for raw in (b"", b"{", b"[" * 100_000, json.dumps(right).encode() + b" " * 10_000_000, *broken):
        file.write_bytes(raw)
        assert kept_stats(ShardStore.open(plain.path)) is None
        assert_same(ShardStore.open(plain.path).stats(), plain.acts)
    assert_same(kept_stats(ShardStore.open(plain.path)), plain.acts)


def test_stats_that_cannot_be_kept_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    for error in (ReadOnlyError("no", where="p"), TransportError("disk full", where="p")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(type(store.transport), "put", fail)
        assert_same(store.stats(), plain.acts)
    assert not (plain.path / "stats.json").exists()


def test_stats_of_files_replaced_meanwhile_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, original = plain_store(tmp_path), compute.moments_of
    monkeypatch.setattr(
        compute, "moments_of", lambda *block: (os.utime(plain.shard(0), ns=(7, 7)), original(*block))[1]
    )
    ShardStore.open(plain.path).stats()
    assert not (plain.path / "stats.json").exists()


def test_stats_in_a_bucket_are_kept_there(s3_bucket) -> None:
    import s3fs

    plain = random_bits(Layout(7, (2, 5), 3, False, 4, 3))
    files = s3fs.S3FileSystem(**s3_bucket.options)
    for name, data in plain.files.items():
        files.pipe_file(f"{s3_bucket.url}/{plain.name}/{name}", data)
    store = ShardStore.open(f"{s3_bucket.url}/{plain.name}", s3_bucket.options)
    assert_same(store.stats(), plain.dense, rtol=1e-9)
    assert_same(kept_stats(store), plain.dense, rtol=1e-9)


# -- how it runs -------------------------------------------------------------------------------------------------------


def test_stats_memory_is_bounded_whatever_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saev_store._runtime.cluster.n_cores", lambda: 2)
    monkeypatch.setattr(compute, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(compute, "_TASK_BYTES", 4 << 20)
    plain = plain_store(tmp_path, n=960, layers=(2, 5), tokens=15, d_model=256, per_shard=128)
    store = ShardStore.open(plain.path, engine="pread")
    store.stats(save=False)
    tracemalloc.start()
    store.stats(save=False)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20 < store.nbytes
    tracemalloc.stop()


def test_stats_tasks_are_bounded_in_number_and_an_example_larger_than_one_is_read_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, read, original = plain_store(tmp_path), list[tuple[int, ...]](), compute.moments_of
    monkeypatch.setattr(
        compute, "moments_of", lambda block, *more: (read.append(block.shape), original(block, *more))[1]
    )
    for nbytes, shapes in ((960, {(2, 3, 5, 8), (1, 3, 5, 8)}), (480, {(1, 3, 5, 8)}), (479, {(1, 1, 5, 8)})):
        monkeypatch.setattr(compute, "_READ_BYTES", nbytes)
        read.clear()
        assert_same(ShardStore.open(plain.path).stats(save=False), plain.acts)
        assert set(read) == shapes
    monkeypatch.setattr(compute, "_TASK_BYTES", 64)
    monkeypatch.setattr(compute, "_MAX_TASKS", 10)
    layout, chosen = Layout(1000, (0,), 1, False, 16, 1000), np.arange(0, 1000, 2)  # an example has 64 bytes
    assert compute.plan(layout, None) == [range(start, start + 100) for start in range(0, 1000, 100)]
    assert [work.tolist() for work in compute.plan(layout, chosen)] == [part.tolist() for part in np.split(chosen, 5)]


def test_stats_options_that_are_not_options_are_refused(tmp_path: Path) -> None:
    store = ShardStore.open(plain_store(tmp_path).path)
    for options, where in (
        ({"save": 1}, "save"), ({"progress": "yes"}, "progress"), ({"sample": 2.5}, "sample"),
        ({"sample": 0}, "sample"), ({"sample": 3, "seed": -1}, "seed"), ({"sample": 3, "seed": "x"}, "seed"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as refused:
            store.stats(**options)
        assert refused.value.where == where
