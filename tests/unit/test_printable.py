"""What is printed of a folder whose name is not UTF-8, in every output: no half of a surrogate pair."""

from __future__ import annotations

import os
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from plain_stores import plain_store
from token_files import llmbatch_bytes

from saev_store import ShardStore, new_metadata, pair
from saev_store.errors import NotFoundError
from saev_store.names import printable
from saev_store.problems import Problem
from saev_store.sources import ImageFolder, TextFile
from saev_store.sources.llmbatch import BatchFileReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have names of other texts only")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = Path(os.fsdecode(os.fsencode(tmp_path_factory.mktemp("odd")) + b"/caf\xe9"))
    plain_store(root, n=6, tokens=3)
    damaged = plain_store(root / "damaged", n=6, tokens=3, per_shard=2)
    damaged.shard(0).unlink()
    (root / "x.txt").write_text("one\ntwo\n")
    (root / "x.batch").write_bytes(llmbatch_bytes(np.zeros((2, 2, 2), np.uint32)))
    return root


def opened(root: Path) -> ShardStore:
    (entry,) = (entry for entry in ShardStore.list(root) if entry.metadata is not None)
    return ShardStore.open(entry.url)


def damaged(root: Path) -> ShardStore:
    (entry,) = ShardStore.list(root / "damaged")
    return ShardStore.open(entry.url, damaged_ok=True)


def unfinished(root: Path):
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[1], n_examples=2, content_tokens_per_example=1, d_model=2, cls_token=False
    )
    return ShardStore.create(root / "new", metadata)


def refused(root: Path) -> NotFoundError:
    with pytest.raises(NotFoundError) as found:
        ImageFolder(root / "nowhere")
    return found.value


MAKE = {
    "store": opened,
    "damaged store": damaged,
    "list": ShardStore.list,
    "entry": lambda root: ShardStore.list(root)[0],
    "report": lambda root: damaged(root).validate(),
    "zarr": lambda root: opened(root).as_zarr(),
    "pair": lambda root: pair(opened(root), opened(root)),
    "text file": lambda root: TextFile(root / "x.txt"),
    "LLMBATCH": lambda root: BatchFileReader(root / "x.batch"),
    "writer": unfinished,
    "problem": lambda root: Problem("missing_shard", "it is gone", where=f"{root}/acts000000.bin"),
    "error": refused,
}


@pytest.mark.parametrize("what", MAKE)
def test_what_is_printed_of_a_name_that_is_not_utf8(root, what):
    made = MAKE[what](root)
    texts = [str(made), repr(made)] if what not in {"error", "problem"} else [str(made)]
    if hasattr(made, "_repr_html_"):
        texts.append(made._repr_html_())
    for text in texts:
        text.encode()
    if what != "pair":
        assert any("caf\\udce9" in text for text in texts)


def test_other_texts_are_printed_as_they_are():
    assert printable("café 漢字 \\ \n 😀") == "café 漢字 \\ \n 😀"


def test_no_control_character_but_tabs_and_ends_of_lines_reaches_a_terminal():
    for character in map(chr, range(0x250)):
        is_control = unicodedata.category(character) == "Cc" and character not in "\t\n"
        assert printable(character) == (f"\\x{ord(character):02x}" if is_control else character)
