"""Copies in another dtype: the numbers that ml_dtypes and torch give, and a report that NumPy in float64 confirms."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import sys
import warnings
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kill_copies import killed_copies
from plain_stores import plain_store
from servers import s3_bucket  # noqa: F401  (a fixture)

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.dtypes import stored_as
from saev_store.errors import ArgumentError, CorruptShardError, IncompleteStoreError, ResumeError, StoreExistsError
from saev_store.writer.copying import _layers, _rounding, _source, copy_store
from saev_store.writer.copying._rounding import Measurement, RoundingReport, parse_report

SAMPLES = Path(__file__).parents[1] / "data" / "saev"
STORES = sorted(path.parent for path in SAMPLES.glob("v*/**/metadata.json"))
DTYPES = {name: np.dtype(kind) for name, kind in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16))}
DTYPES["float32"] = np.dtype(np.float32)
LARGEST = {"bfloat16": np.float32(float.fromhex("0x1.fep127")), "float16": np.float32(65504.0)}
META = {
    "family": "gpt2", "ckpt": "random", "layers": (2, 5, 5), "hook_points": ["resid_post", "attn_out", "resid_post"],
    "content_tokens_per_example": 4, "cls_token": True, "d_model": 8, "n_examples": 7, "max_tokens_per_shard": 45,
    "token_arrays": {"token_ids": "int32", "mask": "bool"},
}  # fmt: skip


def made(root: Path, acts: np.ndarray, **changes: object) -> tuple[str, dict[str, np.ndarray]]:
    """A store of such numbers with token arrays, made by the writer."""
    metadata = new_metadata(**META | changes, dtype=acts.dtype.name)
    rng = np.random.default_rng(1)
    arrays = {"token_ids": rng.integers(0, 50_000, (7, 4), dtype=np.int32), "mask": rng.integers(0, 2, (7, 4)) == 1}
    arrays = {array.name: arrays[array.name] for array in metadata.token_arrays}
    with ShardStore.create(root, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(acts, **arrays)
    return f"{root}/{metadata.hash}", arrays


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in another dtype by NumPy and ml_dtypes, without their warnings of NaN and infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(DTYPES[dtype])


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def expected_report(old: np.ndarray, new: np.ndarray) -> dict[str, object]:
    """The report by its definition, number by number."""
    n_changed, errors, relative, n_became_infinite = 0, [0.0], [], 0
    pairs = zip(old.reshape(-1, old.shape[-1]), new.reshape(-1, new.shape[-1]), strict=True)
    for before, after in pairs:
        wide, narrow = cast(before, "float32"), cast(after, "float32")
        n_changed += wide.tobytes() != narrow.tobytes()
        for a, b in zip(wide.tolist(), narrow.tolist(), strict=True):
            n_became_infinite += bool(np.isfinite(a) and np.isinf(b))
            if np.isfinite(a) and np.isfinite(b):
                errors.append(abs(b - a))
                relative += [abs(b - a) / abs(a)] if a else []
    n_vectors = old.size // old.shape[-1]
    return {
        "source_dtype": old.dtype.name,
        "dtype": new.dtype.name,
        "n_vectors": n_vectors,
        "n_changed_vectors": n_changed,
        "max_abs_error": max(errors),
        "mean_rel_error": pytest.approx(np.mean(relative or [0.0]), rel=1e-12),
        "n_became_infinite": n_became_infinite,
        "changed_fraction": n_changed / n_vectors,
        "is_bit_lossless": n_changed == 0,
    }


def numbers(dtype: str) -> np.ndarray:
    """Numbers of every kind that the narrower dtypes can hold, subnormals, infinities, NaN and negative zeros among them."""
    rng = np.random.default_rng(7)
    acts = rng.standard_normal((7, 3, 5, 8)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 4, (7, 3, 5, 8))
    acts[0, 0, 0] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -6e-8, 1 + 2**-9]
    acts[2] = np.round(acts[2])  # vectors that stay
    acts[3, :, 1] = 1.5
    acts = acts.astype(np.float32)
    acts.view(np.uint32)[0, 1, 0] = [
        0x7F800001,
        0xFFC01234,
        0x7FC00000,
        1,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x3F808000,
    ]
    return cast(acts, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_numbers_are_rounded_as_ml_dtypes_rounds_and_the_report_is_exact(tmp_path, source, dtype):
    acts = numbers(source)
    path, arrays = made(tmp_path / "from", acts)
    url = copy_store(path, tmp_path / "to", dtype=dtype, progress=False)
    store = ShardStore.open(url)
    truth = acts if source == dtype else cast(acts, dtype)
    assert store.metadata.dtype == dtype
    assert np.array_equal(bits(store.read(dtype="stored")), bits(truth))
    for name, values in arrays.items():
        assert np.array_equal(store.token_arrays[name], values)
    assert url.rounding.to_dict() == expected_report(acts, truth)
    assert {problem.kind for problem in store.validate(deep=True, progress=False).problems} == {"non_finite"}
    assert store.name == store.metadata.hash
    if source != dtype:
        origin = json.loads((Path(url) / "provenance.json").read_text())
        assert origin["conversion"] == url.rounding.to_dict()
        assert origin["source_metadata"]["dtype"] == source
        assert store.nbytes * acts.dtype.itemsize == acts.nbytes * DTYPES[dtype].itemsize
    again = copy_store(path, tmp_path / "to", dtype=dtype, progress=False)
    assert (again, again.rounding) == (url, url.rounding)
    assert pickle.loads(pickle.dumps(again)).rounding == url.rounding


@given(data=st.data(), source=st.sampled_from(list(DTYPES)), dtype=st.sampled_from(list(DTYPES)))
def test_any_bits_in_any_batches_give_the_report_of_its_definition(data, source, dtype):
    unsigned = np.dtype(f"u{DTYPES[source].itemsize}")
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4)))
    old = data.draw(hnp.arrays(unsigned, shape)).view(DTYPES[source])
    new = old if source == dtype else cast(old, dtype)
    assert np.array_equal(bits(stored_as(old, DTYPES[dtype])), bits(new))
    measurement, cut = Measurement(source, dtype), data.draw(st.integers(0, len(old)))
    for batch in (slice(0, cut), slice(cut, None)):
        part = old[batch].swapaxes(0, 1)
        assert np.array_equal(bits(measurement.rounded(part, part)), bits(new[batch].swapaxes(0, 1)))
    report = measurement.report()
    assert report.to_dict() == expected_report(old, new)
    assert parse_report(json.loads(json.dumps(report.to_dict()))) == report


@given(hnp.arrays(np.float64, st.integers(0, 50), elements=st.floats(0, 1e6)), st.integers(0, 50))
def test_sums_of_relative_errors_are_exact_in_any_parts(numbers, cut):
    total = _rounding.exact_sum(numbers[:cut]) + _rounding.exact_sum(numbers[cut:])
    assert Fraction(total, 2**1126) == sum(map(Fraction, numbers.tolist()), Fraction(0))


def test_the_report_has_the_same_bits_with_any_number_of_threads(monkeypatch):
    acts, found = numbers("float32"), []
    monkeypatch.setattr(_rounding, "_PIECE_BYTES", 3 * 32)
    monkeypatch.setattr(_rounding, "_THREAD_BYTES", 6 * 32)
    for n in (1, 2, 7):
        monkeypatch.setattr(_rounding, "n_threads", lambda *_, n=n, **__: n)
        measurement = Measurement("float32", "bfloat16")
        for example in acts:
            new = measurement.rounded(example, example)
            assert np.array_equal(bits(new), bits(cast(example, "bfloat16")))
        found.append(measurement.report())
    assert found[0] == found[1] == found[2]
    assert found[0].to_dict() == expected_report(acts, cast(acts, "bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_are_rounded_as_torch_rounds(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    acts = np.where(np.isnan(numbers("float32")), np.float32(0), numbers("float32"))
    path, _ = made(tmp_path / "from", acts)
    store = ShardStore.open(copy_store(path, tmp_path / "to", dtype=dtype, progress=False))
    truth = torch.from_numpy(acts).to(getattr(torch, dtype)).view(torch.int16).numpy()
    assert np.array_equal(store.read(dtype="stored").view(np.int16), truth)


def test_a_report_as_text():
    changed = RoundingReport("float32", "float16", 20_000, 5_000, 0.001234567, 1 / 3, 0)
    text = "float32 to float16: 25% of 20,000 vectors changed, max absolute error 0.001235, mean relative error 0.3333"
    assert str(changed) == text
    assert str(dataclasses.replace(changed, n_became_infinite=1_200)) == f"{text}, 1,200 numbers became infinite"
    assert not changed.is_bit_lossless
    same = RoundingReport("float32", "float16", 20_000, 0, 0.0, 0.0, 0)
    assert str(same) == "float32 to float16: bit-lossless, none of 20,000 vectors changed"


def test_what_a_bfloat16_model_computed_shrinks_without_a_changed_bit_and_comes_back_as_it_was(tmp_path):
    source = plain_store(tmp_path / "from", labels=True)
    for shard_idx in range(source.n_shards):  # numbers of a bfloat16 model, stored as float32
        data = np.fromfile(source.shard(shard_idx), np.uint32) & np.uint32(0xFFFF0000)
        data.tofile(source.shard(shard_idx))
    half = copy_store(source.path, tmp_path / "half", dtype="bfloat16", progress=False)
    assert half.rounding.is_bit_lossless
    assert (half.rounding.max_abs_error, half.rounding.mean_rel_error) == (0.0, 0.0)
    assert str(half.rounding) == "float32 to bfloat16: bit-lossless, none of 105 vectors changed"
    store = ShardStore.open(half)
    assert (store.metadata.protocol, store.metadata.dtype) == ("3.0", "bfloat16")
    assert np.array_equal(store.labels, source.labels)
    back = copy_store(half, tmp_path / "back", dtype="float32", progress=False)
    assert Path(back).name == source.path.name
    assert back.rounding.is_bit_lossless
    for path in source.path.iterdir():
        if path.name != "shards.json":  # its white space is the helper's own
            assert (Path(back) / path.name).read_bytes() == path.read_bytes(), path.name


def test_protocol_2_0_is_written_where_it_can_say_everything(tmp_path):
    acts = numbers("bfloat16")
    path, _ = made(tmp_path / "from", acts)
    for options, protocol in (
        ({}, "3.0"),  # hook points and token arrays
        ({"layers": [2]}, "3.0"),  # token arrays
    ):
        store = ShardStore.open(copy_store(path, tmp_path / "to", dtype="float32", progress=False, **options))
        assert store.metadata.protocol == protocol
    path, _ = made(tmp_path / "plain", acts, token_arrays=None)
    for layers, protocol in (
        (None, "3.0"),
        ([(5, "attn_out")], "3.0"),
        ([(2, "resid_post"), (5, "resid_post")], "2.0"),
    ):
        url = copy_store(path, tmp_path / "to", dtype="float32", layers=layers, tokens="content", progress=False)
        store = ShardStore.open(url)
        assert store.metadata.protocol == protocol
        kept = [0, 1, 2] if layers is None else [1] if len(layers) == 1 else [0, 2]
        assert np.array_equal(bits(store[...]), bits(cast(acts, "float32")[:, kept, 1:]))
    with pytest.raises(ArgumentError, match="2.1 cannot hold"):
        copy_store(path, tmp_path / "to", dtype="float16", protocol="2.1", layers=[2], progress=False)
    url = copy_store(path, tmp_path / "to", dtype="float32", protocol="2.1", layers=[2], progress=False)
    assert ShardStore.open(url).metadata.protocol == "2.1"


@pytest.mark.parametrize("sample", STORES, ids=lambda path: path.relative_to(SAMPLES).parts[0])
def test_stores_of_every_version_shrink(sample, tmp_path):
    source = ShardStore.open(sample)
    url = copy_store(sample, tmp_path, dtype="bfloat16", progress=False)
    store = ShardStore.open(url)
    order = [problem.kind for problem in source.problems if problem.kind == "layer_order"]
    assert [problem.kind for problem in store.problems] == order
    truth = cast(source[...], "bfloat16")
    assert np.array_equal(bits(store.read(dtype="stored")), bits(truth))
    assert url.rounding.to_dict() == expected_report(source[...], truth)
    assert dict(store.token_arrays).keys() == dict(source.token_arrays).keys()
    assert (store.layers, store.metadata.family) == (source.layers, source.metadata.family)
    kept = source.metadata.extra.items() <= store.metadata.extra.items()
    assert kept


def test_a_description_that_is_no_object_is_kept_and_not_decoded(tmp_path):
    acts = numbers("float32")
    plain = {"hook_points": None, "token_arrays": None, "layers": (2, 5, 6), "protocol": "2.1"}
    for data, kept in (
        ("gASVkgAAAA==", {"opaque": "gASVkgAAAA=="}),
        ({"a": [1]}, {"a": [1]}),
        ("[1]", {"opaque": "[1]"}),
    ):
        path, _ = made(tmp_path / "from", acts, **plain, data=data)
        metadata = ShardStore.open(copy_store(path, tmp_path / "to", dtype="bfloat16", progress=False)).metadata
        assert metadata.data == kept


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unknown_keys_and_what_is_said_of_texts_are_kept(tmp_path, dtype):
    extra, text = {"lab": "ours", "n": 1.5}, {"layout": "window", "bos": True, "tokenizer": {"name": "gpt2"}}
    path, _ = made(tmp_path / "from", numbers("bfloat16"), extra=extra, text=text)
    metadata = ShardStore.open(copy_store(path, tmp_path, dtype=dtype, progress=False)).metadata
    assert (metadata.extra, metadata.text, metadata.dtype, metadata.protocol) == (extra, text, dtype, "3.0")
    assert metadata.hook_points == tuple(META["hook_points"])
    # Where a version is asked for, it is that version with its own keys alone.
    url = copy_store(path, tmp_path / "asked", dtype=dtype, protocol="3.0", progress=False)
    metadata = ShardStore.open(url).metadata
    assert (metadata.extra, metadata.text, metadata.dtype, metadata.protocol) == ({}, text, dtype, "3.0")


@pytest.mark.parametrize(
    ("source", "dtype"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")]
)
def test_numbers_that_are_too_large(tmp_path, source, dtype):
    acts = numbers(source)
    large = np.finfo(np.float32).max if source == "float32" else LARGEST[source]
    acts[5, 1, 2, 3:5] = [-large, large]
    path, _ = made(tmp_path / "from", acts)
    with pytest.raises(ArgumentError, match=rf"example 5 holds 2 numbers that {dtype} cannot hold"):
        copy_store(path, tmp_path / "to", dtype=dtype, progress=False)
    url = copy_store(path, tmp_path / "to", dtype=dtype, on_overflow="saturate", progress=False)  # goes on
    truth = cast(acts, dtype)
    truth[5, 1, 2, 3:5] = [-LARGEST[dtype], LARGEST[dtype]]
    assert np.array_equal(bits(ShardStore.open(url).read(dtype="stored")), bits(truth))
    assert url.rounding.to_dict() == expected_report(acts, truth)
    with pytest.warns(SaevStoreWarning, match="recorded as infinity"):
        url = copy_store(path, tmp_path / "warn", dtype=dtype, on_overflow="warn", progress=False)
    truth[5, 1, 2, 3:5] = [-np.inf, np.inf]
    assert np.array_equal(bits(ShardStore.open(url).read(dtype="stored")), bits(truth))
    assert url.rounding.to_dict() == expected_report(acts, truth)
    assert "2 numbers became infinite" in str(url.rounding)


@pytest.mark.parametrize("after", range(1, 8))
def test_an_interrupted_copy_continues_with_the_same_bytes_and_the_same_report(tmp_path, monkeypatch, after):
    acts = numbers("float32")
    path, _ = made(tmp_path / "from", acts)
    monkeypatch.setattr(_source, "_BATCH_BYTES", 3 * 5 * 8 * 4)  # one example
    whole = copy_store(path, tmp_path / "whole", dtype="bfloat16", progress=False)

    def stop(*args, **kwargs):
        yield from itertools.islice(_source.batches(*args, **kwargs), after)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_layers, "batches", stop)
        with pytest.raises(KeyboardInterrupt):
            copy_store(path, tmp_path / "to", dtype="bfloat16", progress=False)
    (entry,) = ShardStore.list(tmp_path / "to")
    assert entry.state == "unfinished"
    url = copy_store(path, tmp_path / "to", dtype="bfloat16", progress=False)
    assert url.rounding == whole.rounding
    for file in Path(whole).iterdir():
        assert (Path(url) / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("policy", ["saturate", "warn"])
def test_a_copy_is_not_continued_with_another_policy(policy, tmp_path, monkeypatch):
    path, _ = made(tmp_path / "from", numbers("float32"))

    def interrupted(on_overflow):
        def stop(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_layers, "_provenance", stop)
            copy_store(path, tmp_path / "to", dtype="float16", on_overflow=on_overflow, progress=False)

    interrupted("raise")
    interrupted(policy)
    for other in ("raise", "warn" if policy == "saturate" else "saturate"):
        with pytest.raises(ResumeError, match=f"begun with on_overflow='{policy}', and this call has '{other}'"):
            copy_store(path, tmp_path / "to", dtype="float16", on_overflow=other, progress=False)
    assert copy_store(path, tmp_path / "to", dtype="float16", on_overflow=policy, progress=False).rounding


def test_a_copy_is_not_continued_from_other_token_arrays(tmp_path, monkeypatch):
    """Where no digests tell recordings apart, also the times of token arrays do."""
    path, arrays = made(tmp_path / "from", numbers("float32"))
    (Path(path) / "digests.json").unlink()

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_layers.Folder, "put", stop)
        copy_store(path, tmp_path / "to", dtype="bfloat16", progress=False)
    (Path(path) / "mask.bin").write_bytes((~arrays["mask"]).tobytes())
    with pytest.raises(IncompleteStoreError, match="no copy of this one, as it is now"):
        copy_store(path, tmp_path / "to", dtype="bfloat16", progress=False)


def test_a_recording_is_not_taken_for_a_copy(tmp_path):
    """Back in float32 the copy would have the name of what it was made from, and other numbers."""
    source = plain_store(tmp_path)
    half = copy_store(source.path, tmp_path, dtype="bfloat16", progress=False)
    assert not half.rounding.is_bit_lossless
    before = {path.name: path.read_bytes() for path in source.path.iterdir()}
    for replace in (False, True):
        with pytest.raises(StoreExistsError, match="no copy of this one"):
            copy_store(half, tmp_path, dtype="float32", replace=replace, progress=False)
    assert {path.name: path.read_bytes() for path in source.path.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        lambda _: [],
        lambda origin: {**origin, "source_hash": "0" * 64},
        lambda origin: {name: value for name, value in origin.items() if name != "conversion"},
        lambda origin: {**origin, "conversion": [1]},
        lambda origin: {**origin, "conversion": {**origin["conversion"], "n_vectors": 1.0}},
        lambda origin: {**origin, "conversion": {**origin["conversion"], "n_vectors": 0}},
        lambda origin: {**origin, "conversion": {**origin["conversion"], "max_abs_error": None}},
    ],
)
def test_a_store_whose_origin_is_unclear_is_no_finished_copy(tmp_path, change):
    source = plain_store(tmp_path / "from")
    url = copy_store(source.path, tmp_path / "to", dtype="bfloat16", progress=False)
    file = Path(url) / "provenance.json"
    changed = change(json.loads(file.read_text()))
    file.unlink() if changed is None else file.write_text(json.dumps(changed))
    with pytest.raises(StoreExistsError, match="no copy of this one"):
        copy_store(source.path, tmp_path / "to", dtype="bfloat16", progress=False)


def test_a_copy_of_an_earlier_recording_is_replaced_when_asked(tmp_path, monkeypatch):
    source = plain_store(tmp_path / "from", seed=0)
    source.write_digests(256)
    old = copy_store(source.path, tmp_path / "to", dtype="float16", progress=False)
    before = {path.name: path.stat().st_mtime_ns for path in Path(old).iterdir()}
    assert copy_store(source.path, tmp_path / "to", dtype="float16", replace=True, progress=False) == old
    assert {path.name: path.stat().st_mtime_ns for path in Path(old).iterdir()} == before
    source.acts[...] = source.acts[::-1].copy()
    for shard_idx in range(source.n_shards):
        source.truth(shard_idx).tofile(source.shard(shard_idx))
        with source.shard(shard_idx).open("ab") as shard:
            shard.truncate(source.shard_nbytes)
    source.write_digests(256)
    with pytest.raises(StoreExistsError, match="another recording"):
        copy_store(source.path, tmp_path / "to", dtype="float16", progress=False)
    new = copy_store(source.path, tmp_path / "to", dtype="float16", replace=True, progress=False)
    assert np.array_equal(ShardStore.open(new).read(dtype="stored"), source.acts.astype(np.float16))
    assert new == old


def test_to_a_bucket_and_back(tmp_path, s3_bucket):
    acts = numbers("float32")
    path, arrays = made(tmp_path / "from", acts)
    url = copy_store(
        path, f"{s3_bucket.url}/half", dtype="bfloat16", dst_storage_options=s3_bucket.options, progress=False
    )
    assert url.rounding == copy_store(path, tmp_path / "here", dtype="bfloat16", progress=False).rounding
    remote = ShardStore.open(url, s3_bucket.options)
    assert np.array_equal(bits(remote.read(dtype="stored")), bits(cast(acts, "bfloat16")))
    back = copy_store(url, tmp_path / "back", dtype="float32", storage_options=s3_bucket.options, progress=False)
    assert np.array_equal(bits(ShardStore.open(back)[...]), bits(cast(cast(acts, "bfloat16"), "float32")))
    assert np.array_equal(ShardStore.open(back).token_arrays["token_ids"], arrays["token_ids"])


@pytest.mark.slow
def test_killed_copies_continue(tmp_path):
    source = plain_store(tmp_path / "from", n=96, tokens=63, d_model=256, per_shard=8)
    whole = copy_store(source.path, tmp_path / "whole", dtype="bfloat16", progress=False)
    folder = tmp_path / "to" / Path(whole).name
    command = [
        sys.executable,
        "-m",
        "saev_store",
        "copy",
        str(source.path),
        str(tmp_path / "to"),
        "--dtype",
        "bfloat16",
    ]
    for _ in killed_copies(command, folder, n_receipts=(0, 1, 4)):
        pass
    url = copy_store(source.path, tmp_path / "to", dtype="bfloat16", progress=False)
    assert url.rounding == whole.rounding
    for file in Path(whole).iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name


def test_damaged_numbers_are_not_rounded(tmp_path):
    source = plain_store(tmp_path / "from")
    source.write_digests(256)
    data = bytearray(source.shard(1).read_bytes())
    data[7] ^= 1
    source.shard(1).write_bytes(data)
    with pytest.raises(CorruptShardError):
        copy_store(source.path, tmp_path / "to", dtype="bfloat16", progress=False)


def test_a_dtype_that_is_none(tmp_path):
    source = plain_store(tmp_path / "from")
    for dtype in ("int8", "float64", "stored", 3):
        with pytest.raises(ArgumentError, match="it must be one of float32, bfloat16, float16"):
            copy_store(source.path, tmp_path / "to", dtype=dtype, progress=False)
    with pytest.raises(ArgumentError, match="on_overflow"):
        copy_store(source.path, tmp_path / "to", dtype="float16", on_overflow="clip", progress=False)
    assert not (tmp_path / "to").exists()


def test_what_is_stored_does_not_depend_on_torch_being_there(tmp_path):
    """torch makes signalling NaNs of float16 quiet."""
    pytest.importorskip("torch")
    acts = numbers("float16")
    acts.view(np.uint16)[1, 0, 0, :3] = [0x7C01, 0xFD00, 0x7E00]
    path, _ = made(tmp_path / "from", acts)
    url = copy_store(path, tmp_path / "to", dtype="float32", progress=False)
    truth = cast(acts, "float32")
    assert truth.view(np.uint32)[1, 0, 0, 0] == 0x7F802000  # signalling still
    assert np.array_equal(bits(ShardStore.open(url)[...]), bits(truth))
    assert url.rounding.is_bit_lossless


def test_nan_in_bfloat16_is_no_reason_for_a_warning(tmp_path):
    acts = numbers("bfloat16")
    path, _ = made(tmp_path / "from", acts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy_store(path, tmp_path / "to", dtype="float16", progress=False)
