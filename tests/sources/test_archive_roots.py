"""Data sets and caches at the root of an archive, `zip://::all.zip`: they lie in no folder that could be opened instead."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors_files import safetensors

from saev_store.cli import main
from saev_store.errors import ArgumentError, DocumentError
from saev_store.sources import open_source
from saev_store.sources.address import split_address
from saev_store.sources.caches import import_cache
from saev_store.sources.mmididx import IndexedDatasetBuilder

DATA = Path(__file__).parents[1] / "data"


def archived(folder: Path, made: Path, kind: str) -> str:
    """The address of the root of an archive of a folder, whose names have no "./" in front."""
    path = made.with_suffix(f".{kind}")
    if kind == "zip":
        shutil.make_archive(str(made), "zip", folder)
    else:
        with tarfile.open(path, "w") as archive:
            for entry in sorted(folder.iterdir()):
                archive.add(entry, arcname=entry.name)
    return f"{kind}://::file://{path}"


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", ["mmididx", "energon"])
def test_data_sets_at_the_root_of_an_archive_are_opened(capfd, tmp_path: Path, kind: str, name: str):
    folder = next(path.parent for path in sorted((DATA / name).rglob("*.idx" if name == "mmididx" else ".nv-meta")))
    url = archived(folder, tmp_path / "all", kind)
    with open_source(url) as source, open_source(folder) as wanted:
        assert source.format == name
        assert len(source) == len(wanted) > 0
        assert source.describe()["digest"] == wanted.describe()["digest"]
    assert main(["info", url]) == 0
    assert str(len(source)) in capfd.readouterr().out


def test_token_files_at_the_root_are_converted(tmp_path: Path):
    (tmp_path / "c").mkdir()
    with IndexedDatasetBuilder(tmp_path / "c" / "x") as builder:
        for n in (5, 3, 9):
            builder.add_document(range(n))
    for name, url in (("a", archived(tmp_path / "c", tmp_path / "all", "zip")), ("b", str(tmp_path / "c"))):
        made = [str(tmp_path / f"{name}.batch"), "--seq-len", "4", "--batch-size", "1"]
        assert main(["convert", url, *made]) == 0
    assert (tmp_path / "a.batch").read_bytes() == (tmp_path / "b.batch").read_bytes()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_caches_at_the_root_of_an_archive_are_imported(tmp_path: Path, kind: str):
    acts = np.arange(48, dtype=np.float32).reshape(6, 2, 4)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "hs_3.safetensors").write_bytes(safetensors({"hidden_states": acts, "token_ids": np.arange(6)}))
    url = archived(tmp_path / "c", tmp_path / "all", kind)
    options = {"family": "g", "ckpt": "c", "context": 3, "layers": [1, 2], "progress": False}
    store = import_cache(url, tmp_path / "out", **options)
    assert np.array_equal(store.document(3).acts, acts.swapaxes(0, 1))


def test_an_archive_without_a_data_set_says_so(tmp_path: Path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.json").write_text(json.dumps({}))
    url = archived(tmp_path / "c", tmp_path / "all", "zip")
    with pytest.raises(DocumentError, match="holds no data set of a known format") as error:
        open_source(url)
    assert error.value.where.startswith("zip://")
    for root in (url, "zip://::/data/all.zip", "tar:///::s3://lab/all.tar"):
        with pytest.raises(ArgumentError, match="names no file"):
            split_address(root)
