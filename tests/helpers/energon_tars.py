"""Tars for tests: samples with odd names and contents, in each of the header formats that `tarfile` writes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from saev_store.sources.energon.prepare import prepare

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar_bytes(files: list[tuple[str, bytes]], *, format: str = "pax", close: bool = True) -> bytes:
    """A tar of plain files in order."""
    buffer = io.BytesIO()
    tar = tarfile.open(fileobj=buffer, mode="w", format=FORMATS[format])  # noqa: SIM115 - not always closed
    for name, data in files:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    if close:
        tar.close()
    return buffer.getvalue()


def sample_files(first: int, n: int, *, folder: str = "") -> list[tuple[str, bytes]]:
    """Samples with a JSON and a text part each."""
    files = []
    for i in range(first, first + n):
        files.append((f"{folder}s{i:05d}.json", b'{"i": %d, "caption": "c%d"}' % (i, i)))
        files.append((f"{folder}s{i:05d}.txt", b"text %d\n" % i))
    return files


def odd_files() -> list[tuple[str, bytes]]:
    """Everything that names may be, and entries that are no parts between them."""
    long = "deep/" * 30 + "x" * 90
    return [
        ("__meta__/notes.json", b"{}"),
        ("plain.txt", b"a"),
        ("plain.sub.part.json", b"[1]"),
        ("ünï/κλειδί.txt", "ü".encode()),
        ("no_dot", b"not a part"),
        (f"{long}.txt", b"long"),
        (f"{long}.empty", b""),
        (".hidden", b"not a part"),
        ("with space's.a+b.txt", b"x" * 513),
        ("dir.v1/k.txt", b"dots in folders"),
        ("emoji🦜.txt", b"y" * 512),
    ]


def write_dataset(folder: Path, *, n_shards: int = 3, n: int = 4, odd: bool = True) -> dict[str, dict[str, bytes]]:
    """Tars of each format below `folder/shards`; returns the truth: parts by key."""
    (folder / "shards").mkdir(parents=True)
    truth: dict[str, dict[str, bytes]] = {}
    for shard in range(n_shards):
        format = list(FORMATS)[shard % len(FORMATS)]
        files = sample_files(shard * n, n)
        if odd and format != "ustar":
            files = [
                (f"f{shard}/{name}" if not name.startswith(("__", ".")) else name, data) for name, data in odd_files()
            ] + files
        (folder / f"shards/shard_{shard:03d}.tar").write_bytes(tar_bytes(files, format=format))
        for name, data in files:
            stem, dot, part = name.rpartition("/")[2].partition(".")
            if stem and dot and not name.startswith("__"):
                prefix = name[: len(name) - len(stem) - len(dot) - len(part)]
                truth.setdefault(prefix + stem, {})[part] = data
    return truth


def write_definition(folder: Path, sample_type: str, field_map: dict[str, str]) -> None:
    """The `dataset.yaml` of a folder of tars, which may still have to be prepared."""
    (folder / ".nv-meta").mkdir(parents=True, exist_ok=True)
    # Energon does not export this one with the others.
    module = "megatron.energon.flavors.vqa_and_ocr" if sample_type == "VQAOCRSample" else "megatron.energon"
    kind = {"__module__": module, "__class__": sample_type}
    (folder / ".nv-meta/dataset.yaml").write_text(json.dumps({"sample_type": kind, "field_map": field_map}))


METADATASET_HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"


def write_metadataset(folder: Path) -> Path:
    """Texts that name images, which lie in another data set and, once more, as files; `meta.yaml` joins them."""
    media = {f"img/{i}.jpg": b"jpeg %d" % i for i in range(6)}
    texts = [(f"{i}.json", b'{"image": "img/%d.jpg", "clip": ["img/0.jpg", "img/%d.jpg"]}' % (i, i)) for i in range(6)]
    for name, shards in (("texts", [texts[:4], texts[4:]]), ("images", [list(media.items())])):
        (folder / name).mkdir()
        for i, files in enumerate(shards):
            (folder / name / f"{i}.tar").write_bytes(tar_bytes(files))
        prepare(folder / name, split="1,1,0", progress=False)
    for name, data in media.items():
        (folder / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "files" / name).write_bytes(data)
    (folder / "meta.yaml").write_text(
        f"{METADATASET_HEAD}  train:\n    path: ./texts\n    subflavors: {{lang: en}}\n    aux:\n      images: images\n"
        "      clips: filesystem://files\n  val: {path: texts, split_part: val, aux: {images: images}}\n"
        "  twice: {path: texts, split_part: train}\n"
    )
    return folder
