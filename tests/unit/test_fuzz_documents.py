"""Documents nobody would write: only our exceptions come out, and memory stays in proportion to the file.

Deterministic; `fuzzing.py` says how to make it longer.
"""

import json
import pathlib
import random
import warnings

import pytest
from fuzzing import N_INPUTS, mutate, only_ours

from saev_store.documents import (
    match_hash,
    new_metadata,
    parse_metadata,
    parse_shards,
    shards_bytes,
)

N_BATCHES = 10

SAMPLES = pathlib.Path(__file__).parents[1] / "data" / "saev"
STORES = sorted(path.parent for path in SAMPLES.rglob("metadata.json"))
#: No sample has been written in protocol 3.0 yet.
NEW = new_metadata(
    family="gpt2", ckpt="gpt2", layers=[0, 3, 3], content_tokens_per_example=4, cls_token=True, d_model=8, n_examples=7,
    max_tokens_per_shard=50, dtype="bfloat16", hook_points=["resid_pre", "attn_out", "resid_post"],
    token_arrays={"token_ids": "int32", "mask": "bool", "document_ids": "int64"},
    text={"layout": "stream", "tokenizer": {"name": "gpt2", "digest": "0" * 64}, "bos": False},
)  # fmt: skip
METADATA_SEEDS = [(store / "metadata.json").read_bytes() for store in STORES] + [NEW.raw] * 10
SHARDS_SEEDS = [(store / "shards.json").read_bytes() for store in STORES]
GOOD_STORES = sorted(path.parent for path in SAMPLES.glob("v*/store/**/metadata.json"))


def all_metas():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [NEW, *(parse_metadata((store / "metadata.json").read_bytes(), where="m") for store in GOOD_STORES)]


@pytest.mark.parametrize("batch", range(N_BATCHES))
def test_metadata(batch):
    rng = random.Random(batch)
    n_opened = 0
    parse_metadata(METADATA_SEEDS[0], where="m")  # Imports what is imported once, outside of what is measured.
    for _ in range(N_INPUTS // N_BATCHES // 2):
        raw = mutate(rng, METADATA_SEEDS)
        meta = only_ours(rng, raw, lambda raw: parse_metadata(raw, where="metadata.json"))
        if meta is None:
            continue
        n_opened += 1
        assert meta.raw == raw
        assert meta.layout.nbytes < 2**63
        assert meta.layout.examples_per_shard >= 1
        assert match_hash(meta, meta.hash) == meta.version.recipe
    assert n_opened or N_INPUTS < 1000


@pytest.mark.parametrize("batch", range(N_BATCHES))
def test_shards(batch):
    rng = random.Random(1000 + batch)
    metas = all_metas()
    n_opened = 0
    seeds = SHARDS_SEEDS + [shards_bytes(meta.layout, meta.count_key) for meta in metas]
    for _ in range(N_INPUTS // N_BATCHES // 2):
        raw = mutate(rng, seeds)
        meta = rng.choice(metas)
        index = only_ours(rng, raw, lambda raw, meta=meta: parse_shards(raw, meta, where="shards.json"))
        if index is None:
            continue
        n_opened += 1
        listed = json.loads(raw.decode("utf-8-sig"))
        assert [entry["name"] for entry in listed] == list(index.names)
        assert int(index.counts.sum()) == meta.n_examples
        assert all(0 <= count <= meta.layout.examples_per_shard for count in index.counts.tolist())
    assert n_opened or N_INPUTS < 1000
