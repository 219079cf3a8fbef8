"""Stores that a page can show, of images with their folder and of texts; and a client of their pages."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.sources.images import ImageFolder
from saev_store.sources.places import Framing
from saev_store.sources.provenance import recorded_from

GRID, INPUT_PX = 4, 64


def structured(n: int, layers: int, tokens: int, d_model: int, *, seed: int = 0) -> np.ndarray:
    """Vectors (n, layers, tokens, d_model), float32: a place, an example and noise; dimension 3 stands out, dimension 5 is dead."""
    rng = np.random.default_rng(seed)
    by_token, by_example = rng.normal(size=(tokens, d_model)), rng.normal(size=(n, 1, d_model))
    acts = np.stack(
        [(layer + 1) * (by_token + by_example) + rng.normal(size=(n, tokens, d_model)) for layer in range(layers)],
        axis=1,
    )
    acts[..., 3] *= 12
    acts[..., 5] = 0
    return acts.astype(np.float32)


def write_images(folder: Path, n: int) -> list[np.ndarray]:
    """Pictures of 96 x 64 pixels with a bright square somewhere; returns their pixels."""
    from PIL import Image

    folder.mkdir(parents=True)
    pictures = []
    for number in range(n):
        down, across = np.mgrid[0:64, 0:96]
        pixels = np.stack([down * 3, across * 2, np.full_like(down, 40 + 15 * (number % 12))], axis=2).astype(np.uint8)
        row, column = 8 + 10 * (number % 4), 20 + 10 * (number % 5)
        pixels[row : row + 16, column : column + 16] = 255
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
        pictures.append(pixels)
    return pictures


def image_store(root: Path, *, n: int = 10, layers: tuple[int, ...] = (2, 5, 11), d_model: int = 16) -> Path:
    """A store of images: a CLS token and 4 x 4 patches of a centre crop, with labels; 4 examples in a shard."""
    write_images(root / "pictures", n)
    source = ImageFolder(root / "pictures")
    tokens = GRID * GRID + 1
    data = recorded_from(
        source, patches=(GRID, GRID), image_px=(INPUT_PX, INPUT_PX), framing=Framing(INPUT_PX, (INPUT_PX, INPUT_PX))
    )
    metadata = new_metadata(
        family="clip", ckpt="structured", layers=layers, content_tokens_per_example=GRID * GRID, cls_token=True,
        d_model=d_model, n_examples=n, max_tokens_per_shard=4 * tokens * len(layers), data=data, dataset=str(root / "pictures"),
    )  # fmt: skip
    acts = structured(n, len(layers), tokens, d_model)
    labels = np.random.default_rng(1).integers(0, 5, (n, tokens - 1), dtype=np.uint8)
    with ShardStore.create(root / "stores", metadata, progress=False) as writer:
        writer.append(acts, labels=labels)
    return root / "stores" / metadata.hash


def text_store(
    root: Path, *, n: int = 9, tokens: int = 30, layers: tuple[int, ...] = (0, 3), d_model: int = 16, seed: int = 2
) -> Path:
    """A store of texts: token ids and a mask."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 20, (n, tokens), dtype=np.int32)
    metadata = new_metadata(
        family="gpt2", ckpt=f"structured {seed}", layers=layers, content_tokens_per_example=tokens, cls_token=False,
        d_model=d_model, n_examples=n, max_tokens_per_shard=4 * tokens * len(layers),
        token_arrays={"token_ids": "int32", "mask": "bool"}, text={"layout": "window", "bos": False}, protocol="3.0",
    )  # fmt: skip
    mask = np.ones((n, tokens), bool)
    mask[:, -2:] = False
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(structured(n, len(layers), tokens, d_model, seed=seed), token_ids=ids, mask=mask)
    return root / metadata.hash


def store_of(root: Path, acts: np.ndarray, *, cls: bool = True, labels: np.ndarray | None = None) -> Path:
    """A store of (example, layer, token, d_model); 3 examples in a shard."""
    n, layers, tokens, d_model = acts.shape
    metadata = new_metadata(
        family="gpt2", ckpt="tiny", layers=list(range(layers)), content_tokens_per_example=tokens - cls, cls_token=cls,
        d_model=d_model, n_examples=n, max_tokens_per_shard=3 * tokens * layers,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False, on_nonfinite="allow") as writer:
        writer.append(acts, labels=labels)
    return Path(writer.url)


def get(url: str, path: str = "", method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HANG_S)
    try:
        connection.request(method, f"{parts.path}{path}", headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


class Page:
    """A running page, and its answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, view: str, **query: object) -> dict:
        status, _, body = get(self.url, f"api/{view}?{urlencode(query)}")
        assert status == 200, body
        return json.loads(body)

    def error(self, view: str, **query: object) -> tuple[int, str]:
        status, _, body = get(self.url, f"api/{view}?{urlencode(query)}")
        return status, json.loads(body)["error"]["kind"]


@contextmanager
def shown(store: object, **options: object) -> Iterator[Page]:
    opened = store if isinstance(store, ShardStore) else ShardStore.open(store, damaged_ok=True)
    with opened.view(**options) as view:
        yield Page(view.url)
