"""The data type bfloat16 for zarr, as the zarr-extensions registry has it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from waiting import HANG_S
from zarr.dtype import data_type_registry

from saev_store.zarr import BFloat16

ROOT = Path(__file__).resolve().parents[2]
BF16 = np.dtype(ml_dtypes.bfloat16)
ZARR = tuple(map(int, importlib.metadata.version("zarr").split(".")[:3]))


def same_bits(found: np.ndarray, truth: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (truth.dtype, truth.shape)
    assert np.array_equal(found.view(np.uint16), truth.view(np.uint16))


@pytest.mark.parametrize(
    ("spelled", "bits"),
    [
        (0, 0x0000), (1.5, 0x3FC0), (-0.0, 0x8000), (3, 0x4040), ("NaN", 0x7FC0), ("Infinity", 0x7F80),
        ("-Infinity", 0xFF80), ("0x7fc0", 0x7FC0), ("0xffc1", 0xFFC1), ("0x0001", 0x0001),
    ],
)  # fmt: skip
def test_fill_values_are_spelled_as_the_registry_says(spelled, bits):
    value = BFloat16().from_json_scalar(spelled, zarr_format=3)
    assert value.dtype == BF16
    assert int(np.asarray(value).view(np.uint16)) == bits
    again = BFloat16().from_json_scalar(BFloat16().to_json_scalar(value, zarr_format=3), zarr_format=3)
    assert int(np.asarray(again).view(np.uint16)) == bits
    json.dumps(BFloat16().to_json_scalar(value, zarr_format=3), allow_nan=False)


@pytest.mark.parametrize("spelled", ["nan", "0x7fc", "0xzzzz", "0x7fc00000", None, [1], True])
def test_other_fill_values_are_refused(spelled):
    with pytest.raises(TypeError, match="not a fill value"):
        BFloat16().from_json_scalar(spelled, zarr_format=3)


@pytest.mark.parametrize("endian", ["little", "big"])
def test_arrays_of_it_are_written_and_read(endian, tmp_path):
    values = np.random.default_rng(0).integers(0, 2**16, (6, 4), dtype=np.uint16).view(BF16)
    for number, dtype in enumerate((BF16, "bfloat16", BFloat16())):
        folder = tmp_path / str(number)
        array = zarr.create_array(
            folder, shape=(6, 4), chunks=(2, 4), dtype=dtype,
            fill_value=float("nan"), compressors=None, serializer=zarr.codecs.BytesCodec(endian=endian),
        )  # fmt: skip
        array[:] = values
        document = json.loads((folder / "zarr.json").read_text())
        assert (document["data_type"], document["fill_value"]) == ("bfloat16", "NaN")
        assert document["codecs"] == [{"name": "bytes", "configuration": {"endian": endian}}]
        raw = values.view(np.uint16).astype("<u2" if endian == "little" else ">u2")
        assert (folder / "c/1/0").read_bytes() == raw[2:4].tobytes()
        found = zarr.open_array(folder, mode="r")[...]
        assert np.array_equal(found.astype(BF16).astype(np.float32), values.astype(np.float32), equal_nan=True)


def test_another_implementation_reads_what_ours_writes(tmp_path):
    ts = pytest.importorskip("tensorstore")
    values = np.random.default_rng(0).integers(0, 2**16, (6, 4), dtype=np.uint16).view(BF16)
    array = zarr.create_array(tmp_path / "a", shape=(6, 4), dtype="bfloat16", fill_value="NaN", compressors=None)
    array[:] = values
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "a")}}
    same_bits(np.array(ts.open(spec).result().read().result()).view(BF16), values)


def test_zarr_v2_and_other_dtypes_are_not_it():
    with pytest.raises(ValueError, match="zarr_format=3"):
        zarr.create_array(zarr.storage.MemoryStore(), shape=(6,), dtype=BF16, zarr_format=2)
    for dtype in (np.float16, "V2", "<u2", ml_dtypes.float8_e4m3fn):
        with pytest.raises(ValueError, match="is not bfloat16"):
            BFloat16.from_native_dtype(np.dtype(dtype))
    for value in ("much", b"1", None, [1.0]):
        with pytest.raises(TypeError, match="not a number"):
            BFloat16().cast_scalar(value)
    assert data_type_registry.match_dtype(np.dtype(np.float16)).to_json(zarr_format=3) == "float16"
    assert data_type_registry.match_dtype(BF16) == BFloat16()


def test_readers_that_do_not_import_us_have_it_where_we_are_installed(tmp_path):
    """The entry point of pyproject.toml, in a process of its own."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4).astype(BF16)
    zarr.create_array(tmp_path / "a", shape=(3, 4), dtype="bfloat16", compressors=None)[:] = values
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["zarr.data_type"]
    about = tmp_path / "site" / "saev_store_entry_points-0.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: saev-store-entry-points\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    about.joinpath("entry_points.txt").write_text("\n".join(["[zarr.data_type]", *lines, ""]))
    # Versions before 3.4.1 list entry points and never load them.
    loads = "" if ZARR >= (3, 4, 1) else "zarr.dtype.data_type_registry._lazy_load();"
    code = f"import sys, zarr; import zarr.dtype; assert 'saev_store' not in sys.modules; {loads}"
    code += f"print(zarr.open_array({str(tmp_path / 'a')!r}, mode='r')[...].astype('float32').tolist())"
    path = os.pathsep.join([str(about.parent), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=HANG_S, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == values.astype(np.float32).tolist()


@pytest.mark.parametrize("known", [True, False])
def test_a_data_type_of_the_name_that_zarr_has_already_stays(known):
    """A later zarr, or another package, may have one: there must not be two."""
    code = """
        import sys
        from zarr.dtype import Float16, data_type_registry as registry
        registry._lazy_load_list.clear()
        class Theirs(Float16):
            _zarr_v3_name = "bfloat16"
        if sys.argv[1] == "True":
            registry.register("bfloat16", Theirs)
        from saev_store.zarr.bfloat16 import DATA_TYPE, BFloat16
        assert registry.get("bfloat16") is DATA_TYPE
        print(DATA_TYPE is (Theirs if sys.argv[1] == "True" else BFloat16))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(known)], capture_output=True, text=True, check=False,
        timeout=HANG_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.stdout.strip() == "True", ran.stderr
