"""`saev-store serve` of stores of 16 bits: float32 in full length, as NumPy has it, and an error where the file is cut."""

from __future__ import annotations

import http.client
import itertools
import os
from pathlib import Path
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np
import pytest
from served import serving
from waiting import HANG_S

from saev_store import ShardStore, new_metadata

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
N, LAYERS, TOKENS, D = 7, (2, 5, 11), 5, 8


@pytest.fixture(params=DTYPES)
def made(request, tmp_path: Path) -> tuple[Path, np.ndarray]:
    metadata = new_metadata(
        family="gpt2", ckpt="random", layers=LAYERS, content_tokens_per_example=TOKENS - 1, cls_token=True, d_model=D,
        n_examples=N, max_tokens_per_shard=3 * len(LAYERS) * TOKENS, dtype=request.param,
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((N, len(LAYERS), TOKENS, D)).astype(DTYPES[request.param])
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    return tmp_path / metadata.hash, acts.astype(np.float32)


def ask(url: str, key: str, method: str = "GET", **headers: str) -> tuple[int, str | None, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=HANG_S)
    connection.request(method, f"/{key}", headers=headers)
    response = connection.getresponse()
    found = response.status, response.headers["Content-Length"], response.read()
    connection.close()
    return found


@pytest.mark.parametrize("chunks", [(1, 1, 5, 8), (3, 3, 5, 8), (1, 3, 5, 8)])
def test_every_chunk_has_all_its_numbers(made, chunks):
    path, acts = made
    padded = np.zeros([-(-n // chunk) * chunk for n, chunk in zip(acts.shape, chunks, strict=True)], np.float32)
    padded[: len(acts)] = acts
    with serving(path, "--chunks", ",".join(map(str, chunks))) as (url, _):
        for at in itertools.product(*(range(n // chunk) for n, chunk in zip(padded.shape, chunks, strict=True))):
            box = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(at, chunks, strict=True))
            key, expected = f"activations/c/{'/'.join(map(str, at))}", padded[box].tobytes()
            size = len(expected)
            assert ask(url, key) == (200, str(size), expected)
            assert ask(url, key, "HEAD") == (200, str(size), b"")
            for start, end in ((4, 11), (3, 9), (size // 2 - 1, size // 2 + 6), (size - 4, size - 1)):
                found = ask(url, key, Range=f"bytes={start}-{end}")
                assert found == (206, str(end - start + 1), expected[start : end + 1])


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_file_that_is_cut_within_a_chunk_is_an_error(made, method):
    path, _ = made
    with serving(path, "--chunks", "3,3,5,8") as (url, _):
        os.truncate(path / "acts000001.bin", os.path.getsize(path / "acts000001.bin") - 2)
        assert ask(url, "activations/c/1/0/0/0", method)[0] == 410
