"""What Energon reads from a data set, as JSON: run by an interpreter that has `megatron-energon`, never by ours.

python energon_peer.py read FOLDER SPLIT      samples of a split: get_train_dataset (one epoch) and get_val_dataset
python energon_peer.py files FOLDER NAME...   parts by file name
python energon_peer.py index FOLDER           rows of what `energon prepare` itself writes (the folder is changed)
python energon_peer.py types FOLDER...        fields of the first sample of each data set, as plain values
python energon_peer.py joined META SPLIT      samples of a metadata set, with the images that their json names
python energon_peer.py webdataset TAR...      samples as the webdataset library reads them, in order
python energon_peer.py shards FOLDER          tars that the webdataset library writes; their samples
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")


def digest(value) -> str:
    if isinstance(value, str):
        value = value.encode()
    elif hasattr(value, "numpy"):
        value = (value.numpy() * 255).round().astype("uint8").tobytes()
    return hashlib.sha256(value).hexdigest()


def read(folder: str, split: str) -> object:
    from megatron.energon import (
        DefaultTaskEncoder,
        WorkerConfig,
        get_loader,
        get_train_dataset,
        get_val_dataset,
        stateless,
    )
    from megatron.energon.edataclass import edataclass
    from megatron.energon.flavors import Sample
    from megatron.energon.task_encoder import Cooker, basic_sample_keys

    @edataclass
    class Cooked(Sample):
        parts: dict

    @stateless
    def cook(sample: dict) -> Cooked:
        parts = {name: digest(value) for name, value in sample.items() if not name.startswith("__")}
        return Cooked(**basic_sample_keys(sample), parts=parts)

    class Encoder(DefaultTaskEncoder):
        cookers = [Cooker(cook)]  # noqa: RUF012  # one list for all instances is what is wanted
        decoder = None

        def batch(self, samples):
            return samples

    crude = "CrudeWebdataset" in (Path(folder) / ".nv-meta/dataset.yaml").read_text()
    options = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0), "batch_size": None}
    if crude:
        options["task_encoder"] = Encoder()
    train = get_train_dataset(
        folder, split_part=split, shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False, **options
    )
    val = get_val_dataset(folder, split_part=split, **options)

    def seen(sample) -> list:
        if crude:
            return [sample.__key__, sample.parts]
        names = [each.name for each in dataclasses.fields(sample) if not each.name.startswith("__")]
        fields = {name: digest(getattr(sample, name)) for name in names}
        return [sample.__key__, fields]

    return {"train": sorted(map(seen, get_loader(train))), "val": list(map(seen, get_loader(val)))}


def files(folder: str, *names: str) -> object:
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath

    reader = WebdatasetFileStore(EPath(folder))
    return {name: digest(reader[name][0]) for name in names}


def index(folder: str) -> object:
    from click.testing import CliRunner
    from megatron.energon.tools.prepare import command

    result = CliRunner().invoke(
        command,
        ["--no-progress", "--non-interactive", "--num-workers", "1", "--split-ratio", "1,0,0", "--force-overwrite",
         "--sample-type", "CrudeWebdataset", folder],
    )  # fmt: skip
    if result.exit_code:
        return {"exit_code": result.exit_code, "output": result.output[-2000:]}
    meta = Path(folder) / ".nv-meta"
    db = sqlite3.connect(meta / "index.sqlite")
    return {
        "info": json.loads((meta / ".info.json").read_text())["shard_counts"],
        "samples": db.execute("SELECT * FROM samples ORDER BY 1, 3").fetchall(),
        "sample_parts": db.execute("SELECT * FROM sample_parts ORDER BY 1, 2, 4").fetchall(),
        "tar_idx": {p.relative_to(folder).as_posix(): p.read_bytes().hex() for p in Path(folder).rglob("*.tar.idx")},
    }


def types(*folders: str) -> object:
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

    class Encoder(DefaultTaskEncoder):
        def batch(self, samples):
            return samples

    def plain(value):
        if hasattr(value, "ndim"):
            return digest(value) if value.ndim == 3 else value.tolist()
        return digest(value) if isinstance(value, bytes) else value

    found = {}
    for folder in folders:
        val = get_val_dataset(
            folder, split_part="train", batch_size=None, task_encoder=Encoder(),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        )  # fmt: skip
        sample = next(iter(get_loader(val)))
        names = [each.name for each in dataclasses.fields(sample) if not each.name.startswith("__")]
        found[Path(folder).name] = {name: plain(getattr(sample, name)) for name in names}
    return found


def joined(meta: str, split: str) -> object:
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset, stateless
    from megatron.energon.edataclass import edataclass
    from megatron.energon.flavors import Sample
    from megatron.energon.task_encoder import Cooker, basic_sample_keys

    @edataclass
    class Cooked(Sample):
        files: dict

    @stateless
    def cook(sample: dict, images, clips) -> Cooked:
        named = json.loads(sample["json"])
        files = {
            "images": {name: digest(images.get(name, sample)) for name in [named["image"]]},
            "clips": {name: digest(clips.get(name, sample)) for name in named["clip"]},
        }
        return Cooked(**basic_sample_keys(sample), files=files)

    class Encoder(DefaultTaskEncoder):
        cookers = [Cooker(cook)]  # noqa: RUF012 - as that class has it
        decoder = None

        def batch(self, samples):
            return samples

    val = get_val_dataset(
        meta, split_part=split, batch_size=None, task_encoder=Encoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )  # fmt: skip
    return [[sample.__key__, sample.files, sample.__subflavors__] for sample in get_loader(val)]


def webdataset(*tars: str) -> object:
    import webdataset as wds

    return [
        [sample["__key__"], {part: digest(data) for part, data in sample.items() if not part.startswith("__")}]
        for sample in wds.WebDataset(list(tars), shardshuffle=False, empty_check=False)
    ]


def shards(folder: str) -> object:
    import numpy as np
    import webdataset as wds

    with wds.ShardWriter(f"{folder}/data-%03d.tar", maxcount=7, verbose=0) as writer:
        for i in range(25):
            sample = {"__key__": f"doc{i % 3}/{i:03d}", "txt": f"text {i} ü", "json": {"i": i, "caption": [f"c{i}"]}}
            sample |= {"cls": i, "x.npy": np.arange(i, dtype=np.int16), "empty.bin": b""} if i % 2 else {}
            writer.write(sample)
    with wds.TarWriter(f"{folder}/late.tar", encoder=False) as writer:
        writer.write({"__key__": "κλειδί/" + "x" * 150, "bin": b"long name", "a.b.c": b"dots"})
    return webdataset(*sorted(str(path) for path in Path(folder).glob("*.tar")))


CALLS = {each.__name__: each for each in (read, files, index, types, joined, webdataset, shards)}

if __name__ == "__main__":
    answer = CALLS[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write("ANSWER" + json.dumps(answer) + "\n")
