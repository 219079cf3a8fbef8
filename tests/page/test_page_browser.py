"""The page of a store in a real browser: every view by keyboard alone, no fault of accessibility, nothing from elsewhere.

Runs where `SAEV_STORE_VIEW_TESTS` is set to the `node_modules` that `npm install` made of `tests/browser/view/package.json`. Needs
Node and Chromium (`SAEV_STORE_CHROMIUM` names another than the one on PATH). `SAEV_STORE_VIEW_PICTURES` names the folder that
pictures are written to, such as docs/images/view.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from dense_stores import plain_store
from viewed_stores import image_store, text_store

pytest.importorskip("starlette")

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.view._arithmetic import principal_components

MODULES = os.environ.get("SAEV_STORE_VIEW_TESTS", "")
CHECK = Path(__file__).parents[1] / "browser/view/check.js"

#: Texts of tokens that one does not see, that change the direction of a line, that are markup, or longer than a line.
ODD = [
    "\n", "\t", " ", "", "\u202eevil", "e\u0301", "\U0001f469\u200d\U0001f467", "<b>x</b>", "\u200b", "\0", "\x1b[31m",
    "A" * 400, "\ud800", "\u0645\u0631\u062d\u0628\u0627", "\r\n", "constructor", "&amp;", "\u2028", " word", "W" * 40,
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    not MODULES, reason="SAEV_STORE_VIEW_TESTS is not set: needs Chromium, Node and npm packages"
)


def test_the_page_in_a_browser(tmp_path):
    chromium = os.environ.get("SAEV_STORE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "no Chromium on PATH, although SAEV_STORE_VIEW_TESTS asks for one"
    images, texts = image_store(tmp_path / "images"), text_store(tmp_path / "texts")
    damaged = tmp_path / "damaged" / images.name
    shutil.copytree(images, damaged)
    (damaged / "acts000001.bin").unlink()
    (damaged / "acts000002.bin").unlink()
    lost = plain_store(Layout(3, (2, 5), 4, True, 8, 2)).write(tmp_path / "lost")
    for shard in lost.glob("acts*.bin"):
        np.full(shard.stat().st_size // 4, np.nan, np.float32).tofile(shard)
    # Longer than a page, than what a function of JavaScript takes as arguments, and than a line.
    long = plain_store(Layout(2, (2,), 2500, False, 4, 2)).write(tmp_path / "long")
    wide = plain_store(Layout(2, (2,), 3, False, 200_000, 2)).write(tmp_path / "wide")
    folder = Path(os.environ.get("SAEV_STORE_VIEW_PICTURES") or tmp_path).resolve()
    with ExitStack() as stack:
        urls = {}
        stores = {
            "images": images,
            "texts": texts,
            "odd": texts,
            "damaged": damaged,
            "lost": lost,
            "long": long,
            "wide": wide,
        }
        for name, store in stores.items():
            opened = ShardStore.open(store, damaged_ok=True)
            tokenizer = (lambda i: ODD[i % len(ODD)]) if name == "odd" else None
            view = stack.enter_context(opened.view(other=opened if name == "images" else None, tokenizer=tokenizer))
            urls[name] = view.url
        shown = {
            "store": f"{urls['damaged']}#/store",
            "layers": f"{urls['images']}#/layers?layer=5",
            "example": f"{urls['images']}#/example/3?layer=5&token=7",
            "token": f"{urls['images']}#/token/3/5?layer=5",
            "compare": f"{urls['images']}#/compare/3?layer=5&layer_b=11",
            "text": f"{urls['texts']}#/example/2?colour=norm",
        }
        others = [f"{urls['images']}#/store", f"{urls['texts']}#/token/2/7", f"{urls['damaged']}#/example/5"]
        # Pages on which every number and text is there, and as narrow as the window.
        sound = [f"{urls['odd']}#/{view}" for view in ("example/2", "token/2/7")]
        sound += [f"{urls['lost']}#/{view}" for view in ("store", "layers", "example/1?colour=norm", "token/1/0")]
        sound += [f"{urls['wide']}#/{view}" for view in ("layers", "token/1/0")]
        told = {
            "modules": str(Path(MODULES).resolve()), "chromium": chromium, "images": urls["images"], "long": urls["long"],
            "folder": str(folder), "sound": sound, "pages": [*shown.values(), *others, *sound[:3]], "pictures": shown,
        }  # fmt: skip
        (tmp_path / "told.json").write_text(json.dumps(told))
        done = subprocess.run(
            ["node", str(CHECK), str(tmp_path / "told.json")], capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert set(found["origins"]) <= {url.rsplit("/", 2)[0] for url in urls.values()}


def test_components_equal_those_of_scikit_learn():
    from sklearn.decomposition import PCA

    rng = np.random.default_rng(0)
    for shape in ((400, 20), (15, 60)):
        vectors = (rng.normal(size=shape) * np.geomspace(10, 0.1, shape[1]) + 3).astype(np.float32)
        peer = PCA(3, svd_solver="full").fit(vectors.astype(np.float64))
        found = principal_components(vectors)
        signs = np.sign(np.vecdot(found.axes, peer.components_))
        np.testing.assert_allclose(found.axes * signs[:, None], peer.components_, atol=1e-8)
        np.testing.assert_allclose(found.variance_share, peer.explained_variance_ratio_, rtol=1e-9)
        np.testing.assert_allclose(found.project(vectors) * signs, peer.transform(vectors), atol=1e-6)
