"""Stores of 16-bit numbers with token arrays, stacked rows, files that are cut: rows equal dense NumPy, bit for bit where asked."""

from __future__ import annotations

import errno
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

from saev_store import ShardStore, new_metadata
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SelectionError
from saev_store.store import reader
from saev_store.transport import local

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


N, LAYERS, CONTENT, D = 11, (2, 5, 5), 6, 8


META = {
    "family": "gpt2", "ckpt": "random", "layers": LAYERS, "hook_points": ["resid_post", "attn_out", "resid_post"],
    "content_tokens_per_example": CONTENT, "cls_token": True, "d_model": D, "n_examples": N, "max_tokens_per_shard": 90,
    "token_arrays": {"token_ids": "int32", "labels": "uint8", "mask": "bool", "positions": "int32", "score": "float32"},
}  # fmt: skip


@pytest.fixture(params=DTYPES)
def made(request, tmp_path):
    """(path, bits, token arrays): every kind of number, NaN payloads, subnormals, infinities and negative zeros among them."""
    rng, dtype = np.random.default_rng(3), DTYPES[request.param]
    acts = rng.integers(0, 2**16, (N, len(LAYERS), CONTENT + 1, D), dtype=np.uint16)
    acts[0, 0, 0, :6] = [0x8000, 0x0001, 0x7F80, 0xFF80, 0x7C00, 0x7FC1]
    arrays = {
        "token_ids": rng.integers(-(2**31), 2**31, (N, CONTENT), dtype=np.int32),
        "labels": rng.integers(0, 4, (N, CONTENT), dtype=np.uint8),
        "mask": rng.integers(0, 2, (N, CONTENT)).astype(bool),
        "positions": np.tile(np.arange(CONTENT, dtype=np.int32), (N, 1)),
        "score": rng.standard_normal((N, CONTENT)).astype(np.float32),
    }
    metadata = new_metadata(**META, dtype=request.param)
    with ShardStore.create(tmp_path, metadata, on_nonfinite="allow", progress=False) as writer:
        for first in (0, 4, 9):
            some = slice(first, {0: 4, 4: 9, 9: N}[first])
            writer.append(acts[some].view(dtype), **{name: values[some] for name, values in arrays.items()})
    return tmp_path / metadata.hash, acts.view(dtype), arrays


def same(found, truth):
    assert (found.dtype, found.shape) == (truth.dtype, truth.shape)
    if truth.dtype.itemsize == 2:
        assert np.array_equal(found.view(np.uint16), truth.view(np.uint16))
    else:
        assert np.array_equal(found, truth, equal_nan=True)


def damaged(path, name, how):
    file = path / f"{name}.bin"
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "long":
        file.write_bytes(file.read_bytes() + b"\0")
    else:
        file.write_bytes(b"\7" + file.read_bytes()[1:])


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec", "no maps left"])
def test_every_engine_reads_what_numpy_has(made, engine, monkeypatch):
    path, acts, arrays = made
    if engine == "no maps left":
        monkeypatch.setattr(local, "map_file", Mock(side_effect=OSError(errno.ENOMEM, engine)))
        engine = "mmap"
    store = ShardStore.open(path, engine=engine)
    assert (store.dtype, store.layout.itemsize) == (acts.dtype, 2)
    wide = acts.astype(np.float32)
    keys = [np.s_[:], np.s_[3], np.s_[2, 1, 3], np.s_[::-2, 1], np.s_[[9, 0, 4], :, 2], np.s_[:, [0, 2], 1:3, ::3],
            np.s_[..., 5], np.s_[[1, 2], [0, 2], [3, 4]]]  # fmt: skip
    for key in keys:
        same(store[key], wide[key])
        same(store.read(key, dtype="stored"), acts[key])
        with np.errstate(invalid="ignore"):
            truth = acts[key].astype(np.float64)
        same(store.read(key, dtype="float64"), truth)
    other = DTYPES["float16" if acts.dtype == DTYPES["bfloat16"] else "bfloat16"]
    with np.errstate(all="ignore"):
        assert np.array_equal(
            store.read(dtype=other.name).astype(np.float32), wide.astype(other).astype(np.float32), equal_nan=True
        )
    rows = store.sel(layer=[(5, "resid_post"), 2], tokens="content", masked=True, dtype="stored")
    flat = acts[:, [2, 0], 1:].reshape(-1, D)
    picked = np.random.default_rng(0).integers(0, len(rows), 50)
    same(rows.rows(picked), flat[picked])
    same(rows[:], flat)
    same(
        store.sel(layer=[(5, "resid_post"), 2], tokens="content", masked=True).rows(picked),
        flat[picked].astype(np.float32),
    )
    for name, values in arrays.items():
        same(store.token_arrays[name], values)
    same(store.labels, arrays["labels"])


@pytest.mark.parametrize("n_vectors", [1, 2, 5, 6, 7, 1000])
@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_rows_are_converted_to_their_places_however_many_threads_and_pieces_there_are(
    made, engine, n_vectors, monkeypatch
):
    """The sizes at which rows are shared among threads, and converted at a time, are a few vectors."""
    path, acts, _ = made
    monkeypatch.setattr(reader, "THREAD_BYTES", n_vectors * D * 2)
    monkeypatch.setattr(reader, "SCRATCH_BYTES", 2 * D * 2)
    monkeypatch.setattr(reader, "n_threads", lambda nbytes, part_bytes: max(1, min(nbytes // part_bytes, 3)))
    rows = ShardStore.open(path, engine=engine).sel(layer=[(5, "resid_post"), 2], tokens="content", masked=True)
    flat = acts[:, [2, 0], 1:].reshape(-1, D).astype(np.float32)
    in_first_shard = [3, 40, 3, 0, 17, 22, 41, 5, 30, 12, 12]
    for picked in (in_first_shard, [*in_first_shard, 131, 60, 100]):
        same(rows.rows(picked), flat[picked])


def test_a_view_has_the_stored_dtype(made):
    path, acts, _ = made
    store = ShardStore.open(path)
    view = store.as_numpy(np.s_[0:2, 1], copy=False, dtype="stored")
    assert view.base is not None
    same(view, acts[0:2, 1])
    for refused in (
        lambda: store.as_numpy(np.s_[0:2, 1], copy=False),
        lambda: store.read(dtype="int8"),
        lambda: store.read(dtype=None),
        lambda: store.read(0, out=np.empty(acts.shape[1:], acts.dtype)),
    ):
        with pytest.raises(ArgumentError):
            refused()


def test_conditions_choose_tokens(made):
    path, acts, arrays = made
    store = ShardStore.open(path)

    def chosen(keep, **conditions):
        rows = store.sel(layer=2, tokens="content", dtype="stored", **conditions)
        where = rows.coordinates()
        assert list(zip(where.example_idx.tolist(), where.token_idx.tolist(), strict=True)) == [
            tuple(x) for x in np.argwhere(keep).tolist()
        ]
        same(rows[:], acts[:, 0, 1:][keep])

    mask, labels = arrays["mask"], arrays["labels"]
    chosen(mask)
    chosen(np.ones_like(mask), masked=True)
    chosen(mask & (labels == 2), where={"labels": 2})
    chosen(np.isin(labels, [1, 3]) & (arrays["positions"] == 4), where={"labels": [1, 3], "positions": 4}, masked=True)
    chosen(mask & (labels != 0), ignore_labels=[0])
    chosen((labels != 0) & ~mask, where={"mask": False}, ignore_labels=[0], masked=True)
    for where in (
        {"nothing": 1},
        {"labels": "sky"},
        {"labels": 1.5},
        {"labels": None},
        {"labels": [[0], [0, 1]]},
        [1],
        "sky",
        np.arange(2),
    ):
        with pytest.raises(SelectionError) as caught:
            store.sel(where=where)
        assert caught.value.where == "where"
    for ignored in ([256], [-1], ["sky"], [[0, 1]], [0.5], [True]):
        with pytest.raises(SelectionError) as caught:
            store.sel(ignore_labels=ignored)
        assert caught.value.where == "ignore_labels"
    for conditions in ({"where": {"labels": 1}}, {"ignore_labels": [1]}):
        with pytest.raises(SelectionError):
            store.sel(tokens="special", **conditions)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("token_ids", "missing"),
        ("token_ids", "cut"),
        ("labels", "cut"),
        ("labels", "long"),
        ("mask", "missing"),
        ("mask", "7"),
    ],
)
def test_the_remedy_for_a_damaged_token_array_helps(made, name, how):
    """Of a declared array the file cannot be left out: without it the store does not open."""
    path, _, arrays = made
    damaged(path, name, how)
    if how != "7":  # found when it is read
        with pytest.raises(DocumentError) as caught:
            ShardStore.open(path)
        assert "damaged_ok=True" in caught.value.remedy
        assert "restore_array" in str(caught.value)
    store = ShardStore.open(path, damaged_ok=True)
    with pytest.raises((DocumentError, NotFoundError)) as caught:
        store.token_arrays[name]
    assert "remove it" not in caught.value.remedy
    assert f'store.repair().restore_array("{name}", ...)' in caught.value.remedy
    with store.repair() as writer:
        writer.restore_array(name, arrays[name])
    assert np.array_equal(ShardStore.open(path).token_arrays[name], arrays[name])


def test_labels_that_no_document_declares_may_be_removed(tmp_path):
    metadata = new_metadata(**{**META, "token_arrays": None, "hook_points": None, "layers": (1, 2, 3)})
    labels = np.ones((N, CONTENT), np.uint8)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.ones((N, len(LAYERS), CONTENT + 1, D), np.float32), labels=labels)
    damaged(tmp_path / metadata.hash, "labels", "cut")
    with pytest.raises(DocumentError):
        ShardStore.open(tmp_path / metadata.hash, damaged_ok=True).sel(ignore_labels=[1])


def test_a_condition_on_floats_is_rounded_as_the_array_is(made):
    """0.1 is another number in float64 than in the array, so it never matched."""
    path, _, arrays = made
    score = arrays["score"].copy()
    score[::2, 1:3], score[1, 1], score[2, 2], score[3, 3] = 0.1, np.inf, np.nan, 7
    (path / "score.bin").write_bytes(score.tobytes())
    store = ShardStore.open(path)
    for wanted in (0.1, np.float32(0.1), [0.1, 7], np.array([0.1]), np.inf, np.nan, 7, -0.0):
        found = store.sel(layer=2, tokens="content", where={"score": wanted}, masked=True).coordinates()
        truth = np.argwhere(np.isin(score, np.array(wanted, np.float32)))
        assert np.array_equal(np.stack([found.example_idx, found.token_idx], axis=1), truth)
