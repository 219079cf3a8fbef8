"""How quickly the page of a store appears and answers, and how long a view of a bucket behind 30 ms takes.

    python benchmarks/view.py [--examples 1000] [--clicks 50] [--paints 5] [--modules node_modules] [--json]

The store has 50 tokens of 768 numbers, three layers; the command `saev-store view` serves it. Beside it stands a bare server:
the same HTTP library, in another process, which answers with as many bytes. Each click is a view that was not shown before,
after the first one of its kind. `--modules` names the `node_modules` that `npm install` makes of tests/browser/view/package.json: with it,
Chromium opens the page, of a server that was just started, and moves from token to token by the keyboard.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from _common import Line, make_store, report

HERE = Path(__file__).parent
LAYERS = (2, 7, 11)
#: The other side of a click: a body of as many bytes.
BARE = """
import sys
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
import socket
import uvicorn
listening = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listening.getsockname()[1]}/", flush=True)
app = Starlette(routes=[Route("/{n:int}", lambda request: Response(bytes(request.path_params["n"])))])
uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])
"""


@contextmanager
def started(command: list[str]) -> Iterator[str]:
    """The first line that a process prints, while it runs."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def page_of(url: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "saev_store", "view", url, *options]


class Client:
    """One connection that stays open, as a browser has."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._path = parts.path
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port)

    def get(self, path: str) -> int:
        """The bytes of an answer."""
        self._connection.request("GET", f"{self._path}{path}")
        answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status)
        return len(body)

    def seconds(self, path: str) -> tuple[float, int]:
        """Seconds of a request, and the bytes of its answer."""
        start = time.perf_counter()
        size = self.get(path)
        return time.perf_counter() - start, size


def clicks(folder: Path, n: int, n_examples: int) -> list[Line]:
    """Median milliseconds of each view, and of a bare request of as many bytes, in turn."""
    kinds = {
        "another example": lambda at: f"api/example?example={at * 17 % n_examples}&layer=7",
        "another token": lambda at: f"api/token?example={at * 17 % n_examples}&token={at % 50}&layer=7",
        "another layer": lambda at: f"api/layers?layer={LAYERS[at % 3]}",
    }
    lines = []
    with started(page_of(str(folder))) as url, started([sys.executable, "-c", BARE]) as bare:
        ours, theirs = Client(url), Client(bare)
        for name, path in kinds.items():
            for at in range(3):
                size = ours.get(path(at))
                theirs.get(f"{size}")
            pairs = []
            for at in range(3, 3 + n):
                spent, size = ours.seconds(path(at))
                pairs.append((spent, theirs.seconds(f"{size}")[0]))
            mine, other = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
            lines.append(Line(name, mine, other, "ms", "a bare request of as many bytes", "< 100 ms", mine / other))
    return lines


def first_views(folder: Path) -> dict[str, float]:
    """Seconds of the first view of each kind, each of a server that was just started."""
    found = {}
    for name, path in {"store": "api/store", "layers": "api/layers", "example": "api/example?example=1"}.items():
        with started(page_of(str(folder))) as url:
            client = Client(url)
            client.get("")
            found[f"first view: {name}, ms"] = round(client.seconds(path)[0] * 1e3)
    return found


def far_views(root: Path, folder: Path, n_examples: int) -> dict[str, float]:
    """Seconds of first views and of views again, of a bucket whose answers come 30 ms late."""
    found: dict[str, float] = {}
    kinds = {
        "layers": "api/layers?layer=7",
        "example": "api/example?layer=7&example={}",
        "token": "api/token?layer=7&example={}&token=3",
    }
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, str(HERE / "_far_server.py"), str(listener.fileno()), str(root.parent), "0.03"]
        with subprocess.Popen(command, pass_fds=[listener.fileno()]) as server:
            options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
            pairs = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
            try:
                for name, path in kinds.items():
                    with started(page_of(f"s3://{root.name}/{folder.name}", *pairs)) as url:
                        client = Client(url)
                        first, _ = client.seconds(path.format(n_examples - 1))
                        again = [
                            client.seconds(path.format(at))[0] for at in range(0, n_examples - 1, n_examples // 10)
                        ]
                    found[f"30 ms away: {name}, first, ms"] = round(first * 1e3)
                    found[f"30 ms away: {name}, again, ms"] = round(statistics.median(again) * 1e3)
            finally:
                server.terminate()
    return found


def painted(folder: Path, modules: Path, paints: int, n_clicks: int) -> dict[str, float]:
    """What Chromium measures: medians of milliseconds."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "no Chromium on PATH"
    found = []
    for _ in range(paints):
        with started(page_of(str(folder))) as url:
            told = json.dumps({"modules": str(modules.resolve()), "chromium": chromium, "url": url, "clicks": n_clicks})
            done = subprocess.run(["node", HERE / "view_paint.mjs", told], capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout))
    return {f"Chromium: {name}, ms": round(statistics.median(one[name] for one in found)) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--clicks", type=int, default=50)
    parser.add_argument("--paints", type=int, default=5)
    parser.add_argument("--modules", type=Path, help="node_modules with playwright-core")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "bucket"
        nbytes = options.examples * len(LAYERS) * 50 * 768 * 4
        folder, metadata = make_store(root, n_bytes=nbytes, n_shards=8, layers=LAYERS, tokens=49)
        facts: dict[str, object] = {"examples": metadata.n_examples, **first_views(folder)}
        lines = clicks(folder, options.clicks, metadata.n_examples)
        facts |= far_views(root, folder, metadata.n_examples)
        if options.modules:
            facts |= painted(folder, options.modules, options.paints, options.clicks)
    report(lines, facts, as_json=options.json)


if __name__ == "__main__":
    main()
