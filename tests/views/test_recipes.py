"""The code of docs/reading.md that needs other packages runs, and reads the dense array."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import zarr
from dense_stores import plain_store

from saev_store import ShardStore
from saev_store.core.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


def block(page: str, word: str) -> str:
    """The Python block of a page in docs/ that contains a word."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    (one,) = [code for code in found if word in code and not code.startswith(">>>")]
    return textwrap.dedent(one)


def test_the_icechunk_recipe_holds_two_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    icechunk = pytest.importorskip("icechunk", minversion="2.0")
    pytest.importorskip("virtualizarr")
    icechunk.set_logs_filter("off")  # that local files are no place for concurrent commits
    plains = [plain_store(LAYOUT, seed=seed, tail="cut", labelled=True, ckpt="same") for seed in range(2)]
    train, val = (ShardStore.open(plain.write(tmp_path / f"shards/{seed}")) for seed, plain in enumerate(plains))
    monkeypatch.chdir(tmp_path)
    names = {"train": train, "val": val, "ROOT": str(tmp_path / "shards"), "xr": pytest.importorskip("xarray")}
    exec(block("reading.md", "icechunk.Repository"), names)
    found = names["ds"]
    dense = np.concatenate([plain.dense for plain in plains])
    assert found.activations.values.tobytes() == dense.tobytes()
    assert np.array_equal(found.labels.values, np.concatenate([plain.labels for plain in plains]))
    assert found.layer.values.tolist() == [2, 5, 11]


def test_the_serving_recipe_reads_right_and_shows_damage_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pytest.importorskip("zarr_http_server")
    pytest.importorskip("aiohttp")
    started = []
    # A free port, in a thread.
    monkeypatch.setattr(server, "serve", lambda app, **_: started.append(server.serve_background(app, port=0)))
    plain = plain_store(LAYOUT, tail="cut", labelled=True)
    folder = plain.write(tmp_path)
    exec(block("reading.md", "store_app"), {"store": ShardStore.open(folder)})
    (running,) = started
    try:
        names: dict[str, object] = {}
        exec(block("reading.md", "http://127").replace("http://127.0.0.1:8000", running.url), names)
        assert names["vector"].tobytes() == plain.dense[3, 2, 0].tobytes()
        dataset = names["ds"]
        assert dataset.activations.values.tobytes() == plain.dense.tobytes()
        assert np.array_equal(dataset.labels.values, plain.labels)
        (folder / "acts000001.bin").unlink()
        store = ShardStore.open(folder, damaged_ok=True)
        exec(block("reading.md", "store_app"), {"store": store})
        array = zarr.open_group(started[1].url, mode="r")["activations"]
        assert array[:3].tobytes() == plain.dense[:3].tobytes()
        with pytest.raises(Exception, match="500"):
            array[3:6]
    finally:
        for each in started:
            each.shutdown()
