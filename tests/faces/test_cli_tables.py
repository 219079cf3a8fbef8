"""The tables of `estimate`, `head` and `ls` cell by cell, of stores whose numbers are written here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore, new_metadata


def made(root: Path, *, d_model: int, cls: bool = True, dtype: str = "float32", n: int = 6) -> Path:
    """Example e, layer l, token t, dimension d: e + 10 l + 100 t, plus d / 8; two token arrays of 4 and 1 bytes."""
    metadata = new_metadata(
        family="gpt2", ckpt="small", layers=(3, 9), content_tokens_per_example=2, cls_token=cls, d_model=d_model, n_examples=n,
        max_tokens_per_shard=2 * (2 + cls) * 2, dtype=dtype, protocol="3.0", token_arrays={"token_ids": "int32", "odd": "bool"},
    )  # fmt: skip
    e, layer, t, d = np.ogrid[0:n, 0:2, 0 : 2 + cls, 0:d_model]
    acts = (e + 10 * layer + 100 * t + d / 8).astype(np.float32)
    ids = np.arange(2 * n, dtype=np.int32).reshape(n, 2)
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts, token_ids=ids, odd=ids % 3 > 0)
    return root / metadata.hash


def cells(out: str) -> list[list[str]]:
    """The cells of each line; two blanks are between columns."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("only", [None, "float32", "float16"])
def test_estimate(run, tmp_path, dtype, only):
    """6 examples x 2 layers x 3 tokens x 512 dimensions; 12 tokens of 4 and of 1 byte."""
    folder = made(tmp_path, d_model=512, dtype=dtype)
    code, out, err = run("estimate", folder, *(() if only is None else ("--dtype", only)))
    sizes = {"float32": "72.0 KiB", "bfloat16": "36.0 KiB", "float16": "36.0 KiB"}
    assert (code, err) == (0, "")
    header, *rows = cells(out)
    assert header == ["dtype", "vectors", "token arrays", "reading all vectors"]
    chosen = [name for name in sizes if only in {None, name}]
    expected = [[f"{name} (stored)" if name == dtype else name, sizes[name], "60 B"] for name in chosen]
    assert [row[:3] for row in rows] == expected
    reads = {name: f"3 requests, {'0.074' if name == 'float32' else '0.037'} MB" for name in sizes}
    assert [row[3] for row in rows] == [reads[name] for name in chosen]


@pytest.mark.parametrize("d_model", [2, 5, 6, 7, 40])
@pytest.mark.parametrize(("tokens", "cls"), [("all", True), ("all", False), ("content", True), ("special", True)])
@pytest.mark.parametrize("layer", [None, 3, 9])
def test_head(run, tmp_path, d_model, tokens, cls, layer):
    folder = made(tmp_path, d_model=d_model, cls=cls)
    options = ["-n", 4, "--tokens", tokens]
    options += [] if tokens == "special" else ["--token-array", "token_ids", "--token-array", "odd"]
    code, out, err = run("head", folder, *options, *(() if layer is None else ("--layer", layer)))
    assert (code, err) == (0, "")
    shown = f"{d_model} values" if d_model <= 6 else f"the first 6 of {d_model} values"
    first, _, *rows = out.splitlines()
    assert first == f"layer {layer or 3} of [3, 9], {shown} per vector"
    places = {"all": range(2 + cls), "content": range(int(cls), 2 + cls), "special": range(1)}[tokens]
    expected = []
    for example, place in [(example, place) for example in range(6) for place in places][:4]:
        vector = [example + 10 * (layer == 9) + 100 * place + d / 8 for d in range(d_model)]
        token, number = place - cls, 2 * example + place - cls
        beside = ["-", "-"] if token < 0 else [str(number), str(number % 3 > 0)]
        beside = [] if tokens == "special" else beside
        norm = sum(value * value for value in vector) ** 0.5
        values = [f"{value:.4g}" for value in vector[:6]]
        expected.append([str(example), "CLS" if token < 0 else str(token), *beside, f"{norm:.4g}", *values])
    assert [row.split() for row in rows] == expected


def test_ls(run, tmp_path):
    """Shapes, layers, whole sizes, and what is wrong with a store; a store itself is no folder of stores."""
    big, small = made(tmp_path, d_model=512), made(tmp_path, d_model=8, cls=False)
    (tmp_path / "other").mkdir()
    broken = made(tmp_path / "other", d_model=4)
    broken = broken.rename(tmp_path / broken.name)
    (broken / "shards.json").unlink()
    code, out, err = run("ls", tmp_path)
    assert (code, err) == (0, "")
    header, *rows = cells(out)
    assert header == ["store", "shape", "layers", "size", "protocol", "model", "state"]
    found = {row[0]: row[1:] for row in rows}
    assert found[big.name] == ["6 x 2 x 3 x 512", "3,9", "72.0 KiB", "3.0", "small", "complete"]
    assert found[small.name] == ["6 x 2 x 2 x 8", "3,9", "768 B", "3.0", "small", "complete"]
    assert "shards.json" in found[broken.name][-1]
    assert found[broken.name][-1].startswith("broken: ")
    code, out, _ = run("ls", big)
    assert (code, out) == (0, f"{big} is a store itself; inspect it with: saev-store info {big}\n")
    (tmp_path / "empty").mkdir()
    assert run("ls", tmp_path / "empty")[:2] == (0, f"no stores in {tmp_path / 'empty'}\n")


@pytest.mark.parametrize(("damage", "expected"), [(False, 0), (True, 1)])
def test_validate_ends_with_one_where_something_is_wrong(run, tmp_path, damage, expected):
    folder = made(tmp_path, d_model=4)
    if damage:
        (folder / "acts000001.bin").unlink()
    code, out, _ = run("validate", folder)
    assert code == expected
    assert ("acts000001.bin" in out) == damage
