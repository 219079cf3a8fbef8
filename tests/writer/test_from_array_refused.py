"""`ShardStore.from_array` refuses arrays that are not dense numbers by name, and with a remedy that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from saev_store import ShardStore
from saev_store.errors import ArgumentError

OPTIONS = {"family": "gpt2", "ckpt": "tiny", "layers": [1], "progress": False}
ACTS = np.arange(72, dtype=np.float32).reshape(6, 1, 3, 4)
IDS = np.arange(18).reshape(6, 3)


def of_torch(make: Callable) -> Callable:
    """What is made with torch, in a test that is skipped without it; torch warns of what is in beta."""

    def made() -> object:
        torch = pytest.importorskip("torch")
        return make(torch)

    return made


def masked() -> object:
    return np.ma.masked_greater(IDS.astype(np.float32), 3)


def sparse_matrix() -> object:
    return pytest.importorskip("scipy.sparse").csr_matrix(IDS)


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated)")
@pytest.mark.parametrize("name", ["token_ids", "score"])
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: IDS.astype(object), "dtype object; it must be one of bool, uint8, int32, int64, float32"),
        (lambda: IDS.astype(str), "dtype <U21"),
        (lambda: IDS.astype("M8[s]"), "dtype datetime64"),
        (lambda: np.zeros((6, 3), [("a", object)]), "dtype .*'a'"),
        (lambda: IDS.astype(np.complex64), "dtype complex64"),
        (masked, "a masked array"),
        (of_torch(lambda torch: torch.from_numpy(IDS).to_sparse()), "cannot be sliced"),
        (of_torch(lambda torch: torch.from_numpy(IDS).to_sparse_csr()), "cannot be sliced"),
        (of_torch(lambda torch: torch.zeros(6, 3, device="meta")), "does not become a NumPy array"),
        (of_torch(lambda torch: torch.quantize_per_tensor(torch.zeros(6, 3), 0.1, 0, torch.qint8)), "does not become a NumPy array"),
        (of_torch(lambda torch: torch.nested.nested_tensor([torch.zeros(3)] * 6)), "without a shape"),
        (of_torch(lambda torch: torch.nested.nested_tensor([torch.zeros(3)] * 6, layout=torch.jagged)), "not all is known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_token_arrays_that_are_no_dense_numbers_are_named(tmp_path: Path, name: str, made: Callable, said: str):
    with pytest.raises(ArgumentError, match=said) as error:
        ShardStore.from_array(ACTS, tmp_path, token_arrays={name: made()}, **OPTIONS)
    assert error.value.where == name
    assert "compute_chunk_sizes" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_matrix_whose_slices_are_no_arrays_is_named(tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"token_ids come as object \(\); they must be numbers") as error:
        ShardStore.from_array(ACTS, tmp_path, token_arrays={"token_ids": sparse_matrix()}, **OPTIONS)
    assert error.value.where == "token_ids"


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
@pytest.mark.parametrize(
    "made",
    [
        of_torch(lambda torch: torch.nested.nested_tensor([torch.zeros(1, 3, 4)] * 6)),
        of_torch(lambda torch: torch.nested.nested_tensor([torch.zeros(3, 4)] * 6, layout=torch.jagged)),
        of_torch(lambda torch: torch.zeros(6, 12).to_sparse_csr()),
    ],
)
def test_an_array_that_is_not_dense_is_refused(tmp_path: Path, made: Callable):
    with pytest.raises(ArgumentError) as error:
        ShardStore.from_array(made(), tmp_path, **OPTIONS)
    assert error.value.where == "array"


# -- remedies ------------------------------------------------------------------------------------------------------------------


def numpy_bits(_: Path, bits: np.ndarray) -> object:
    return bits


def h5py_bits(folder: Path, bits: np.ndarray) -> object:
    file = pytest.importorskip("h5py").File(folder / "a.h5", "w")
    file["x"] = bits
    return file["x"]


def zarr_bits(_: Path, bits: np.ndarray) -> object:
    return pytest.importorskip("zarr").array(bits)


def dask_bits(_: Path, bits: np.ndarray) -> object:
    return pytest.importorskip("dask.array").from_array(bits, chunks=2)


def xarray_bits(_: Path, bits: np.ndarray) -> object:
    return pytest.importorskip("xarray").DataArray(bits, dims=("example", "layer", "token", "d_model"))


def torch_bits(_: Path, bits: np.ndarray) -> object:
    return pytest.importorskip("torch").from_numpy(bits)


@pytest.mark.parametrize("made", [numpy_bits, h5py_bits, zarr_bits, dask_bits, xarray_bits, torch_bits])
def test_bits_of_bfloat16_are_taken_as_the_remedy_says(tmp_path: Path, made: Callable):
    pytest.importorskip("dask.array")
    array = made(tmp_path, ACTS.astype(ml_dtypes.bfloat16).view(np.int16))
    with pytest.raises(ArgumentError, match="the array is int16") as error:
        ShardStore.from_array(array, tmp_path / "out", **OPTIONS)
    call = error.value.remedy.removeprefix("If these are the bits of bfloat16, pass ").removesuffix(".")
    names = {"array": array, "ml_dtypes": ml_dtypes} | {name: pytest.importorskip(name) for name in ("dask", "torch")}
    store = ShardStore.from_array(eval(call, names), tmp_path / "out", **OPTIONS)  # the remedy is what is tested
    assert store.metadata.dtype == "bfloat16"
    assert np.array_equal(store[:], ACTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_negative_views_of_torch_are_taken(tmp_path: Path, dtype: str):
    """Such as the imaginary part of a conjugate. They are dense; only their sign is not in memory."""
    torch = pytest.importorskip("torch")
    acts = torch._neg_view(-torch.from_numpy(ACTS).to(getattr(torch, dtype)))  # of bfloat16 there is no public way
    score = torch.complex(torch.zeros(6, 3), -torch.from_numpy(IDS).float()).conj().imag
    assert acts.is_neg() and score.is_neg()
    store = ShardStore.from_array(acts, tmp_path / "a", token_arrays={"score": score}, **OPTIONS)
    assert np.array_equal(store[:], ACTS)
    assert np.array_equal(store.token_arrays["score"][...], IDS)
    with ShardStore.create(tmp_path / "b", store.metadata, progress=False) as writer:
        writer.append(acts, score=score)
    assert np.array_equal(ShardStore.open(tmp_path / "b" / store.metadata.hash)[:], ACTS)
