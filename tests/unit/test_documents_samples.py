"""Documents written by the reference project's own releases, and broken ones, against the truth recorded beside them."""

import json
import pathlib

import numpy as np
import pytest

from saev_store.core.token_arrays import LABELS
from saev_store.documents import content_hashes, match_hash, parse_metadata, parse_shards, shards_bytes
from saev_store.errors import BreakingProtocolWarning, DocumentError, UnknownProtocolError, UnsafeContentError

SAMPLES = pathlib.Path(__file__).parents[1] / "data" / "saev"
CASES = sorted(path.parent for path in SAMPLES.glob("*/expected.json"))
MALFORMED = json.loads((SAMPLES / "malformed" / "manifest.json").read_text())["cases"]

#: What the truth calls a recipe, and what we call it.
RECIPES = {
    "json.dumps(sort_keys,ascii)": "sorted-ascii",
    "orjson(file order, nested dicts sorted)": "field-order",
}


def read(store: pathlib.Path):
    meta = parse_metadata((store / "metadata.json").read_bytes(), where="metadata.json")
    return meta, parse_shards((store / "shards.json").read_bytes(), meta, where="shards.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sample_equals_its_truth(case):
    truth = json.loads((case / "expected.json").read_text())
    spec, written = truth["spec"], truth["metadata"]
    store = case / truth["store"]
    meta, index = read(store)

    assert meta.raw == (store / "metadata.json").read_bytes()
    assert meta.layout.shape == tuple(truth["logical_shape"])
    assert meta.layout.examples_per_shard == truth["capacity"]
    assert meta.layout.shard_nbytes == truth["bytes_per_full_shard"]
    assert (meta.n_examples, meta.content_tokens_per_example, meta.d_model) == (spec["n"], spec["P"], spec["D"])
    assert (meta.cls_token, meta.layers, meta.max_tokens_per_shard) == (
        spec["cls"],
        tuple(spec["layers"]),
        spec["budget"],
    )
    assert (meta.family, meta.ckpt) == (spec.get("family", "clip"), "ViT-Toy-P2/known-tensors")
    assert (meta.dtype, meta.protocol, meta.data) == ("float32", written["protocol"], written["data"])
    assert (meta.dataset, meta.pixel_agg) == (written.get("dataset"), written.get("pixel_agg"))
    assert meta.extra == {}
    assert meta.count_key == truth["count_key"]

    assert [{"name": n, meta.count_key: c} for n, c in zip(index.names, index.counts.tolist(), strict=True)] == truth[
        "shards"
    ]
    assert index.counts.dtype == np.int64
    assert index.trailing_empty == (truth["shards"][-1][truth["count_key"]] == 0)
    assert (
        shards_bytes(meta.layout, meta.count_key, trailing_empty=index.trailing_empty)
        == (store / "shards.json").read_bytes()
    )
    if truth.get("labels_shape"):
        assert LABELS.nbytes(meta.layout) == (store / "labels.bin").stat().st_size

    assert {(p.kind, p.severity) for p in meta.problems} == (
        {("layer_order", "warning")} if spec["layers"] != sorted(spec["layers"]) else set()
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sample_folder_has_the_name_that_a_recipe_gives(case):
    truth = json.loads((case / "expected.json").read_text())
    meta, _ = read(case / truth["store"])
    for theirs, ours in RECIPES.items():
        assert content_hashes(truth["metadata"])[ours] == truth["full_hashes"][theirs]
    recipe = match_hash(meta, truth["dirname"])
    assert recipe == ("field-order-8" if truth["dirname_len"] == 8 else "sorted-ascii")
    assert meta.hash == truth["dirname"]


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["case"])
def test_malformed_sample_is_refused_as_its_manifest_says(case):
    store = SAMPLES / case["path"] / case["store"]
    name = case["case"]
    if name in {"middle_shard_truncated", "hostile_pickle_in_data"}:
        meta, _ = read(store)  # The documents are fine: the shard is what is wrong, and a pickle is only a string.
        assert match_hash(meta, store.name)
        assert isinstance(meta.data, str) == (name == "hostile_pickle_in_data")
    elif name == "hash_mismatch":
        meta, _ = read(store)
        assert match_hash(meta, store.name) is None
    elif name == "unknown_protocol":
        with (
            pytest.warns(BreakingProtocolWarning),
            pytest.raises(UnknownProtocolError),
        ):
            read(store)
    elif name == "path_traversal_name":
        with pytest.raises(UnsafeContentError):
            read(store)
    else:
        expected = {
            "wrong_types": {("cls_token",), ("d_vit",), ("n_imgs",)},
            "counts_do_not_sum": {(2,)},
            "mixed_key_generations": {("patches_per_ex",)},
        }[name]
        with pytest.raises(DocumentError) as caught:
            read(store)
        assert {problem.loc for problem in caught.value.problems} == expected
        assert caught.value.where in {"metadata.json", "shards.json"}
        assert caught.value.remedy
    assert not pathlib.Path("SAEV_FIXTURE_PICKLE_WAS_EXECUTED").exists()
