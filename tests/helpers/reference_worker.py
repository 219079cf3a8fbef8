"""The reference project's training worker, with `saev.data` called `saev_store.integrations.saev`: train, evaluate, checkpoint, infer.

    reference_worker.py CHECKOUT STORE FOLDER

Its modules are read from the checkout, and the name is replaced in their text, as a person would do. Prints what it made as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType


def with_other_import(checkout: Path, name: str) -> ModuleType:
    """A module of `saev.framework` with the import changed."""
    path = checkout / "src" / "saev" / "framework" / f"{name}.py"
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses look there for their module
    text = path.read_text("utf-8").replace("saev.data", "saev_store.integrations.saev")
    exec(compile(text, str(path), "exec"), vars(module))
    assert "saev.data" not in sys.modules
    return module


def main(checkout: Path, store: Path, folder: Path) -> None:
    sys.path.insert(0, str(checkout / "src"))
    train, inference = with_other_import(checkout, "train"), with_other_import(checkout, "inference")
    from saev import disk, nn

    from saev_store.integrations import saev as ours

    runs_root = folder / "saev" / "runs"
    runs_root.mkdir(parents=True)
    data = ours.ShuffledConfig(store, layer=11, batch_size=64)
    sae = nn.SparseAutoencoderConfig(d_model=16, d_sae=32, activation=nn.modeling.TopK(top_k=4))
    cfgs = [
        train.Config(
            train_data=data, val_data=data, n_train=2000, n_val=1000, sae=sae, lr=lr, n_lr_warmup=2, track=False, log_every=5,
            runs_root=runs_root, device="cpu",
        )
        for lr in (1e-3, 1e-2)
    ]  # fmt: skip
    # What its `main` does before it starts a worker: the seed of the run becomes that of the data.
    (group,) = train.split_cfgs(cfgs)
    ids = train.worker_fn(group)

    runs = [disk.Run(runs_root / name) for name in ids]
    ordered = ours.make_ordered_config(group[0].train_data)
    inference.worker_fn(inference.Config(run=runs[0].run_dir, data=ordered, device="cpu"))
    made = runs[0].inference / ours.Metadata.load(store).hash
    loaded = [nn.load(run.ckpt) for run in runs]
    found = {
        "shapes": [list(model.W_enc.shape) for model in loaded],
        "differ": bool((loaded[0].W_enc != loaded[1].W_enc).any()),
        "train_shards": [str(run.train_shards) for run in runs],
        "configs": [run.config["train_data"] for run in runs],
        "inference": sorted(path.name for path in made.iterdir()),
        "metrics": json.loads((made / "metrics.json").read_text()),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
