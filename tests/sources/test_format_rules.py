"""Rules of Energon, MMIDIDX and LLMBATCH that single values decide; the truth is written down, or made from the formats alone."""

from __future__ import annotations

import zipfile
from pathlib import Path

from energon_tars import METADATASET_HEAD as HEAD

from saev_store.sources.energon.metadataset import read_metadataset

# -- patterns and splits -------------------------------------------------------------------------------------------------


# -- preparing -----------------------------------------------------------------------------------------------------------


# -- the index -----------------------------------------------------------------------------------------------------------


# -- metadata sets -------------------------------------------------------------------------------------------------------


def test_a_metadata_set_in_an_archive_names_what_is_in_the_archive(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("d/meta.yaml", f"{HEAD}  train: {{path: texts, aux: {{files: 'filesystem://./x//y'}}}}\n")
    found = read_metadataset(f"zip://d/meta.yaml::file://{tmp_path}/all.zip")["train"]
    assert found.primary == f"zip://d/texts::file://{tmp_path}/all.zip"
    assert found.folders == {"files": f"zip://d/x/y::file://{tmp_path}/all.zip"}


# -- samples that become documents ------------------------------------------------------------------------------------------
