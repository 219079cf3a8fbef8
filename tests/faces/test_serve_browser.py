"""zarrita.js in a real browser reads what `saev-store serve` publishes, from a page of another origin.

Runs where `SAEV_STORE_BROWSER_TESTS` is set: to the `node_modules` that `npm install` made of `tests/browser/package.json`,
or to 1 if they lie beside it. Needs Chromium (`SAEV_STORE_CHROMIUM` names another than the one on PATH).
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from dense_stores import plain_store
from served import serving
from waiting import HANG_S

from saev_store.core.layout import Layout

BROWSER = Path(__file__).parents[1] / "browser"
WANTED = os.environ.get("SAEV_STORE_BROWSER_TESTS", "")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-breakpad", "--disable-dev-shm-usage",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    not WANTED, reason="SAEV_STORE_BROWSER_TESTS is not set: needs Chromium and npm packages"
)


class Pages(SimpleHTTPRequestHandler):
    """Serves the page, the libraries and the expected values; collects the page's results in `found`."""

    def __init__(self, *args, modules: Path, truth: bytes, found: queue.Queue, **kwargs):
        self.modules, self.truth, self.found = modules, truth, found
        super().__init__(*args, directory=str(BROWSER), **kwargs)

    def translate_path(self, path: str) -> str:
        if path.startswith("/node_modules/"):
            return str(self.modules / path.removeprefix("/node_modules/"))
        return super().translate_path(path)

    def do_GET(self) -> None:
        if self.path != "/truth.json":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.truth)))
        self.end_headers()
        self.wfile.write(self.truth)
        return None

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


def case(array: str, dense: np.ndarray, selection: list) -> dict:
    """A selection as zarrita takes it ([start, stop], a number, or null), and its bits."""
    part = dense[tuple(slice(*s) if isinstance(s, list) else slice(None) if s is None else s for s in selection)]
    bits = base64.b64encode(np.ascontiguousarray(part).tobytes()).decode()
    return {"array": array, "selection": selection, "shape": list(part.shape), "bits": bits}


def test_zarrita_in_a_browser(tmp_path: Path):
    chromium = os.environ.get("SAEV_STORE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "no Chromium on PATH, although SAEV_STORE_BROWSER_TESTS asks for one"
    modules = BROWSER / "node_modules" if WANTED == "1" else Path(WANTED)
    assert (modules / "zarrita").is_dir(), f"{modules} holds no zarrita: npm install"

    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), tail="cut", labelled=True)
    whole, damaged = plain.write(tmp_path / "whole"), plain.write(tmp_path / "damaged")
    (damaged / "acts000001.bin").unlink()
    cases = [
        case("activations", plain.dense, [None, None, None, None]),
        case("activations", plain.dense, [[2, 7], 1, [1, 5], None]),
        case("activations", plain.dense, [6, 2, 0, [3, 5]]),
        case("labels", plain.labels, [None, None]),
        case("layer", np.array([2, 5, 11], np.int64), [None]),
        case("token", np.arange(-1, 4, dtype=np.int64), [None]),
    ]
    found: queue.Queue = queue.Queue()
    with (
        serving(whole, "--origin", "*") as (url, _),
        serving(whole, "--chunks", "3,3,5,8", "--origin", "*") as (url_large, _),
        serving(damaged, "--origin", "*") as (url_damaged, _),
    ):
        truth = {"urls": [url, url_large], "damaged": url_damaged, "lost": 4, "cases": cases}
        pages = partial(Pages, modules=modules, truth=json.dumps(truth).encode(), found=found)
        with ThreadingHTTPServer(("127.0.0.1", 0), pages) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}/page.html"
            log = tmp_path / "chromium.log"
            with log.open("wb") as output:
                browser = subprocess.Popen(
                    [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", address],
                    stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
                try:
                    result = found.get(timeout=HANG_S)
                except queue.Empty:
                    pytest.fail(f"the page said nothing:\n{log.read_text(errors='replace')[-3000:]}")
                finally:
                    os.killpg(browser.pid, signal.SIGKILL)  # the group that was started for it
                    browser.wait()
                    server.shutdown()
    assert result["problems"] == []
    assert "Chrome" in result["agent"]
