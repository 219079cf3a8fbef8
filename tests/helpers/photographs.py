"""Small images as files: a folder of them, an Energon data set of them, in every mode."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from energon_tars import write_definition

from saev_store.sources.energon.prepare import prepare

Image = pytest.importorskip("PIL.Image")


def noise(seed: int, height: int = 20, width: int = 30) -> np.ndarray:
    """(height, width, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """The file of an image or of a mask."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_energon(
    folder: Path,
    shards: list[list[tuple[str, bytes]]],
    *,
    sample_type: str = "",
    field_map: dict[str, str] | None = None,
) -> Path:
    """A prepared data set of shards of (name of the part's file, its bytes)."""
    folder.mkdir(parents=True)
    for number, files in enumerate(shards):
        with tarfile.open(folder / f"shard_{number}.tar", "w") as tar:
            for name, data in files:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    if sample_type:
        write_definition(folder, sample_type, field_map or {})
    prepare(folder, split="1,0,0", progress=False)
    return folder
