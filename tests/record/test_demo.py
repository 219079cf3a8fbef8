"""The demo on a tiny model: the store is right, a second run keeps it, and the command tells it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.errors import SaevStoreError
from saev_store.record import demo, load_photographs, run_demo

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("skimage")
Image = pytest.importorskip("PIL.Image")


def tiny() -> torch.nn.Module:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()


def test_demo_records_checks_and_draws_and_keeps_what_is_there(tmp_path: Path) -> None:
    state, lines = torch.get_rng_state(), list[str]()
    options = {"model": tiny(), "layers": (0, 2), "n_photographs": 2, "tile_px": 28, "progress": False}
    state = torch.get_rng_state()
    first = run_demo(tmp_path, say=lines.append, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.ok
    assert (first.problems, first.difference, first.pretrained) == ((), 0.0, False)
    assert ShardStore.open(first.store).shape == (12, 2, 5, 16)
    with Image.open(first.picture) as picture:
        assert picture.size == (3 * 84 // 2, 2 * 56 // 2)
    assert sum(line.startswith("recorded") for line in lines) == 1
    again = run_demo(tmp_path, **options)
    assert (again.store, again.ok) == (first.store, True)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SaevStoreError):
        run_demo(tmp_path / "file" / "below", **options)


def test_tiles_of_photographs_fit_together_again() -> None:
    photographs = load_photographs(n=2, tile_px=14)
    tiles = photographs.tiles().reshape(2, 2, 3, 14, 14, 3)
    for n, pixels in enumerate(photographs.pixels):
        rows = [np.concatenate(list(row), axis=1) for row in tiles[n]]
        assert np.array_equal(np.concatenate(rows), pixels)


def test_demo_command_prints_json_and_exits_by_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    options = {"model": tiny(), "layers": (0,), "n_photographs": 1, "tile_px": 28}
    monkeypatch.setattr("saev_store.record.run_demo", lambda out, **given: demo.run_demo(out, **(given | options)))
    assert main(["demo", "--out", str(tmp_path), "--json", "--no-progress"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ok"] is True
    shard = next(Path(found["store"]).glob("acts*"))
    shard.write_bytes(bytes(shard.stat().st_size))
    assert main(["demo", "--out", str(tmp_path), "--json", "--no-progress"]) == 1
