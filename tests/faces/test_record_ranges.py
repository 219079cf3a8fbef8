"""For a range of examples a source reads, and the model runs, exactly the batches that have a token of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store.record import ImageBatches, Images, Texts, record

torch = pytest.importorskip("torch")

# No batch has as many rows as tokens: a recorder runs one row of such a first batch alone, to tell its axes apart.
LENGTHS = (7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8, 4, 4, 10, 1, 3, 1, 9, 13, 2)
IDS = [np.random.default_rng(i).integers(3, VOCABULARY, n) for i, n in enumerate(LENGTHS)]
PIXELS = np.random.default_rng(3).standard_normal((29, 3, 32, 32), dtype=np.float32)
#: Uneven: the last batch of a `DataLoader` of several workers, or of several files.
CUTS = [PIXELS[first:end] for first, end in ((0, 5), (5, 6), (6, 13), (13, 17), (17, 18), (18, 24), (24, 29))]
CONTEXT, ROWS = 5, 2
KINDS = ("images", "batches", "window", "packed", "stream")


class Read:
    """What was asked of a source: batches of `ImageBatches`, images of `Images`."""

    def __init__(self, items: object) -> None:
        self.items, self.positions = items, list[int]()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> object:
        self.positions.append(i)
        return self.items[i]

    def __iter__(self):
        for i in range(len(self)):
            yield self[i]


def source_of(kind: str, read: Read | None = None) -> object:
    if kind == "images":
        return Images(PIXELS if read is None else read, 4)
    if kind == "batches":
        return ImageBatches(CUTS if read is None else read, len(PIXELS))
    options = {"layout": "stream"} if kind == "stream" else {"pack": kind == "packed"}
    return Texts(IDS, context=CONTEXT, bos=1, batch_size=ROWS, **options)


def examples_of_batches(kind: str) -> list[set[int]]:
    """For each batch of the whole recording the examples that have a token of it, written out token by token."""
    if kind == "images":
        return [set(range(len(PIXELS))[first : first + 4]) for first in range(0, len(PIXELS), 4)]
    if kind == "batches":
        ends = np.cumsum([len(cut) for cut in CUTS])
        return [set(range(end - len(cut), end)) for end, cut in zip(ends, CUTS, strict=True)]
    tokens = [(document, position) for document, n in enumerate(LENGTHS) for position in range(n)]
    row, rows = -1, list[int]()
    for i, (_, position) in enumerate(tokens):
        row += i % CONTEXT == 0 if kind == "packed" else position % CONTEXT == 0
        rows.append(row)
    examples = [i // CONTEXT for i in range(len(tokens))] if kind == "stream" else rows
    found = [set[int]() for _ in range(-(-(row + 1) // ROWS))]
    for example, of_row in zip(examples, rows, strict=True):
        found[of_row // ROWS].add(example)
    return found


def ran(kind: str, root: Path, read: Read | None = None, **options: object) -> list[bytes]:
    """The inputs that the model is given."""
    is_text = kind in {"window", "packed", "stream"}
    model = tiny_language("GPT2Model") if is_text else tiny_vision("ViTModel")
    inputs: list[bytes] = []

    def keep(_model: object, args: tuple, kwargs: dict) -> None:
        (given,) = args or (kwargs["input_ids" if is_text else "pixel_values"],)
        inputs.append(given.numpy().tobytes())

    model.register_forward_pre_hook(keep, with_kwargs=True)
    tokens = CONTEXT + (kind in {"window", "packed"}) if is_text else 17
    record(
        model, source_of(kind, read), root, layers=(1,), ckpt="tiny", max_tokens_per_shard=3 * tokens, progress=False, **options
    )  # fmt: skip
    return inputs


@pytest.mark.usefixtures("padding_is_known")
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_in_the_middle_computes_the_batches_of_its_examples_and_no_others(kind: str, tmp_path: Path) -> None:
    whole, batches = ran(kind, tmp_path / "whole"), examples_of_batches(kind)
    assert len(whole) == len(batches)
    n_examples = max(max(batch) for batch in batches) + 1
    n_shards = -(-n_examples // 3)
    for rank, n in ((1, 3), (2, 5), (0, 2), (4, 5)):
        first, end = 3 * (n_shards * rank // n), min(n_examples, 3 * (n_shards * (rank + 1) // n))
        expected = [i for i, examples in enumerate(batches) if examples & set(range(first, end))]
        assert ran(kind, tmp_path / f"{rank}of{n}", part=(rank, n)) == [whole[i] for i in expected]
    assert expected[-1] == len(batches) - 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_images_behind_a_part_are_not_read(rank: int, tmp_path: Path) -> None:
    """`ImageBatches` begins at the first batch. Ten shards in three parts: examples 0 to 8, 9 to 17, 18 to 28."""
    read = Read(CUTS)
    ran("batches", tmp_path / "batches", read, part=(rank, 3))
    assert read.positions == list(range((3, 5, 7)[rank]))
    read = Read(PIXELS)
    ran("images", tmp_path / "images", read, part=(rank, 3))
    looked_at_first = [0]  # for the size of images
    assert read.positions == looked_at_first + list(range(*((0, 12), (8, 20), (16, 29))[rank]))
