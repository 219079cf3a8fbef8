"""What `prepare` writes, read by Energon itself; and what Energon's own `prepare` writes about the same tars.

Energon and the webdataset library bring torch and much else, so they live in an environment of their own:

    python -m venv /tmp/energon && /tmp/energon/bin/pip install megatron-energon webdataset
    SAEV_STORE_ENERGON_PYTHON=/tmp/energon/bin/python python -m pytest tests/peers/test_energon_peer.py
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest
from energon_tars import tar_bytes, write_dataset, write_definition, write_metadataset

from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.joins import open_metadataset
from saev_store.sources.energon.prepare import prepare

DATA = Path(__file__).parents[1] / "data/energon"
PYTHON = os.environ.get("SAEV_STORE_ENERGON_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="SAEV_STORE_ENERGON_PYTHON names no interpreter that has megatron-energon"),
    pytest.mark.timeout(600),
]


def peer(*arguments: object) -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [str(PYTHON), str(Path(__file__).parents[1] / "helpers/energon_peer.py"), *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False, env=environment, cwd="/",
    )  # fmt: skip
    answers = [line for line in result.stdout.splitlines() if line.startswith("ANSWER")]
    assert answers, result.stderr[-3000:]
    return json.loads(answers[-1].removeprefix("ANSWER"))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("n_shards", [1, 3, 12])
def test_crude_samples(tmp_path, n_shards):
    truth = write_dataset(tmp_path / "d", n_shards=n_shards)
    prepare(tmp_path / "d", split="1,0,0", progress=False)
    found = peer("read", tmp_path / "d", "train")
    expected = {key: {part: digest(data) for part, data in parts.items()} for key, parts in truth.items()}
    assert dict(found["val"]) == dict(found["train"]) == expected
    dataset = EnergonDataset(tmp_path / "d")
    # The peer goes through a validation split in the order that ours has, too.
    assert sorted(key for key, _ in found["val"]) == sorted(dataset.key(i) for i in range(len(dataset)))


def test_parts_by_file_name(tmp_path):
    truth = write_dataset(tmp_path / "d")
    prepare(tmp_path / "d", split="1,1,1", progress=False)
    names = {f"{key}.{part}": digest(data) for key, parts in truth.items() for part, data in parts.items()}
    assert peer("files", tmp_path / "d", *names) == names


def test_captions_and_images(tmp_path):
    shutil.copytree(DATA / "captioning_ratio_split/dataset/shards", tmp_path / "d/shards")
    fields = {"image": "png,jpg", "caption": "detail.json[caption],txt"}
    write_definition(tmp_path / "d", "CaptioningSample", fields)
    prepare(tmp_path / "d", split="8,1,1", progress=False)
    dataset = EnergonDataset(tmp_path / "d").split("train")
    found = dict(peer("read", tmp_path / "d", "train")["train"])
    assert len(found) == len(dataset) > 0
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        image = sample.image.transpose(2, 0, 1)  # theirs is (3, height, width) from 0 to 1
        assert found[sample.__key__] == {"image": digest(image.tobytes()), "caption": digest(sample.caption.encode())}


def test_exclude_is_understood_alike(tmp_path):
    write_dataset(tmp_path / "d", odd=False)
    prepare(tmp_path / "d", split="1,0,0", progress=False)
    split = tmp_path / "d/.nv-meta/split.yaml"
    split.write_text(
        split.read_text().replace(
            "exclude: []",
            "exclude:\n- shards/shard_001.tar\n- shards/shard_000.tar/s0000{1..2}\n- shards/shard_002.tar/s00000\n- none.tar",
        )
    )
    ours = EnergonDataset(tmp_path / "d").split("train")
    assert [key for key, _ in peer("read", tmp_path / "d", "train")["val"]] == [ours.key(i) for i in range(len(ours))]
    assert len(ours) == 6


def test_the_same_index_as_the_peer_writes(tmp_path):
    write_dataset(tmp_path / "d", n_shards=5)
    shutil.copytree(tmp_path / "d", tmp_path / "peer")
    prepare(tmp_path / "d", split="1,0,0", progress=False)
    theirs = peer("index", tmp_path / "peer")
    db = sqlite3.connect(tmp_path / "d/.nv-meta/index.sqlite")
    assert [list(row) for row in db.execute("SELECT * FROM samples ORDER BY 1, 3")] == theirs["samples"]
    assert [list(row) for row in db.execute("SELECT * FROM sample_parts ORDER BY 1, 2, 4")] == theirs["sample_parts"]
    db.close()
    assert json.loads((tmp_path / "d/.nv-meta/.info.json").read_text())["shard_counts"] == theirs["info"]
    for name, content in theirs["tar_idx"].items():
        assert (tmp_path / "d" / name).read_bytes().hex() == content
    assert EnergonDataset(tmp_path / "peer").validate(deep=True, progress=False).ok


def test_every_split_is_theirs(tmp_path):
    write_dataset(tmp_path / "d", n_shards=10, odd=False)
    made = prepare(tmp_path / "d", split="5,3,2", progress=False)
    dataset = EnergonDataset(tmp_path / "d")
    assert sum(map(len, made.documents.splits.values())) == 10
    for name in made.splits:
        ours = dataset.split(name)
        expected = {ours.key(i): {part: digest(data) for part, data in ours[i].parts.items()} for i in range(len(ours))}
        found = peer("read", tmp_path / "d", name)
        assert dict(found["train"]) == dict(found["val"]) == expected
        assert [key for key, _ in found["val"]] == list(expected)


def test_webdataset_reads_the_samples_that_we_read(tmp_path):
    write_dataset(tmp_path / "d", n_shards=6)
    prepare(tmp_path / "d", split="1,0,0", progress=False)
    dataset = EnergonDataset(tmp_path / "d")
    found = peer("webdataset", *(tmp_path / "d" / shard for shard in dataset.shards))
    assert found == [
        [sample.key, {part: digest(data) for part, data in sample.parts.items()}]
        for batch in dataset.batches(100) for sample in batch
    ]  # fmt: skip


def test_what_webdataset_writes_is_prepared_and_read(tmp_path):
    found = peer("shards", tmp_path)
    made = prepare(tmp_path, split="1,0,0", progress=False)
    dataset = EnergonDataset(tmp_path)
    assert len(made) == len(found) == 26
    assert [
        [sample.key, {part: digest(data) for part, data in sample.parts.items()}]
        for batch in dataset.batches(10) for sample in batch
    ] == found  # fmt: skip
    assert dataset.validate(deep=True, progress=False).ok


def test_metadata_sets_join_the_same_files(tmp_path):
    write_metadataset(tmp_path)
    ours = open_metadataset(tmp_path / "meta.yaml", names={"images": "json[image]", "clips": "json[clip]"})
    expected = [
        [each.key, {name: {file: digest(data) for file, data in files.items()} for name, files in each.media.items()}]
        for batch in ours.batches(2) for each in batch
    ]  # fmt: skip
    assert [each[:2] for each in peer("joined", tmp_path / "meta.yaml", "train")] == expected
    assert len(expected) == 4


#: A field map for each sample type of the specification but the video one, whose videos Energon opens itself.
FIELDS = {
    "CaptioningSample": {"image": "jpg", "caption": "json[text]"},
    "ImageSample": {"image": "png,jpg"},
    "ImageClassificationSample": {"image": "jpg", "label": "json[label]", "label_name": "txt"},
    "InterleavedSample": {"sequence": "json[texts]"},
    "MultiChoiceVQASample": {"image": "jpg", "context": "txt", "choices": "json[texts]", "correct_choice_idx": "cls"},
    "OCRSample": {
        "image": "jpg", "text": "txt", "block_boxes": "json[boxes]", "block_classes": "json[texts]",
        "block_text": "json[texts]", "lines_boxes": "json[boxes]", "lines_text": "json[texts]", "words_boxes": "boxes.npy",
        "words_text": "json[texts]", "chars_boxes": "json[boxes]", "chars_text": "json[deep][0][texts]",
    },
    "TextSample": {"text": "txt"},
    "VQASample": {"image": "jpg", "context": "txt", "answers": "json[texts]", "answer_weights": "json[weights]"},
    "VQAOCRSample": {
        "image": "jpg", "context": "txt", "text": "json[text]", "answers": "json[texts]", "answer_weights": "json[weights]",
        "words_boxes": "json[boxes]", "words_text": "json[texts]",
    },
}  # fmt: skip


def test_every_sample_type_has_their_fields_and_values(tmp_path):
    texts = ["a", "ü", ""]
    described = {
        "text": "κ", "label": 7, "texts": texts, "boxes": [[0, 1, 2, 3], [4, 5, 6, 7]], "weights": [0.5, 0.25, 0.25],
        "deep": [{"texts": texts}],
    }  # fmt: skip
    boxes = io.BytesIO()
    np.save(boxes, np.arange(8, dtype=np.int64).reshape(2, 4))
    image = (DATA / "captioning_ratio_split/dataset/shards/shard_000.tar").read_bytes()[1536 : 1536 + 684]
    files = [
        ("x.jpg", image), ("x.json", json.dumps(described).encode()), ("x.txt", b"question?"), ("x.cls", b"2"),
        ("x.boxes.npy", boxes.getvalue()),
    ]  # fmt: skip
    for name, field_map in FIELDS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tar").write_bytes(tar_bytes(files))
        write_definition(tmp_path / name, name, field_map)
        prepare(tmp_path / name, split="1,0,0", progress=False)
    theirs = peer("types", *(tmp_path / name for name in FIELDS))
    for name in FIELDS:
        sample = EnergonDataset(tmp_path / name).sample(0)
        ours = {}
        for field, value in vars(sample).items():
            if isinstance(value, np.ndarray):
                ours[field] = digest(value.transpose(2, 0, 1).tobytes()) if value.ndim == 3 else value.tolist()
            elif not field.startswith("__"):
                ours[field] = value
        assert ours == theirs[name], name
