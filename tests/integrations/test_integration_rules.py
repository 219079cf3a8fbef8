"""Single rules of the integrations: what is refused, and what is told of a loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from row_stores import D_MODEL, N_EXAMPLES, N_TOKENS, row_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata, pair  # after the check that torch is there
from saev_store.errors import ArgumentError  # after the check that torch is there
from saev_store.integrations import saev  # after the check that torch is there
from saev_store.integrations.crosscoders import (  # after the check that torch is there
    PairedActivations,
    model_batches,
    transcoder_batches,
)
from saev_store.integrations.dictionary_learning import activation_buffer  # after the check that torch is there
from saev_store.torch import StoreLoader


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(
        tmp_path_factory.mktemp("rules"), layers=(2, 5, 11), protocol="3.0", token_arrays={"token_ids": "int32"}
    )


def narrow_store(root: Path) -> Path:
    """The same tokens, in vectors of another length."""
    metadata = new_metadata(
        family="gpt2", ckpt="narrow", layers=(5,), content_tokens_per_example=N_TOKENS, cls_token=True, d_model=6,
        n_examples=N_EXAMPLES,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(torch.zeros(metadata.layout.shape))
    return root / metadata.hash


@pytest.mark.parametrize(("layers", "fits"), [((2, 5), True), ((11, 2), True), ((2, 5, 11), False), ((5,), False)])
def test_a_transcoder_takes_two_layers(three: Path, layers: tuple[int, ...], fits: bool) -> None:
    loader = StoreLoader(three, layer=layers, stack_layers=True, batch_size=8)
    with transcoder_batches(loader) as batches:
        if fits:
            source, target = next(batches)
            assert source.shape == target.shape == (8, D_MODEL)
            assert [{*rows[:, 2].tolist()} for rows in (source, target)] == [
                {(2, 5, 11).index(layer)} for layer in layers
            ]
        else:
            with pytest.raises(ArgumentError, match=f"a row has {len(layers)} layers") as caught:
                next(batches)
            assert "two layers" in caught.value.remedy


def test_models_of_two_widths_are_for_transcoders_only(three: Path, tmp_path: Path) -> None:
    narrow = narrow_store(tmp_path)

    def loader() -> StoreLoader:
        a, b = ShardStore.open(three), ShardStore.open(narrow)
        return StoreLoader(pair(a, b).sel(layer_a=5, layer_b=5), batch_size=8)

    with (
        model_batches(loader()) as batches,
        pytest.raises(ArgumentError, match="have 8 numbers, those of the second 6"),
    ):
        next(batches)
    with transcoder_batches(loader()) as batches:
        assert [tuple(rows.shape) for rows in next(batches)] == [(8, 8), (8, 6)]
    a, b = ShardStore.open(three), ShardStore.open(narrow)
    with pytest.raises(ArgumentError, match="have 8 numbers, those of the second 6"):
        PairedActivations(pair(a, b).sel(layer_a=5, layer_b=5))


def test_rows_of_two_models_by_any_kind_of_number(three: Path) -> None:
    store = ShardStore.open(three)
    rows = PairedActivations(pair(store, store).sel(layer_a=5, layer_b=11))
    n = N_EXAMPLES * N_TOKENS
    assert len(rows) == n
    for index, expected in (
        (0, 0), (-1, n - 1), (torch.tensor(9), 9), (slice(3, 6), [3, 4, 5]), (slice(n - 1, None), [n - 1]), (torch.tensor([7, 2, 7]), [7, 2, 7]),
        (slice(0, 0), []), (torch.tensor([5]), [5]),
    ):  # fmt: skip
        found = rows[index]
        numbers = [expected] if isinstance(expected, int) else expected
        assert found.shape == (*(() if isinstance(expected, int) else (len(numbers),)), 2, D_MODEL)
        flat = found.reshape(-1, 2, D_MODEL)
        for place, layer in enumerate((1, 2)):
            assert flat[:, place, :3].tolist() == [[number // N_TOKENS, number % N_TOKENS, layer] for number in numbers]
    assert [row[0, :2].tolist() for row in rows.__getitems__([8, 1])] == [[1, 1], [0, 1]]


def test_what_dictionary_learning_is_told(three: Path) -> None:
    shuffled = {"layer": (2, 11), "batch_size": 16, "drop_last": True, "seed": 41}
    loader = StoreLoader(three, **shuffled)
    url = ShardStore.open(three).url
    with activation_buffer(loader) as buffer:
        assert buffer.config == {
            "d_submodule": D_MODEL, "out_batch_size": 16, "device": "cpu", "store": url, "layers": ["2", "11"],
            "tokens": "content", "dtype": loader.options.dtype, "n_samples": 2 * N_EXAMPLES * N_TOKENS, "scale": loader.scale,
            "normalize": loader.options.normalize, "seed": 41,
        }  # fmt: skip
    ordered = StoreLoader(three, layer=5, batch_size=9, tokens="all", device="cpu:0", order="stored")
    with activation_buffer(ordered) as buffer:
        told = buffer.config
        assert told["device"] == "cpu:0"
        assert (told["seed"], told["layers"], told["out_batch_size"]) == (None, ["5"], 9)
        assert (told["tokens"], told["n_samples"]) == ("all", N_EXAMPLES * (N_TOKENS + 1))


class Stopping(torch.nn.Module):
    """A model whose second block runs only if it is asked to."""

    name = "stopping"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Identity() for _ in range(2)])

    def get_token_i(self, content_tokens_per_example: int) -> slice:
        return slice(0, content_tokens_per_example)

    def get_residuals(self) -> torch.nn.ModuleList:
        return self.blocks

    def forward(self, batch: torch.Tensor, n_blocks: int = 2) -> torch.Tensor:
        for block in self.blocks[:n_blocks]:
            batch = block(batch + 1)
        return batch


def test_outputs_of_an_earlier_call_are_not_taken_for_those_of_this_one() -> None:
    recorder = saev.RecordedTransformer(Stopping(), 4, False, [0, 1])
    batch = torch.zeros(2, 4, 3, requires_grad=True)
    out, acts = recorder(batch)
    assert (acts[:, 0] == 1).all()
    assert (acts[:, 1] == 2).all()
    assert out.requires_grad
    assert not acts.requires_grad
    with pytest.raises(ArgumentError, match="not every block has run"):
        recorder(batch, n_blocks=1)
    recorder.reset()
    with pytest.raises(ArgumentError, match="not every block has run"):
        _ = recorder.activations
