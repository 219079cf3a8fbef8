"""Vectors with NaN or infinity: refused with a way on, or recorded with their bits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.errors import ArgumentError, ResumeError, SaevStoreWarning
from saev_store.record import Texts, record, repair
from saev_store.sources.mmididx import IndexedDatasetBuilder

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

IDS = np.random.default_rng(2).integers(3, VOCABULARY, (4, 6))
OPTIONS = {"layers": (0,), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": 12}


def broken(name: str = "GPT2Model") -> torch.nn.Module:
    """A model whose first block gives NaN at 3 and minus infinity at 5, in every token."""
    model = tiny_language(name)
    bias = model.base_model.h[0].mlp.c_proj.bias
    with torch.no_grad():
        bias[3], bias[5] = torch.nan, -torch.inf
    return model


def source() -> Texts:
    return Texts(IDS, context=6, batch_size=3)


def test_numbers_that_are_not_finite_are_refused_and_the_remedy_is_an_option(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"values that are not finite.*on_nonfinite=\"allow\"") as refused:
        record(broken(), source(), tmp_path, **OPTIONS)
    value = re.search(r'on_nonfinite="(\w+)"', str(refused.value))[1]
    store = record(broken(), source(), tmp_path, on_nonfinite=value, **OPTIONS)
    finite = record(tiny_language("GPT2Model"), source(), tmp_path, **OPTIONS)
    assert np.isnan(store[..., 3]).all()
    assert np.isneginf(store[..., 5]).all()
    np.testing.assert_array_equal(*(np.delete(found[:], (3, 5), axis=-1) for found in (store, finite)))


def test_the_policy_changes_neither_bytes_nor_the_name(tmp_path: Path) -> None:
    model = tiny_language("GPT2Model")
    stores = [
        record(model, source(), tmp_path / policy, on_nonfinite=policy, **OPTIONS)
        for policy in ("raise", "warn", "allow")
    ]
    assert len({store.name for store in stores}) == 1
    assert len({store[:].tobytes() for store in stores}) == 1
    with pytest.warns(SaevStoreWarning, match="values that are not finite"):
        record(broken(), source(), tmp_path / "warned", on_nonfinite="warn", **OPTIONS)
    with pytest.raises(ArgumentError, match="on_nonfinite is 'ignore'; it must be"):
        record(model, source(), tmp_path / "wrong", on_nonfinite="ignore", **OPTIONS)


def interrupted(root: Path) -> None:
    def stop(report: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(broken(), source(), root, on_nonfinite="allow", on_report=stop, **OPTIONS)


@pytest.mark.parametrize("recheck", ["exact", "close"])
def test_a_recording_with_numbers_that_are_not_finite_continues(tmp_path: Path, recheck: str) -> None:
    whole = record(broken(), source(), tmp_path / "whole", on_nonfinite="allow", **OPTIONS)
    interrupted(tmp_path / "cut")
    store = record(broken(), source(), tmp_path / "cut", on_nonfinite="allow", recheck=recheck, **OPTIONS)
    assert store[:].tobytes() == whole[:].tobytes()


@pytest.mark.parametrize(("factor", "is_close"), [(1.001, True), (1.5, False)])
def test_numbers_beside_those_that_are_not_finite_are_compared(tmp_path: Path, factor: float, is_close: bool) -> None:
    whole = record(broken(), source(), tmp_path / "whole", on_nonfinite="allow", **OPTIONS)
    with (
        pytest.raises(KeyboardInterrupt),
        ShardStore.create(tmp_path / "cut", whole.metadata, on_nonfinite="allow", progress=False) as writer,
    ):
        arrays = {name: values[:2] for name, values in whole.token_arrays.items()}
        writer.append(whole[:2] * np.float32(factor), **arrays)
        raise KeyboardInterrupt
    options = {"on_nonfinite": "allow", "recheck": "close", **OPTIONS}
    if is_close:
        assert len(record(broken(), source(), tmp_path / "cut", **options)) == len(IDS)
    else:
        with pytest.raises(ResumeError, match=r"example \d is not what the model gives now: .*by up to \d"):
            record(broken(), source(), tmp_path / "cut", **options)


def test_another_place_of_a_nan_is_not_close(tmp_path: Path) -> None:
    whole = record(broken(), source(), tmp_path / "whole", on_nonfinite="allow", **OPTIONS)
    acts = whole[:2].copy()
    acts[..., 4] = np.nan
    with (
        pytest.raises(KeyboardInterrupt),
        ShardStore.create(tmp_path / "cut", whole.metadata, on_nonfinite="allow", progress=False) as writer,
    ):
        writer.append(acts, **{name: values[:2] for name, values in whole.token_arrays.items()})
        raise KeyboardInterrupt
    with pytest.raises(ResumeError, match=r"example \d is not what the model gives now"):
        record(broken(), source(), tmp_path / "cut", on_nonfinite="allow", recheck="close", **OPTIONS)


def test_a_lost_shard_with_numbers_that_are_not_finite_is_repaired(tmp_path: Path) -> None:
    store = record(broken(), source(), tmp_path, on_nonfinite="allow", **OPTIONS)
    lost = Path(store.url) / "acts000001.bin"
    before = lost.read_bytes()
    lost.unlink()
    with pytest.raises(ArgumentError, match="values that are not finite"):
        repair(broken(), source(), store.url, progress=False)
    repair(broken(), source(), store.url, on_nonfinite="allow", progress=False)
    assert lost.read_bytes() == before


def test_the_commands_name_their_option_and_take_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    broken("GPT2LMHeadModel").save_pretrained(tmp_path / "model")
    with IndexedDatasetBuilder(tmp_path / "tokens", dtype=np.uint16) as builder:
        for ids in IDS:
            builder.add_document(ids)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([*map(str, arguments), "--no-progress"])
        out, err = capfd.readouterr()
        return code, out.strip(), err

    model = ["--model", tmp_path / "model", "--tokens", tmp_path / "tokens.idx", "--context", 6, "--bos", "none"]
    command = ["record", *model, "--layers", 0, "--max-tokens-per-shard", 12, "--to", tmp_path / "root"]
    assert run(*command)[0] == 2
    code, url, err = run(*command, "--on-nonfinite", "allow")
    assert (code, err.count("\n")) == (0, 1)
    assert np.isnan(ShardStore.open(url)[..., 3]).all()
    lost = Path(url) / "acts000001.bin"
    before = lost.read_bytes()
    lost.unlink()
    assert run("repair", url, *model)[0] == 2
    assert run("repair", url, *model, "--on-nonfinite", "allow")[0] == 0
    assert lost.read_bytes() == before
