"""Statistics against exact arithmetic and dense NumPy in float64; the file beside the store; clusters; memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tracemalloc
import warnings
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import plain_store as random_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from plain_stores import plain_store
from servers import s3_bucket  # noqa: F401  # a fixture
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store._runtime import cluster as _cluster
from saev_store.cli import main
from saev_store.core.layout import Layout
from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DocumentError,
    LayerNotFoundError,
    ReadOnlyError,
    SaevStoreError,
    SaevStoreWarning,
    TransportError,
)
from saev_store.stats import STATISTICS, Stats, _compute, _moments, kept_stats, stats_of, store_stats
from saev_store.stats._moments import Moments, merge, moments_of
from saev_store.stats._store import parse_stats, sampled_stats, stats_bytes
from saev_store.store.identity import recording_identity
from saev_store.transport import Transport
from saev_store.validation import Promised
from saev_store.writer import load_digests


def dense_stats(acts: np.ndarray) -> dict[str, np.ndarray]:
    """Dull: all statistics of (example, layer, token, d_model) of the stored dtype with plain NumPy in float64."""
    limits = ml_dtypes.finfo(acts.dtype)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # "mean of empty slice" is an answer here
        vectors = np.moveaxis(acts.astype(np.float64), 0, 2)
        wide = vectors.reshape(*acts.shape[1:3], -1)
        finite = np.isfinite(wide)
        kept = np.where(finite, wide, np.nan)
        norms = np.sqrt((np.where(np.isfinite(vectors).all(-1, keepdims=True), vectors, np.nan) ** 2).sum(-1))
        return {
            "count": finite.sum(-1),
            "mean": np.nanmean(kept, -1),
            "std": np.nanstd(kept, -1),
            "mean_norm": np.nanmean(norms, -1),
            "min": np.nanmin(kept, -1),
            "max": np.nanmax(kept, -1),
            "zero_fraction": (wide == 0).mean(-1),
            "nonfinite_fraction": 1 - finite.mean(-1),
            "saturated_count": (np.abs(wide) == float(limits.max)).sum(-1),
            "subnormal_count": ((wide != 0) & (np.abs(wide) < float(limits.smallest_normal))).sum(-1),
        }


def assert_same(stats: Stats, acts: np.ndarray, *, rtol: float = 1e-12) -> None:
    for name, wanted in dense_stats(acts).items():
        np.testing.assert_allclose(getattr(stats, name), wanted, rtol=rtol, atol=1e-15, err_msg=name)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_equal_to_dense_numpy(engine: str, padded: bool, tmp_path: Path):
    plain = plain_store(tmp_path, n=11, padded=padded)
    assert_same(ShardStore.open(plain.path, engine=engine).stats(), plain.acts)


@pytest.mark.parametrize("empty", [True, False])
def test_bits_of_any_kind(empty: bool):
    """NaN payloads, infinities, denormals and values near the largest float32; many tasks, pieces and merges."""
    plain = random_bits(Layout(18, (2, 5, 11), 4, True, 8, 3), empty_trailer=empty)
    store = ShardStore.open(MemoryTransport(plain.files, label=plain.name))
    assert not np.isfinite(plain.dense).all()
    assert_same(store.stats(save=False), plain.dense, rtol=1e-9)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_statistics_of_16_bits_are_those_of_what_is_stored(dtype, piece, tmp_path, monkeypatch):
    """All 65,536 bit patterns, in one store; whether a number is saturated or subnormal is about its own dtype."""
    monkeypatch.setattr(_moments, "_PIECE_BYTES", piece)
    acts = np.random.default_rng(2).permutation(np.arange(2**16, dtype=np.uint16)).view(dtype).reshape(32, 4, 8, 64)
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=range(4), content_tokens_per_example=8, cls_token=False, d_model=64, n_examples=32,
        max_tokens_per_shard=256, dtype=np.dtype(dtype).name,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(acts)
    stats = ShardStore.open(tmp_path / metadata.hash).stats(progress=False)
    assert_same(stats, acts, rtol=1e-9)
    assert stats.per_layer()["saturated_count"].sum() == 2
    limits = ml_dtypes.finfo(dtype)
    assert stats.per_layer()["subnormal_count"].sum() == 2 * (2**limits.nmant - 1)
    assert_same(ShardStore.open(tmp_path / metadata.hash).stats(progress=False), acts, rtol=1e-9)  # from the file


def test_kept_statistics_of_an_older_version_are_computed_again(tmp_path: Path):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    store.stats()
    file = plain.path / "stats.json"
    new = json.loads(file.read_text())
    older = {name: value for name, value in new.items() if name not in {"n_saturated", "n_subnormal"}} | {"version": 1}
    file.write_text(json.dumps(older, separators=(",", ":")))
    assert_same(store.stats(), plain.acts)
    assert json.loads(file.read_text()) == new


def test_pieces_and_tasks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path, n=23, per_shard=5)
    store = ShardStore.open(plain.path)
    whole = store.stats(save=False)
    for piece, read, task in ((64, 100, 100), (64, 2000, 481), (1 << 20, 960, 2000), (32, 1, 1)):
        monkeypatch.setattr(_moments, "_PIECE_BYTES", piece)
        monkeypatch.setattr(_compute, "_READ_BYTES", read)
        monkeypatch.setattr(_compute, "_TASK_BYTES", task)
        cut = store.stats(save=False)
        for name in STATISTICS:
            np.testing.assert_allclose(getattr(cut, name), getattr(whole, name), rtol=1e-13, err_msg=name)
        assert_same(cut, plain.acts)
        again = store.stats(save=False)
        assert all(np.array_equal(getattr(cut, name), getattr(again, name)) for name in STATISTICS)


def exact(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation in rational numbers, rounded once."""
    numbers = [Fraction(float(value)) for value in values.ravel()]
    mean = sum(numbers) / len(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / len(numbers)
    return float(mean), math.sqrt(variance)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6, -3e7])
def test_a_large_offset_costs_no_digits(offset: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_moments, "_PIECE_BYTES", 1024)
    rng = np.random.default_rng(3)
    block = (offset + rng.normal(0, 1, (50, 1, 1, 16))).astype(np.float32)
    block[:10] = offset  # what a shift by the first piece would have to live with
    stats = Stats(Layout(50, (0,), 1, False, 16, 50), moments_of(block), 50)
    mean, std = exact(block)
    assert stats.mean.item() == pytest.approx(mean, rel=1e-15, abs=1e-15)
    assert stats.std.item() == pytest.approx(std, rel=1e-10)  # a sum of squares has 0 digits left here


def test_pieces_that_lie_far_apart(monkeypatch: pytest.MonkeyPatch):
    """A block of zeros, then a block around 1e6: the case that sums of squares get wrong."""
    monkeypatch.setattr(_moments, "_PIECE_BYTES", 512)
    block = np.zeros((40, 1, 1, 16), np.float32)
    block[20:] = 1e6 + np.random.default_rng(0).normal(0, 1e-1, (20, 1, 1, 16))
    mean, std = exact(block)
    stats = Stats(Layout(40, (0,), 1, False, 16, 40), moments_of(block), 40)
    assert stats.mean.item() == pytest.approx(mean, rel=1e-14)
    assert stats.std.item() == pytest.approx(std, rel=1e-13)


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(hnp.arrays(np.float32, (5, 2, 3, 4), elements=floats), st.lists(st.integers(0, 5), max_size=4))
def test_merging_in_any_cut(block: np.ndarray, cuts: list[int]):
    bounds = [0, *sorted(cuts), 5]
    merged = Moments.empty((2, 3))
    for start, end in pairwise(bounds):
        merged = merge(merged, moments_of(block[start:end]) if end > start else Moments.empty((2, 3)))
    stats = Stats(Layout(5, (0, 1), 3, False, 4, 5), merged, 5)
    wanted = dense_stats(block)
    for name in ("count", "min", "max", "zero_fraction", "nonfinite_fraction"):
        np.testing.assert_allclose(getattr(stats, name), wanted[name], err_msg=name)
    scale = np.where(np.isfinite(block), np.abs(block.astype(np.float64)), 0).max() + 1e-300
    for name in ("mean", "std", "mean_norm"):
        np.testing.assert_allclose(getattr(stats, name) / scale, wanted[name] / scale, rtol=1e-7, atol=1e-13)


def test_nothing_finite_is_nan():
    block = np.full((2, 1, 2, 3), np.nan, np.float32)
    block[0, 0, 1] = np.inf
    block[1, 0, 1] = [0, -0.0, np.nan]
    stats = Stats(Layout(2, (7,), 2, False, 3, 2), moments_of(block), 2)
    assert stats.count.tolist() == [[0, 2]]
    assert np.isnan([stats.mean[0, 0], stats.std[0, 0], stats.min[0, 0], stats.max[0, 0]]).all()
    assert np.isnan(stats.mean_norm).all()
    assert (stats.mean[0, 1], stats.std[0, 1], stats.min[0, 1]) == (0, 0, 0)
    assert stats.nonfinite_fraction.tolist() == [[1, 4 / 6]]
    assert stats.zero_fraction[0, 1] == 2 / 6
    assert "nan" in str(stats)
    with pytest.raises(ArgumentError, match="no factor"):
        stats.scale()


def test_per_layer_is_over_all_tokens(tmp_path: Path):
    plain = plain_store(tmp_path)
    found = ShardStore.open(plain.path).stats().per_layer()
    together = plain.acts.transpose(0, 2, 1, 3).reshape(-1, 3, 1, 8)
    for name, wanted in dense_stats(together).items():
        np.testing.assert_allclose(found[name], wanted[:, 0], rtol=1e-12, err_msg=name)


def test_the_scale_gives_the_norm_of_sqrt_d_model(tmp_path: Path):
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


# -- a sample ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples_per_read", [1, 2, 3, 4])
def test_a_sample_is_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples_per_read: int):
    monkeypatch.setattr(_compute, "_TASK_BYTES", 2000)
    monkeypatch.setattr(_compute, "_READ_BYTES", 480 * examples_per_read)
    plain = plain_store(tmp_path, n=40, per_shard=7)
    store = ShardStore.open(plain.path)
    chosen = np.sort(np.random.default_rng(5).choice(40, 12, replace=False, shuffle=False))
    stats = store.stats(sample=12, seed=5, save=False)
    assert stats.is_sample
    assert stats.n_examples == 12
    assert "a sample of 40" in str(stats)
    assert_same(stats, plain.acts[chosen])
    assert not store.stats(sample=99, save=False).is_sample
    for sample, seed in ((0, 0), (-1, 0), (2.5, 0), (3, -1)):
        with pytest.raises(ArgumentError):
            store.stats(sample=sample, seed=seed)


# -- beside the store --------------------------------------------------------------------------------------------------


def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each task that really reads."""
    calls: list[int] = []
    original = _compute.work_on
    monkeypatch.setattr(_compute, "work_on", lambda store, task: (calls.append(1), original(store, task))[1])
    return calls


def test_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    calls = computed(monkeypatch)
    first = store.stats()
    assert len(calls) == 1
    again = ShardStore.open(plain.path).stats()
    sampled = store.stats(sample=3)  # all examples answer for any sample
    assert len(calls) == 1
    assert not sampled.is_sample
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in STATISTICS)
    store.stats(refresh=True)
    assert len(calls) == 2
    assert store.validate(deep=True, progress=False).ok


def test_a_sample_is_kept_for_the_same_question_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    calls = computed(monkeypatch)
    for sample, seed, n_calls in ((3, 0, 1), (3, 0, 1), (3, 1, 2), (4, 1, 3), (4, 1, 3), (None, 0, 4), (4, 1, 4)):
        store.stats(sample=sample, seed=seed)
        assert len(calls) == n_calls


def test_a_loader_takes_a_kept_sample_that_is_large_enough(tmp_path: Path):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    calls = ((3, 3, 0), (2, 3, 0), (3, 3, 0), (4, 4, 3), (3, 4, 3), (7, 7, None), (2, 7, None))
    for seed, (n_examples, n_found, seed_of_found) in enumerate(calls):
        assert sampled_stats(store, n_examples, seed=seed).n_examples == n_found
        kept = parse_stats((plain.path / "stats.json").read_bytes(), store.metadata, where="x")
        assert (kept.stats.n_examples, kept.seed) == (n_found, seed_of_found)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: text.replace('"version":3', '"version":4'),
        lambda text: text.replace('"metadata_sha256":"', '"metadata_sha256":"0')[:-1],
        lambda text: json.dumps({**json.loads(text), "metadata_sha256": "0" * 64}),
        lambda text: json.dumps({**json.loads(text), "mean": [[1.0]]}),
        lambda text: json.dumps({**json.loads(text), "mean": [[1.0], []]}),
        lambda text: json.dumps({**json.loads(text), "n_examples": 3}),
        *(
            lambda text, name=name: json.dumps({**json.loads(text), name: [[9**9] * 5] * 3})
            for name in ("n_values", "n_finite", "n_zeros", "n_saturated", "n_subnormal", "n_vectors")
        ),
        lambda text: json.dumps({**json.loads(text), "n_examples": 8}),
    ],
)
def test_a_broken_file_is_replaced_with_a_warning(change, tmp_path: Path):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    right = store.stats()
    file = plain.path / "stats.json"
    file.write_text(change(file.read_text()))
    with pytest.warns(SaevStoreWarning, match="stats.json"):
        again = store.stats()
    assert_same(again, plain.acts)
    assert np.array_equal(ShardStore.open(plain.path).stats().mean, right.mean)


def test_a_file_that_is_far_too_long_is_not_loaded(tmp_path: Path):
    plain = plain_store(tmp_path)
    (plain.path / "stats.json").write_bytes(b" " * 20_000_000)
    with pytest.warns(SaevStoreWarning, match="stats.json"):
        ShardStore.open(plain.path).stats()


def test_a_store_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)

    def refuse(*_):
        raise AccessError("it may not be written", where=str(plain.path))

    store = ShardStore.open(plain.path)
    monkeypatch.setattr(type(store.transport), "put", refuse)
    assert_same(store.stats(), plain.acts)
    assert not (plain.path / "stats.json").exists()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)

    def fail(*_):
        raise TransportError("no space left on device", where=str(plain.path))

    store = ShardStore.open(plain.path)
    monkeypatch.setattr(type(store.transport), "put", fail)
    with pytest.warns(SaevStoreWarning, match="no space left"):
        assert_same(store.stats(), plain.acts)


def test_not_kept_when_not_wanted(tmp_path: Path):
    plain = plain_store(tmp_path)
    ShardStore.open(plain.path).stats(save=False)
    assert not (plain.path / "stats.json").exists()


def test_numbers_survive_the_file_exactly():
    plain = random_bits(Layout(5, (2, 5), 3, False, 4, 5), seed=4)
    store = ShardStore.open(MemoryTransport(plain.files, label=plain.name))
    stats = store.stats(save=False)
    recording = recording_identity(store.transport, store.layout)
    raw = stats_bytes(stats, store.metadata, recording=recording, seed=None)
    kept = parse_stats(raw, store.metadata, where="x")
    assert (kept.seed, kept.recording) == (None, recording)
    again = kept.stats
    for name in STATISTICS:
        np.testing.assert_array_equal(getattr(stats, name), getattr(again, name))
    other = random_bits(Layout(5, (2, 5), 3, False, 4, 5), seed=5)
    other = ShardStore.open(MemoryTransport(other.files, label=other.name))
    with pytest.raises(DocumentError, match="another metadata"):
        parse_stats(raw, other.metadata, where="x")


def test_in_a_bucket(s3_bucket):
    import s3fs

    plain = random_bits(Layout(7, (2, 5), 3, False, 4, 3))
    files = s3fs.S3FileSystem(**s3_bucket.options)
    for name, data in plain.files.items():
        files.pipe_file(f"{s3_bucket.url}/{plain.name}/{name}", data)
    store = ShardStore.open(f"{s3_bucket.url}/{plain.name}", s3_bucket.options)
    assert_same(store.stats(), plain.dense, rtol=1e-9)
    files.invalidate_cache()
    assert files.exists(f"{s3_bucket.url}/{plain.name}/stats.json")


def test_a_shard_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a child process: bytes beyond the end of a mapped file are zeros, or end the process."""
    monkeypatch.chdir(tmp_path)
    plain = plain_store(tmp_path, n=4, tokens=15, d_model=256, per_shard=4)
    script = f"""
import os
from saev_store import ShardStore
from saev_store.errors import CorruptShardError
from saev_store.stats import _compute

_compute._READ_BYTES = 1
shard, moments_of = {str(plain.shard(0))!r}, _compute.moments_of

def cut_then_compute(block, stored_dtype, kept):
    os.truncate(shard, 10_000)
    return moments_of(block, stored_dtype)

_compute.moments_of = cut_then_compute
try:
    ShardStore.open({str(plain.path)!r}).stats(save=False)
except CorruptShardError as error:
    print("refused", "acts000000.bin" in str(error))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stdout.strip()) == (0, "refused True"), ended.stderr


@pytest.mark.parametrize("has_digests", [False, True])
def test_a_missing_shard_is_an_error(tmp_path: Path, has_digests: bool):
    plain = plain_store(tmp_path)
    if has_digests:
        plain.write_digests(64)
    plain.shard(1).unlink()
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin: .* `?store\.repair\(\)`? records it again"):
        ShardStore.open(plain.path, damaged_ok=True).stats()
    assert not (plain.path / "stats.json").exists()


# -- kept statistics belong to one recording ---------------------------------------------------------------------------


def replace_shard(plain, shard_idx: int, factor: float) -> np.ndarray:
    """Record a shard again with other values; returns the dense truth."""
    truth = plain.truth(shard_idx) * np.float32(factor)
    path = plain.shard(shard_idx)
    path.unlink()
    path.write_bytes(truth.tobytes())
    os.utime(path, ns=(1, 1))
    acts = plain.acts.copy()
    first, last = plain.span(shard_idx)
    acts[first:last] = truth
    return acts


def test_statistics_do_not_survive_a_repair(tmp_path: Path):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    assert_same(store.stats(), plain.acts)
    store.close()
    acts = replace_shard(plain, 1, 3.0)
    assert_same(ShardStore.open(plain.path).stats(), acts)
    calls_before = (plain.path / "stats.json").read_text()
    assert_same(ShardStore.open(plain.path).stats(), acts)
    assert (plain.path / "stats.json").read_text() == calls_before


def test_a_repair_through_the_package_makes_kept_statistics_stale(tmp_path: Path):
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=64)
    store = ShardStore.open(plain.path)
    assert_same(store.stats(), plain.acts)
    store.close()
    plain.shard(1).unlink()
    damaged = ShardStore.open(plain.path, damaged_ok=True)
    acts = plain.acts.copy()
    with damaged.repair() as writer:
        for some in writer.missing:
            acts[some] *= 3
            writer.append(acts[some])
    assert_same(ShardStore.open(plain.path).stats(), acts)


def test_statistics_of_bytes_that_differ_from_their_digests_are_refused(tmp_path: Path):
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=100)
    for at in (0, plain.shard_nbytes - 1):
        data = bytearray(plain.truth(1).tobytes())
        data[at] ^= 0x40
        plain.shard(1).write_bytes(data)
        with pytest.raises(CorruptShardError, match=r"acts000001\.bin.*digest"):
            ShardStore.open(plain.path).stats()
        assert not (plain.path / "stats.json").exists()
    plain.shard(1).write_bytes(plain.truth(1).tobytes())
    assert_same(ShardStore.open(plain.path).stats(), plain.acts)


@pytest.mark.parametrize("task_bytes", [None, 1])
def test_damage_in_any_shard_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_bytes: int | None):
    """The last shard is not full; and a task can be part of a shard."""
    if task_bytes is not None:
        monkeypatch.setattr("saev_store.stats._compute._TASK_BYTES", task_bytes)
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=100)
    for shard_idx in range(plain.n_shards):
        right = plain.truth(shard_idx).tobytes()
        for at in (0, len(right) - 1):
            data = bytearray(right)
            data[at] ^= 1
            plain.shard(shard_idx).write_bytes(data)
            with pytest.raises(CorruptShardError, match=rf"{plain.shard(shard_idx).name}.*digest"):
                ShardStore.open(plain.path).stats()
        plain.shard(shard_idx).write_bytes(right)
    assert_same(ShardStore.open(plain.path).stats(), plain.acts)


def test_a_sample_of_damaged_bytes_is_not_kept_beyond_the_repair(tmp_path: Path):
    """A sample is not compared with digests, so it belongs to the versions of the files."""
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=64)
    right = ShardStore.open(plain.path).stats(sample=6, save=False)
    shard = plain.shard(0)
    shard.write_bytes(np.full_like(plain.truth(0), 1e30).tobytes())
    os.utime(shard, ns=(1, 1))
    wrong = ShardStore.open(plain.path).stats(sample=6)
    assert wrong.max.max() > 1e29
    shard.write_bytes(plain.truth(0).tobytes())
    os.utime(shard, ns=(2, 2))
    again = ShardStore.open(plain.path).stats(sample=6)
    assert np.array_equal(again.max, right.max)


def test_statistics_of_a_copy_are_kept_with_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=64)
    ShardStore.open(plain.path).stats()
    for number, file in enumerate(sorted(plain.path.iterdir())):
        os.utime(file, ns=(number, number))
    calls = computed(monkeypatch)
    ShardStore.open(plain.path).stats()
    assert not calls


def test_statistics_are_compared_as_objects(tmp_path: Path):
    """Not by their arrays, whose comparison has no truth value."""
    store = ShardStore.open(plain_store(tmp_path).path)
    one, other = (store.stats(refresh=True, save=False) for _ in range(2))
    assert one != other
    assert len({one, other, one}) == 2


def test_a_sample_of_a_store_with_digests_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the versions of the files, which a sample is not compared with digests for."""
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=64)
    ShardStore.open(plain.path).stats(sample=6)
    calls = computed(monkeypatch)
    assert ShardStore.open(plain.path).stats(sample=6).is_sample
    assert not calls


def test_a_sample_never_replaces_statistics_of_all_examples(tmp_path: Path):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    store.stats()
    kept = (plain.path / "stats.json").read_bytes()
    assert store.stats(sample=2, refresh=True).is_sample
    assert (plain.path / "stats.json").read_bytes() == kept
    assert not parse_stats(kept, store.metadata, where="x").stats.is_sample
    assert not store.stats().is_sample


def test_a_sample_of_all_examples_is_no_sample(tmp_path: Path):
    """Its bytes are compared with their digests, as for all examples."""
    plain = plain_store(tmp_path, n=7)
    plain.write_digests(block_bytes=100)
    shard = bytearray(plain.truth(1).tobytes())
    shard[0] ^= 1
    plain.shard(1).write_bytes(shard)
    for sample in (7, 8):
        with pytest.raises(CorruptShardError, match="digest"):
            ShardStore.open(plain.path).stats(sample=sample)
    assert ShardStore.open(plain.path).stats(sample=6).is_sample


def test_files_replaced_while_they_are_read_are_not_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)
    real = _compute.work_on

    def work_then_replace(*args):
        found = real(*args)
        os.utime(plain.shard(0), ns=(7, 7))
        return found

    monkeypatch.setattr(_compute, "work_on", work_then_replace)
    ShardStore.open(plain.path).stats()
    assert not (plain.path / "stats.json").exists()


def test_infinities_give_no_warning():
    acts = np.full((2, 1, 1, 4), np.inf, np.float32)
    acts[0, 0, 0, 0] = -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moments_of(acts).n_finite.item() == 0


# -- how it runs -------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_whatever_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A store 30 times as long takes no more; what is mapped is not allocated, so also read through pread."""
    monkeypatch.setattr(_cluster, "n_cores", lambda: 2)
    monkeypatch.setattr(_compute, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(_compute, "_TASK_BYTES", 4 << 20)
    peaks = {}
    for n in (64, 1920):
        plain = plain_store(tmp_path / str(n), n=n, layers=(2, 5), tokens=15, d_model=256, per_shard=128)
        store = ShardStore.open(plain.path, engine="pread")
        store.stats(save=False)
        tracemalloc.start()
        store.stats(save=False)
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        nbytes = store.nbytes
    assert nbytes == 60 << 20
    assert peaks[1920] < 8 << 20
    assert peaks[1920] < peaks[64] * 2 + (1 << 20)


def test_the_bar_counts_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(_compute, "_TASK_BYTES", 500)
    advanced: list[int] = []
    monkeypatch.setattr(_compute.Progress, "advance", lambda self, nbytes: advanced.append(nbytes))
    store = ShardStore.open(plain_store(tmp_path).path)
    store.stats(save=False, progress=True)
    assert sum(advanced) == store.nbytes
    assert len(advanced) == 7
    assert "stats" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=":0"
    ) as running:
        yield running


def test_on_a_cluster(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from distributed import Client

    monkeypatch.setattr(_compute, "_TASK_BYTES", 500)
    plain = plain_store(tmp_path, n=13)
    store = ShardStore.open(plain.path)
    advanced: list[int] = []
    monkeypatch.setattr(_compute.Progress, "advance", lambda self, nbytes: advanced.append(nbytes))
    here = store.stats(save=False)
    assert sum(advanced) == store.nbytes
    advanced.clear()
    by_address = store.stats(save=False, client=cluster.scheduler_address)
    assert sum(advanced) == store.nbytes
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        by_client = store.stats(save=False, client=client)
        plain.shard(1).unlink()
        with pytest.raises(CorruptShardError):
            ShardStore.open(plain.path, damaged_ok=True).stats(client=client)
    for stats in (by_address, by_client):
        assert_same(stats, plain.acts)
        np.testing.assert_allclose(stats.mean, here.mean, rtol=1e-13)


def test_in_a_task_of_a_cluster(cluster, tmp_path: Path):
    """Statistics in tasks that occupy all threads of all workers: they must not wait for a thread of those workers."""
    from distributed import Client

    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)

    def mean(number: int) -> np.ndarray:
        return store.stats(save=False, refresh=True, seed=number).mean

    with Client(cluster.scheduler_address) as client:
        found = client.gather([client.submit(mean, number, pure=False) for number in range(4)])
    for values in found:
        np.testing.assert_allclose(values, dense_stats(plain.acts)["mean"], rtol=1e-12)


def test_an_asynchronous_client(cluster, tmp_path: Path):
    import asyncio

    from distributed import Client

    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)

    async def compute() -> Stats:
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            with pytest.raises(ArgumentError):
                store.stats(save=False, client=client)
            return store.stats(save=False)  # the active client cannot be waited for: threads compute

    assert_same(asyncio.run(compute()), plain.acts)


def test_no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(_cluster, "_CONNECT_TIMEOUT_S", 0.3)
    store = ShardStore.open(plain_store(tmp_path).path)
    with pytest.raises(TransportError, match="no dask scheduler"):
        store.stats(client="tcp://127.0.0.1:9")
    with pytest.raises(ArgumentError):
        store.stats(client="nonsense://x")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plain = plain_store(tmp_path)
    assert main(["stats", str(plain.path), "--sample", "3", "--no-save"]) == 0
    text = capsys.readouterr().out
    assert "mean_norm" in text
    assert "over 3 examples (a sample of 7) and 5 tokens" in text
    assert main(["stats", str(plain.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = dense_stats(plain.acts)
    np.testing.assert_allclose(found["per_layer_and_token"]["mean_norm"], wanted["mean_norm"])
    assert found["layers"] == [2, 5, 11]
    assert (plain.path / "stats.json").exists()
    assert main(["stats", str(plain.path), "--sample", "0"]) == 2


# -- what is said ------------------------------------------------------------------------------------------------------


def refused(call) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def test_a_kept_file_that_breaks_a_rule_is_a_document_error(tmp_path: Path):
    store = ShardStore.open(plain_store(tmp_path).path)
    recording = recording_identity(store.transport, store.layout)
    right = json.loads(stats_bytes(store.stats(save=False), store.metadata, recording=recording, seed=None))
    parse_stats(json.dumps(right).encode(), store.metadata, where="p/stats.json")
    changes: list[dict[str, object]] = [
        {"recording": "sizes:1"}, {"recording": "x" * 101}, {"recording": 7}, {"metadata_sha256": "0" * 64}, {"seed": "0"},
        {"mean": [[1.0] * 5] * 2}, {"n_zeros": [[0] * 4] * 3}, {"n_zeros": [[0.0] * 5] * 3}, {"mean": [["x"] * 5] * 3},
        {"n_examples": 8, "n_values": [[64] * 5] * 3}, {"n_vectors": [[7] * 5, [7] * 5, [7, 7, 7, 7, 8]]}, {"n_examples": True},
        {"n_finite": [[56] * 5, [56] * 5, [56, 56, 56, 56, 57]]}, {"n_values": [[56] * 5, [56] * 5, [56, 56, 56, 56, 55]]},
        {"n_subnormal": [[0] * 5, [0] * 5, [0, 0, 0, 0, 57]]}, {"n_subnormal": [[0] * 5, [0] * 5, [0, 0, 0, 0, -1]]},
        {"version": 4}, {"version": None},
    ]  # fmt: skip
    for raw in (b"{", b"[]", *(json.dumps(right | change).encode() for change in changes)):
        error = refused(lambda raw=raw: parse_stats(raw, store.metadata, where="p/stats.json"))
        assert (type(error), error.where) == (DocumentError, "p/stats.json"), raw


def test_a_kept_file_is_named_by_its_address_and_the_caller_is_warned(tmp_path: Path):
    plain = plain_store(tmp_path)
    (plain.path / "stats.json").write_text("{}")
    store = ShardStore.open(plain.path)
    with pytest.warns(SaevStoreWarning) as caught:
        store.stats()
    assert str(caught[0].message).startswith(f"{store.url}/stats.json: ")
    assert caught[0].filename == __file__


def test_a_warning_of_statistics_has_one_full_stop_behind_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise AccessError("could not read", where="digests.json", remedy="Check the permissions.")

    store = ShardStore.open(plain_store(tmp_path).path)
    monkeypatch.setattr("saev_store.stats._store._read_kept", refuse)
    with pytest.warns(SaevStoreWarning, match=r"Check the permissions\. The statistics are computed again$"):
        store.stats()


def test_the_caller_is_warned_of_what_could_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = ShardStore.open(plain_store(tmp_path).path)

    def fail(*_):
        raise TransportError("no space left on device", where="d")

    monkeypatch.setattr(type(store.transport), "put", fail)
    with pytest.warns(
        SaevStoreWarning, match="^stats.json could not be written beside the store: d: no space"
    ) as caught:
        store.stats()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("error", [AccessError("no", where="p"), ReadOnlyError("no", where="p")])
def test_where_nothing_may_be_written_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)

    def refuse(*_):
        raise error

    monkeypatch.setattr(type(store.transport), "put", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(store.stats(), plain.acts)
        assert sampled_stats(store, 3).n_examples == 3


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"refresh": "no"}, "refresh"), ({"save": 1}, "save"), ({"progress": "yes"}, "progress"),
        ({"sample": 2.5}, "sample, seed"), ({"sample": 0}, "sample, seed"), ({"sample": 3, "seed": -1}, "sample, seed"),
        ({"sample": 3, "seed": "x"}, "sample, seed"),
    ],
)  # fmt: skip
def test_what_is_no_option_names_the_argument(tmp_path: Path, options: dict[str, object], where: str):
    plain = plain_store(tmp_path)
    error = refused(lambda: ShardStore.open(plain.path).stats(**options))
    assert (type(error), error.where) == (ArgumentError, where)
    assert not (plain.path / "stats.json").exists()


def test_statistics_are_of_an_opened_store(tmp_path: Path):
    error = refused(lambda: store_stats(str(plain_store(tmp_path).path)))
    assert (type(error), error.where) == (ArgumentError, "store")
    assert error.message.endswith("; it must be a ShardStore")


def test_a_block_that_differs_is_named_by_its_bytes(tmp_path: Path):
    """The last block of the last shard ends with its last vector."""
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=400)
    for shard_idx, at, what in ((1, 450, "400 to 800"), (2, 479, "400 to 480")):
        data = bytearray(plain.truth(shard_idx).tobytes())
        data[at] ^= 1
        plain.shard(shard_idx).write_bytes(data)
        store = ShardStore.open(plain.path)
        error = refused(store.stats)
        assert (
            error.message == f"bytes {what} differ from their digest in digests.json, so statistics of them are refused"
        )
        assert error.where == f"{store.url}/acts{shard_idx:06d}.bin"
        plain.shard(shard_idx).write_bytes(plain.truth(shard_idx).tobytes())


def test_padding_has_no_digests_and_none_is_needed(tmp_path: Path):
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=100)
    with plain.shard(2).open("r+b") as file:
        file.seek(plain.shard_nbytes - 1)
        file.write(b"\1")
    assert_same(ShardStore.open(plain.path).stats(), plain.acts)


# -- a sample for a loader, and what is only looked up -------------------------------------------------------------------


def test_a_sample_of_a_loader_is_read_in_all_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compute, "_TASK_BYTES", 1000)  # two examples
    plain = plain_store(tmp_path, n=40, per_shard=7)
    store = ShardStore.open(plain.path)
    chosen = np.sort(np.random.default_rng(5).choice(40, 11, replace=False, shuffle=False))
    found = sampled_stats(store, 11, seed=5)
    assert_same(found, plain.acts[chosen])
    assert (found.n_examples, found.is_sample) == (11, True)
    assert parse_stats((plain.path / "stats.json").read_bytes(), store.metadata, where="x").seed == 5


def test_a_loader_that_samples_everything_compares_with_digests(tmp_path: Path):
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=100)
    data = bytearray(plain.truth(1).tobytes())
    data[0] ^= 1
    plain.shard(1).write_bytes(data)
    with pytest.raises(CorruptShardError, match="digest"):
        sampled_stats(ShardStore.open(plain.path), 7)


def test_what_is_kept_is_looked_up_without_a_word(tmp_path: Path):
    """Of a sample as well; a file that is broken, or of a recording that is gone, is none."""
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    assert kept_stats(store) is None
    store.stats(sample=3, seed=2)
    found = kept_stats(store)
    assert found is not None
    assert found.n_examples == 3
    file = plain.path / "stats.json"
    right = file.read_bytes()
    for broken in (b"", b"{", b"x" * 10_000_000):
        file.write_bytes(broken)
        assert kept_stats(store) is None
    file.write_bytes(right)
    assert kept_stats(store) is not None
    os.utime(plain.shard(0), ns=(7, 7))
    assert kept_stats(ShardStore.open(plain.path)) is None


def test_a_sample_replaces_another_one_and_a_broken_file(tmp_path: Path):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    file = plain.path / "stats.json"
    for n_examples in (3, 2):
        store.stats(sample=n_examples)
        assert json.loads(file.read_text())["n_examples"] == n_examples
    file.write_text("{")
    with pytest.warns(SaevStoreWarning, match="computed again"):
        store.stats(sample=2)
    assert json.loads(file.read_text())["n_examples"] == 2


def test_statistics_of_whole_shards_are_not_those_of_a_seed(tmp_path: Path):
    """What is kept of all examples has no seed, also where one was given."""
    plain = plain_store(tmp_path)
    ShardStore.open(plain.path).stats(sample=7, seed=5)
    found = json.loads((plain.path / "stats.json").read_text())
    assert (found["n_examples"], found["seed"]) == (7, None)


def test_a_file_of_the_widest_numbers_is_read_again(tmp_path: Path):
    plain = plain_store(tmp_path, n=40, layers=tuple(range(12)), tokens=30)
    plain.acts *= np.float32(1e-38) * np.float32(1.2345678)
    for shard_idx in range(plain.n_shards):
        plain.shard(shard_idx).write_bytes(plain.truth(shard_idx).tobytes())
    ShardStore.open(plain.path).stats()
    kept = kept_stats(ShardStore.open(plain.path))
    assert kept is not None
    assert_same(kept, plain.acts)


@pytest.mark.parametrize(("layer", "rows"), [([2, 11], [0, 2]), ([11, 2], [0, 2]), ([5], [1]), ("all", [0, 1, 2])])
def test_the_scale_is_of_the_chosen_layers_alone(tmp_path: Path, layer: object, rows: list[int]):
    plain = plain_store(tmp_path)
    plain.acts[:, 1] *= 5
    for shard_idx in range(plain.n_shards):
        plain.shard(shard_idx).write_bytes(plain.truth(shard_idx).tobytes())
    stats = ShardStore.open(plain.path).stats()
    norm = np.sqrt((plain.acts[:, rows, 1:].astype(np.float64) ** 2).sum(-1)).mean()
    assert stats.scale(layer) == pytest.approx(np.sqrt(8) / norm, rel=1e-12)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_vectors_without_a_norm_have_no_scale(value: float):
    stats = stats_of(Layout(2, (3, 7), 2, True, 4, 2), np.full((2, 2, 3, 4), value, np.float32))
    error = refused(lambda: stats.scale(7, "content"))
    assert (type(error), error.where) == (ArgumentError, "scale")
    assert error.message == "the mean norm of layer 7, content tokens, is 0.0: no factor makes it sqrt(d_model)"


def test_large_whole_numbers_are_shown_in_full_up_to_15_digits():
    layout = Layout(1, (0, 1, 2), 1, False, 1, 1)
    stats = stats_of(layout, np.float32([[[[2.0**40]], [[2.0**60]], [[2.5]]]]))
    assert [row[2] for row in stats.rows()] == ["1,099,511,627,776", "1.153e+18", "2.5"]


def test_statistics_in_memory_are_about_the_dtype_of_the_store():
    acts = np.float32([[[[65504.0, 2.0**-15, 0.0, 1.0]]], [[[1.0, 1.0, 1.0, 1.0]]]])
    narrow = stats_of(Layout(9, (0,), 1, False, 4, 3, "float16"), acts)
    assert (narrow.saturated_count.item(), narrow.subnormal_count.item(), narrow.n_examples) == (1, 1, 2)
    assert narrow.is_sample
    wide = stats_of(Layout(2, (0,), 1, False, 4, 3), acts)
    assert (wide.saturated_count.item(), wide.subnormal_count.item(), wide.is_sample) == (0, 0, False)


# -- how the work is cut -------------------------------------------------------------------------------------------------


def test_a_store_of_any_size_is_a_bounded_number_of_tasks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compute, "_TASK_BYTES", 64)
    monkeypatch.setattr(_compute, "_MAX_TASKS", 10)
    layout = Layout(1000, (0,), 1, False, 16, 1000)  # an example has 64 bytes
    assert _compute.plan(layout, None) == [(start, start + 100) for start in range(0, 1000, 100)]
    chosen = np.arange(0, 1000, 2)
    assert [work.tolist() for work in _compute.plan(layout, chosen)] == [part.tolist() for part in np.split(chosen, 5)]


def test_an_example_that_is_larger_than_a_piece_is_read_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)
    read: list[tuple[int, ...]] = []
    original = _compute.moments_of
    monkeypatch.setattr(
        _compute, "moments_of", lambda block, *more: (read.append(block.shape), original(block, *more))[1]
    )
    for nbytes, shapes in (
        (960, {(2, 3, 5, 8), (1, 3, 5, 8)}), (959, {(1, 3, 5, 8)}), (480, {(1, 3, 5, 8)}), (479, {(1, 1, 5, 8)}),
    ):  # fmt: skip
        monkeypatch.setattr(_compute, "_READ_BYTES", nbytes)
        read.clear()
        assert_same(ShardStore.open(plain.path).stats(save=False), plain.acts)
        assert set(read) == shapes
        assert sum(shape[0] * shape[1] for shape in read) == 7 * 3


def test_a_kept_file_is_read_up_to_its_bound(tmp_path: Path):
    """Blanks behind a right document are no reason to load them."""
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    store.stats()
    file = plain.path / "stats.json"
    file.write_bytes(file.read_bytes() + b" " * 1_000_000)
    assert kept_stats(store) is None
    with pytest.warns(SaevStoreWarning, match="stats.json"):
        assert_same(store.stats(), plain.acts)


def test_a_kept_sample_without_a_seed_answers_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    store.stats(sample=3, seed=0)
    file = plain.path / "stats.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seed": None}))
    calls = computed(monkeypatch)
    store.stats(sample=3, seed=0)
    assert len(calls) == 1


def test_digests_that_vanish_between_two_reads_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=100)
    store = ShardStore.open(plain.path)
    monkeypatch.setattr("saev_store.stats._store.promised_digests", lambda *_, **__: Promised(100, {}, ()))
    assert_same(store.stats(), plain.acts)
    assert json.loads((plain.path / "stats.json").read_text())["recording"].startswith("versions:")


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_digests_that_cannot_be_read_just_then_leave_no_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
):
    """A damaged store would have some, kept as those of a store without digests."""
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=100)
    shard = plain.path / "acts000001.bin"
    data = bytearray(shard.read_bytes())
    data[19] ^= 0x40
    shard.write_bytes(data)
    load, n_read = load_digests, []

    def loads(transport: Transport) -> object:
        n_read.append(transport)
        if len(n_read) == failing:
            raise TransportError("could not read: EMFILE", where="digests.json", transient=True)
        return load(transport)

    with monkeypatch.context() as changed:
        changed.setattr("saev_store.writer.load_digests", loads)
        with pytest.raises((TransportError, CorruptShardError)):
            ShardStore.open(plain.path).stats()
    assert not (plain.path / "stats.json").exists()
    with pytest.raises(CorruptShardError):
        ShardStore.open(plain.path).stats()
