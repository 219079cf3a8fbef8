"""Metadata sets: a document that says what is joined with what."""

from __future__ import annotations

import zipfile
from pathlib import Path

import fsspec
import pytest
from energon_tars import METADATASET_HEAD as HEAD
from energon_tars import write_metadataset
from range_server import serving

from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SelectionError, UnsafeContentError
from saev_store.sources.energon.metadataset import open_metadataset, read_metadataset


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_metadataset(tmp_path)


def test_a_module_that_is_a_number_too_long_to_print(tmp_path):
    (tmp_path / "meta.yaml").write_text(f"__module__: 0x{'f' * 9000}\n__class__: MetadatasetV2\nsplits: {{}}\n")
    with pytest.raises(DocumentError, match="an integer of 36000 bits"):
        read_metadataset(tmp_path / "meta.yaml")


def test_samples_with_what_they_name(folder):
    joined = open_metadataset(folder / "meta.yaml", names={"images": "json[image]", "clips": "json[clip]"})
    assert len(joined) == 4
    assert joined[2].media == {
        "images": {"img/2.jpg": b"jpeg 2"}, "clips": {"img/0.jpg": b"jpeg 0", "img/2.jpg": b"jpeg 2"},
    }  # fmt: skip
    val = open_metadataset(folder / "meta.yaml", "val", names={"images": "json[image]"})
    assert [sample.media["images"] for batch in val.batches(2) for sample in batch] == [
        {"img/4.jpg": b"jpeg 4"}, {"img/5.jpg": b"jpeg 5"},
    ]  # fmt: skip
    assert len(open_metadataset(folder / "meta.yaml", "twice", names={})) == 4
    assert read_metadataset(folder / "meta.yaml")["train"].subflavors == {"lang": "en"}
    assert read_metadataset(f"file://{folder}/meta.yaml")["val"].primary == f"file://{folder}/texts"


@pytest.mark.parametrize(
    ("path", "below"),
    [("a", "/a"), ("./a", "/a"), ("a/./b", "/a/b"), ("a//b/", "/a/b"), (".", ""), ("./", ""), ("././/a/.", "/a")],
)
def test_addresses_have_one_spelling(tmp_path, path, below):
    """They are compared, and become names of files: a service takes `a/./b` for another one than `a/b`."""
    (tmp_path / "meta.yaml").write_text(f"{HEAD}  train: {{path: '{path}', aux: {{files: 'filesystem://{path}'}}}}\n")
    found = read_metadataset(tmp_path / "meta.yaml")["train"]
    assert found.primary == f"{tmp_path}{below}"
    assert found.folders == {"files": f"{tmp_path}{below}"}


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        ("memory://lab/", ""), ("memory:///", ""), ("simplecache::memory://lab/", ""), ("file://ROOT/", ""),
        ("simplecache::file://ROOT/", ""), ("zip://::file://ROOT/all.zip", ""), ("zip://a/::file://ROOT/all.zip", ""),
        ("HOST/a/", "?t=1&u=/v/w"), ("simplecache::HOST/a/", "?t=1"),
    ],
)  # fmt: skip
def test_addresses_are_below_the_document_wherever_it_lies(tmp_path, head, tail):
    """In each chain, with the query that lets somebody read the document: it lets them read what is below."""
    text = f"{HEAD}  train: {{path: texts, aux: {{files: 'filesystem://x/./y'}}}}\n"
    (tmp_path / "a").mkdir()
    for name in ("meta.yaml", "a/meta.yaml"):
        (tmp_path / name).write_text(text)
    fsspec.filesystem("memory").pipe({"/meta.yaml": text.encode(), "/lab/meta.yaml": text.encode()})
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("meta.yaml", text)
        archive.writestr("a/meta.yaml", text)
    with serving(tmp_path) as (host, _):
        first, chain, rest = head.replace("ROOT", str(tmp_path)).replace("HOST", host).partition("::")
        if first.startswith("simplecache"):
            where = f"{first}{chain}{rest}{{}}{tail}"
        else:
            where = f"{first}{{}}{tail}{chain}{rest}"
        found = read_metadataset(where.format("meta.yaml"))["train"]
    assert (found.primary, found.folders) == (where.format("texts"), {"files": where.format("x/y")})


def test_wrong_questions(folder):
    with pytest.raises(SelectionError, match="no split 'test'; there are 'train', 'val', 'twice'"):
        open_metadataset(folder / "meta.yaml", "test", names={})
    with pytest.raises(ArgumentError, match="no 'sounds'; there are images, clips"):
        open_metadataset(folder / "meta.yaml", names={"sounds": "json[x]"})
    with pytest.raises(NotFoundError):
        open_metadataset(folder / "none.yaml", names={})


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("splits: {}", DocumentError, "MetadatasetV2 of megatron.energon is read"),
        ("__module__: megatron.energon\n__class__: Metadataset\nsplits: {}", DocumentError, "'Metadataset'"),
        ("__module__: os\n__class__: MetadatasetV2\nsplits: {}", DocumentError, "'os'"),
        ("!!python/object/apply:os.system [id]", UnsafeContentError, "tag"),
        ("- x", DocumentError, "None"),
        (f"{HEAD}  - train", DocumentError, "no mapping 'splits'"),
        (f"{HEAD}  1: {{path: x}}", DocumentError, "no mapping 'splits'"),
        (f"{HEAD}  train: x", DocumentError, "must be a mapping"),
        (f"{HEAD}  train: {{}}", DocumentError, "no 'path'"),
        (f"{HEAD}  train: {{blend: [{{path: a}}, {{path: b}}]}}", DocumentError, "has 'blend'"),
        (f"{HEAD}  train: {{join: [{{path: a}}]}}", DocumentError, "has 'join'"),
        *(
            (f"{HEAD}  train: {{path: a, {name}: x}}", DocumentError, f"has '{name}'; one primary data set")
            for name in ("blend_epochized", "dataset_config", "split_config")
        ),
        (f"{HEAD}  train: {{path: a, subset: {{range: [0%, 50%]}}}}", DocumentError, "has 'subset'"),
        (f"{HEAD}  train: {{path: 7}}", DocumentError, "must be a path"),
        (f"{HEAD}  train: {{path: a, aux: [b]}}", DocumentError, "'aux'] is"),
        (f"{HEAD}  train: {{path: a, aux: {{b: 1}}}}", DocumentError, "must be a path"),
        (f"{HEAD}  train: {{path: a, split_part: 3}}", DocumentError, "another type"),
        (f"{HEAD}  train: {{path: ../a}}", UnsafeContentError, "not below"),
        (f"{HEAD}  train: {{path: /etc}}", UnsafeContentError, "not below"),
        (f"{HEAD}  train: {{path: 's3://b/a'}}", UnsafeContentError, "not below"),
        (f"{HEAD}  train: {{path: a, aux: {{b: 'filesystem:///etc'}}}}", UnsafeContentError, "not below"),
        (f"{HEAD}  train: {{path: a, aux: {{b: 'filesystem+s3://x/y'}}}}", UnsafeContentError, "not below"),
    ],
)  # fmt: skip
def test_documents_that_are_refused(tmp_path, text, error, match):
    (tmp_path / "meta.yaml").write_text(text)
    with pytest.raises(error, match=match):
        read_metadataset(tmp_path / "meta.yaml")


def test_addresses_elsewhere_when_they_are_allowed(folder, tmp_path):
    (folder / "below").mkdir()
    (folder / "below/meta.yaml").write_text(
        f"{HEAD}  train: {{path: ../texts, aux: {{a: '{folder}/images', b: 'filesystem://{folder}/files', c: 's3://x/y'}}}}\n"
    )
    with pytest.raises(UnsafeContentError):
        read_metadataset(folder / "below/meta.yaml")
    joined = open_metadataset(
        folder / "below/meta.yaml", names={"a": "json[image]", "b": "json[image]"}, outside_ok=True
    )
    assert joined[3].media == {"a": {"img/3.jpg": b"jpeg 3"}, "b": {"img/3.jpg": b"jpeg 3"}}
