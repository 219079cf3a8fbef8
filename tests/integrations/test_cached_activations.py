"""A store in the place of SAELens's data set of cached activations. SAELens itself: test_training_peers.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata  # after the check that torch is there
from saev_store.errors import ArgumentError, LayerNotFoundError  # after the check that torch is there
from saev_store.integrations.saelens import use_store  # after the check that torch is there

N, CONTEXT, D_MODEL = 9, 5, 8
HOOK = "blocks.7.hook_resid_post"


def acts_of(*, cls: bool = False) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, 2, CONTEXT + cls, D_MODEL), dtype=np.float32)


def make(
    root: Path, *, cls: bool = False, mask: np.ndarray | None = None, ids: bool = True, **more: object
) -> ShardStore:
    arrays: dict[str, np.ndarray] = (
        {"token_ids": np.arange(N * CONTEXT, dtype=np.int32).reshape(N, CONTEXT)} if ids else {}
    )
    if mask is not None:
        arrays["mask"] = mask
    if arrays:
        more["token_arrays"] = {name: str(values.dtype) for name, values in arrays.items()}
    metadata = new_metadata(
        family="gpt2", ckpt="cached", layers=(3, 7), content_tokens_per_example=CONTEXT, cls_token=cls, d_model=D_MODEL,
        n_examples=N, max_tokens_per_shard=4 * (CONTEXT + cls) * 2, **more,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts_of(cls=cls), **arrays)
    return ShardStore.open(root / metadata.hash)


def activations(**changed: object) -> SimpleNamespace:
    """What SAELens's store has of these names."""
    given = {
        "hook_name": HOOK,
        "context_size": CONTEXT,
        "d_in": D_MODEL,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
    }
    return SimpleNamespace(**{**given, **changed}, cached_activation_dataset=None, current_row_idx=5)


@pytest.mark.parametrize("cls", [False, True])
def test_examples_are_contexts_without_special_tokens(tmp_path: Path, cls: bool):
    into, store = activations(), make(tmp_path, cls=cls)
    use_store(into, store)
    found = into.cached_activation_dataset
    assert into.current_row_idx == 0 and len(found) == N and found.column_names == [HOOK, "token_ids"]
    for some in (slice(0, 4), slice(3, 9), slice(8, 20)):
        batch = found[some]
        assert np.array_equal(batch[HOOK].numpy(), acts_of(cls=cls)[some, 1, int(cls) :])
        assert batch["token_ids"].dtype == torch.int64
        assert batch["token_ids"].tolist() == np.arange(N * CONTEXT).reshape(N, CONTEXT)[some].tolist()


def test_dtype_and_layer_are_those_that_are_asked_for(tmp_path: Path):
    into = activations(hook_name="my.hook", dtype=torch.bfloat16)
    use_store(into, make(tmp_path, ids=False), layer=3)
    batch = into.cached_activation_dataset[2:3]
    assert list(batch) == into.cached_activation_dataset.column_names == ["my.hook"]
    assert torch.equal(batch["my.hook"], torch.from_numpy(acts_of()[2:3, 0]).bfloat16())


def test_all_tensors_are_on_the_device_that_is_asked_for(tmp_path: Path):
    into = activations(device=torch.device("meta"))
    use_store(into, make(tmp_path))
    batch = into.cached_activation_dataset[1:4]
    assert {name: (values.device.type, tuple(values.shape)) for name, values in batch.items()} == {
        HOOK: ("meta", (3, CONTEXT, D_MODEL)), "token_ids": ("meta", (3, CONTEXT)),
    }  # fmt: skip


def test_stores_that_are_no_such_data_set_are_refused(tmp_path: Path):
    store = make(tmp_path / "plain", mask=np.ones((N, CONTEXT), bool))
    use_store(activations(), store)  # a mask that hides nothing
    with pytest.raises(ArgumentError, match=r"no layer of the store is 'blocks.5.*blocks.3.hook_resid_post"):
        use_store(activations(hook_name="blocks.5.hook_resid_post"), store)
    with pytest.raises(LayerNotFoundError):
        use_store(activations(), store, layer=5)
    for changed in ({"context_size": 4}, {"d_in": 9}):
        with pytest.raises(ArgumentError, match="context_size and d_in"):
            use_store(activations(**changed), store)
    mask = np.ones((N, CONTEXT), bool)
    mask[8, 4] = False
    with pytest.raises(ArgumentError, match="mask hides"):
        use_store(activations(), make(tmp_path / "masked", mask=mask))
    with pytest.raises(ArgumentError, match="stream"):
        use_store(activations(), make(tmp_path / "stream", text={"layout": "stream", "bos": False}))
