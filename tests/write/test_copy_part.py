"""Copies of layers and tokens, and in another dtype: what NumPy and ml_dtypes give."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from clusters import two_workers
from plain_stores import plain_store
from servers import s3_bucket  # noqa: F401  # a fixture
from written import LOCAL, content

from saev_store import ShardStore, new_metadata
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    SelectionError,
    StoreExistsError,
    TransportError,
)
from saev_store.writer import copy_store

SAMPLES = Path(__file__).parents[1] / "data" / "saev"
STORES = sorted(path.parent for path in SAMPLES.glob("v*/**/metadata.json"))
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
LARGEST = {"bfloat16": np.float32(float.fromhex("0x1.fep127")), "float16": np.float32(65504.0)}
PAIRS = [(2, "resid_post"), (5, "attn_out"), (5, "resid_post")]


def made(root: Path, acts: np.ndarray, **changes: object) -> tuple[str, dict[str, np.ndarray]]:
    """A store of such numbers, (7, 3, 5, 8), with token arrays."""
    metadata = new_metadata(
        **{
            "family": "gpt2", "ckpt": "random", "layers": [2, 5, 5], "hook_points": [point for _, point in PAIRS],
            "content_tokens_per_example": 4, "cls_token": True, "d_model": 8, "n_examples": 7, "max_tokens_per_shard": 45,
            "token_arrays": {"token_ids": "int32", "mask": "bool"}, **changes,
        }, dtype=acts.dtype.name,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    arrays = {"token_ids": rng.integers(0, 50_000, (7, 4), dtype=np.int32), "mask": rng.integers(0, 2, (7, 4)) == 1}
    arrays = {array.name: arrays[array.name] for array in metadata.token_arrays}
    with ShardStore.create(root, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(acts, **arrays)
    return f"{root}/{metadata.hash}", arrays


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(DTYPES[dtype])


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def numbers(dtype: str) -> np.ndarray:
    """Numbers of every kind that the narrower dtypes hold: subnormals, infinities, NaN and negative zeros too."""
    rng = np.random.default_rng(7)
    acts = rng.standard_normal((7, 3, 5, 8)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 4, (7, 3, 5, 8))
    acts = acts.astype(np.float32)
    acts[0, 0, 0] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -6e-8, 1 + 2**-9]
    acts[2] = np.round(acts[2])  # vectors that stay
    acts.view(np.uint32)[0, 1, 0] = [0x7F800001, 0xFFC01234, 0x7FC00000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F808000]
    return cast(acts, dtype)


def stopping_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The file of a shard cannot be begun."""
    real = LOCAL.open_sink

    def open_sink(self, path, **options):
        if path == name:
            raise TransportError("the disk is full", where=path)
        return real(self, path, **options)

    monkeypatch.setattr(LOCAL, "open_sink", open_sink)


# -- layers and tokens -------------------------------------------------------------------------------------------------


def test_copy_of_layers_or_tokens_is_a_new_store_of_those_numbers(tmp_path):
    source = plain_store(tmp_path / "from", labels=True)
    source.acts.view("<u4")[0, 0, 0] = [0x7FA00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x7FFFFFFF, 0]
    source.shard(0).write_bytes(source.truth(0).tobytes())
    original = json.loads((source.path / "metadata.json").read_text())
    for digests in (None, 100, 1 << 20):
        if digests:
            source.write_digests(digests)
        to = tmp_path / f"to-{digests}"
        for layers, tokens in [([5], "all"), ((11, 2), "all"), (None, "content"), (None, "special"), ([5], "special")]:
            url = copy_store(source.path, to, layers=layers, tokens=tokens, progress=False)
            new, kept = (
                ShardStore.open(url),
                [i for i, label in enumerate((2, 5, 11)) if label in (layers or (2, 5, 11))],
            )
            at = {"all": slice(0, 5), "content": slice(1, 5), "special": slice(0, 2)}[
                tokens
            ]  # no store is without content
            assert np.array_equal(bits(new[...]), bits(source.acts[:, kept, at]))
            assert np.array_equal(new.labels, source.labels[:, :1] if tokens == "special" else source.labels)
            assert new.layers == tuple((2, 5, 11)[i] for i in kept)
            raw = json.loads((Path(url) / "metadata.json").read_text())
            assert (
                new.name == hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
            )
            if tokens == "all":
                assert raw == {**original, "layers": list(new.layers)}
            assert new.validate(deep=True, progress=False).ok
            origin = json.loads((Path(url) / "provenance.json").read_text())
            assert (origin["source"], origin["source_hash"]) == (str(source.path), source.path.name)
            assert (origin["tokens"], origin["source_metadata"]) == ([at.start, at.stop], original)
            assert copy_store(source.path, to, layers=layers, tokens=tokens, progress=False) == url
    assert Path(copy_store(source.path, tmp_path / "all", layers=[11, 5, 2], progress=False)).name == source.path.name
    bare = plain_store(tmp_path / "bare", cls=False)
    assert Path(copy_store(bare.path, tmp_path / "all", tokens="content", progress=False)).name == bare.path.name
    for error, options in [
        (SelectionError, {"tokens": "special"}),
        (ArgumentError, {"layers": []}),
        (ArgumentError, {"layers": "2"}),
    ]:
        with pytest.raises(error):
            copy_store(bare.path, tmp_path / "none", **options, progress=False)


def test_copy_of_layers_of_every_version_keeps_the_version(tmp_path):
    for number, sample in enumerate(STORES):
        source = ShardStore.open(sample)
        if len(source.layers) > 1:
            url = copy_store(sample, f"memory://some-{number}", layers=source.layers[:1], progress=False)
            new = ShardStore.open(url)
            assert new.metadata.protocol == source.metadata.protocol
            assert np.array_equal(new[...], source[:, :1])
        half = copy_store(sample, tmp_path, dtype="bfloat16", progress=False)
        new, truth = ShardStore.open(half), cast(source[...], "bfloat16")
        assert np.array_equal(bits(new.read(dtype="stored")), bits(truth))
        assert dict(new.token_arrays).keys() == dict(source.token_arrays).keys()


def test_copy_of_hook_points_of_one_layer_takes_each_by_itself(tmp_path):
    acts = numbers("float32")
    path, arrays = made(tmp_path / "from", acts)
    for chosen in ([0], [1], [0, 2], [1, 2]):
        new = ShardStore.open(copy_store(path, tmp_path / "to", layers=[PAIRS[i] for i in chosen], progress=False))
        assert np.array_equal(bits(new[...]), bits(acts[:, chosen]))
        assert all(np.array_equal(new.token_arrays[name], values) for name, values in arrays.items())


def test_copy_of_layers_of_a_damaged_source_is_refused_and_continued_when_it_is_restored(tmp_path):
    source = plain_store(tmp_path / "from", labels=True)
    source.write_digests(256)
    digests = (source.path / "digests.json").read_bytes()
    for number, options in enumerate(({"layers": [5]}, {"tokens": "content"}, {"dtype": "float16"})):
        to = tmp_path / f"to{number}"
        for name, at in (("acts000001.bin", 200), ("labels.bin", -1), ("digests.json", None)):
            right = (source.path / name).read_bytes()
            wrong = bytearray(right)
            if at is None:
                wrong = digests.replace(b"acts000001.bin", b"acts000009.bin")
            else:
                wrong[at] ^= 1
            (source.path / name).write_bytes(wrong)
            with pytest.raises(CorruptShardError):
                copy_store(source.path, to, **options, progress=False)
            assert not list(to.glob("*/metadata.json"))
            (source.path / name).write_bytes(right)
        found = ShardStore.open(copy_store(source.path, to, **options, progress=False))
        assert found.validate(deep=True, progress=False).problems == ()


# -- another dtype -----------------------------------------------------------------------------------------------------


def test_copy_in_another_dtype_rounds_as_ml_dtypes_and_reports_it(tmp_path):
    for source in DTYPES:
        acts = numbers(source)
        path, arrays = made(tmp_path / "from", acts)
        for dtype in DTYPES:
            url = copy_store(path, tmp_path / f"to-{source}", dtype=dtype, progress=False)
            store, truth = ShardStore.open(url), acts if source == dtype else cast(acts, dtype)
            assert (store.metadata.dtype, store.name) == (dtype, store.metadata.hash)
            assert np.array_equal(bits(store.read(dtype="stored")), bits(truth))
            assert all(np.array_equal(store.token_arrays[name], values) for name, values in arrays.items())
            assert copy_store(path, tmp_path / f"to-{source}", dtype=dtype, progress=False) == url


def test_copy_of_what_a_bfloat16_model_computed_comes_back_as_it_was(tmp_path):
    source = plain_store(tmp_path / "from", labels=True)
    for shard_idx in range(source.n_shards):  # numbers of a bfloat16 model, stored as float32
        data = np.fromfile(source.shard(shard_idx), np.uint32) & np.uint32(0xFFFF0000)
        data.tofile(source.shard(shard_idx))
    half = copy_store(source.path, tmp_path / "half", dtype="bfloat16", progress=False)
    back = copy_store(half, tmp_path / "back", dtype="float32", progress=False)
    assert Path(back).name == source.path.name
    for path in source.path.iterdir():
        if path.name != "shards.json":  # its white space is the helper's own
            assert (Path(back) / path.name).read_bytes() == path.read_bytes(), path.name


def test_copy_in_another_dtype_writes_the_oldest_protocol_that_says_all(tmp_path):
    acts = numbers("bfloat16")
    path, _ = made(tmp_path / "from", acts)
    plain, _ = made(tmp_path / "plain", acts, token_arrays=None)
    cases = [
        (path, {}, "3.0"), (path, {"layers": [2]}, "3.0"), (plain, {}, "3.0"), (plain, {"layers": [(5, "attn_out")]}, "3.0"),
        (plain, {"layers": [(2, "resid_post"), (5, "resid_post")]}, "2.0"), (plain, {"layers": [2], "protocol": "2.1"}, "2.1"),
    ]  # fmt: skip
    for source, options, protocol in cases:
        store = ShardStore.open(copy_store(source, tmp_path / "to", dtype="float32", progress=False, **options))
        assert store.metadata.protocol == protocol
    for options in (
        {"dtype": "float16", "protocol": "2.1", "layers": [2]},
        {"dtype": "float8"},
        {"on_overflow": "clip"},
    ):
        with pytest.raises(ArgumentError):
            copy_store(plain, tmp_path / "to", progress=False, **options)
    extra, text = {"lab": "ours", "n": 1.5}, {"layout": "window", "bos": True, "tokenizer": {"name": "gpt2"}}
    path, _ = made(tmp_path / "extra", acts, extra=extra, text=text)
    metadata = ShardStore.open(copy_store(path, tmp_path / "e", dtype="float16", progress=False)).metadata
    assert (metadata.extra, metadata.text, metadata.hook_points) == ({}, text, tuple(point for _, point in PAIRS))
    old = {"hook_points": None, "token_arrays": None, "layers": [2, 5, 6], "protocol": "2.1"}
    for data, kept in (
        ("gASVkgAAAA==", {"opaque": "gASVkgAAAA=="}),
        ({"a": [1]}, {"a": [1]}),
        ("[1]", {"opaque": "[1]"}),
    ):
        path, _ = made(tmp_path / "data", numbers("float32"), **old, data=data)
        assert ShardStore.open(copy_store(path, tmp_path / "d", dtype="bfloat16", progress=False)).metadata.data == kept


def test_copy_of_numbers_that_are_too_large_follows_the_policy(tmp_path):
    for source, dtype in (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")):
        acts, root = numbers(source), tmp_path / f"{source}-{dtype}"
        large = np.finfo(np.float32).max if source == "float32" else LARGEST[source]
        acts[5, 1, 2, 3:5] = [-large, large]
        path, _ = made(root / "from", acts)
        with pytest.raises(ArgumentError):
            copy_store(path, root / "refused", dtype=dtype, progress=False)
        truth = cast(acts, dtype)
        truth[5, 1, 2, 3:5] = [-LARGEST[dtype], LARGEST[dtype]]
        url = copy_store(path, root / "to", dtype=dtype, on_overflow="saturate", progress=False)
        assert np.array_equal(bits(ShardStore.open(url).read(dtype="stored")), bits(truth))


# -- what is there -----------------------------------------------------------------------------------------------------


def test_copy_of_a_part_that_was_cut_short_continues_with_the_same_bytes(tmp_path, monkeypatch):
    acts = numbers("float32")
    path, _ = made(tmp_path / "from", acts)
    for number, options in enumerate(
        ({"layers": [PAIRS[0], PAIRS[2]]}, {"dtype": "bfloat16"}, {"dtype": "float16", "on_overflow": "saturate"})
    ):
        whole = copy_store(path, tmp_path / "whole", **options, progress=False)
        with monkeypatch.context() as patch:
            stopping_at(patch, "acts000001.bin")
            with pytest.raises(TransportError):
                copy_store(path, tmp_path / f"cut{number}", **options, progress=False)
        if options.get("on_overflow"):  # what was there is not judged again
            with pytest.raises(IncompleteStoreError):
                copy_store(path, tmp_path / f"cut{number}", dtype="float16", progress=False)
        url = copy_store(path, tmp_path / f"cut{number}", **options, progress=False)
        assert content(Path(url)) == content(Path(whole))


def test_copy_of_a_part_is_not_mixed_with_another_recording(tmp_path, monkeypatch):
    for digests in (True, False):
        for number, options in enumerate(({"layers": [5]}, {"dtype": "float16"})):
            root = tmp_path / f"{digests}-{number}"
            one, other = plain_store(root / "one"), plain_store(root / "other")
            other.acts[...] = other.acts[::-1].copy()
            for shard_idx in range(other.n_shards):
                other.shard(shard_idx).write_bytes(other.truth(shard_idx).tobytes())
            for some in (one, other) if digests else ():
                some.write_digests(256)
            url = copy_store(one.path, root / "to", **options, progress=False)
            with pytest.raises(StoreExistsError):
                copy_store(other.path, root / "to", **options, progress=False)
            right = copy_store(other.path, root / "right", **options, progress=False)
            new = copy_store(other.path, root / "to", **options, replace=True, progress=False)
            assert (new, content(Path(new))) == (url, content(Path(right)))
            with monkeypatch.context() as patch:
                stopping_at(patch, "acts000002.bin" if "dtype" in options else "acts000000.bin")
                with pytest.raises(TransportError):
                    copy_store(one.path, root / "cut", **options, progress=False)
            with pytest.raises(IncompleteStoreError):
                copy_store(other.path, root / "cut", **options, progress=False)
            new = copy_store(other.path, root / "cut2", **options, progress=False)
            # A damaged copy is made again; a recording of that name is never taken for a copy.
            (Path(new) / "acts000000.bin").write_bytes(b"1")
            with pytest.raises(StoreExistsError):
                copy_store(other.path, root / "cut2", **options, progress=False)
            copy_store(other.path, root / "cut2", **options, replace=True, progress=False)
            assert content(Path(new)) == content(Path(right))
            (Path(new) / "provenance.json").unlink()
            with pytest.raises(StoreExistsError):
                copy_store(other.path, root / "cut2", **options, progress=False)
            copy_store(other.path, root / "cut2", **options, replace=True, progress=False)
            assert content(Path(new)) == content(Path(right))
            (Path(new) / "digests.json").unlink()  # every copy has one: this is not a copy
            with pytest.raises(StoreExistsError):
                copy_store(other.path, root / "cut2", **options, replace=True, progress=False)


def test_copy_of_a_part_by_a_cluster_and_in_a_bucket_is_the_same(tmp_path, s3_bucket):  # the fixture
    path, _ = made(tmp_path / "from", numbers("float32"))
    options = {"dtype": "bfloat16", "tokens": "content", "progress": False}
    whole = copy_store(path, tmp_path / "whole", **options)
    with two_workers() as client:
        url = copy_store(path, tmp_path / "cluster", **options, client=client)
        assert content(Path(url)) == content(Path(whole))
    far = copy_store(path, f"{s3_bucket.url}/to", dst_storage_options=s3_bucket.options, **options)
    near = copy_store(far, tmp_path / "near", storage_options=s3_bucket.options, progress=False)
    assert np.array_equal(
        bits(ShardStore.open(near).read(dtype="stored")), bits(ShardStore.open(whole).read(dtype="stored"))
    )
