"""Stores of protocol 3.0 whose documents and token arrays nobody would write: our errors only, in bounded memory.

Deterministic; `fuzzing.py` says how to make it longer.
"""

from __future__ import annotations

import json
import random
import tracemalloc
import warnings

import numpy as np
import pytest
from api import MemoryTransport
from fuzzing import N_INPUTS, VALUES, mutate_bytes, mutate_structure
from kill_harness_oracle import case

from saev_store import ShardStore
from saev_store.errors import SaevStoreError, SaevStoreWarning, SelectionError

N_BATCHES = 10
CASES = [case(n=5, per_shard=2, content=3, d_model=2, protocol="3.0", seed=seed) for seed in range(4)]
NAMES = ["token_ids", "document_ids", "mask", "labels", "positions", "nothing", "", "../x", "acts000000"]
DTYPES = [
    "bool",
    "uint8",
    "int32",
    "int64",
    "float32",
    "complex64",
    "object",
    "<i4",
    "O",
    ">i8",
    "V8",
    "",
    None,
    8,
    ["int32"],
]


class Far(MemoryTransport):
    """Files whose sizes nobody asks for when a store is opened."""

    is_local = False


def hostile_declarations(rng, document):
    """Other names and dtypes of token arrays, two of one name among them."""
    arrays = document["token_arrays"]
    for _ in range(rng.choice([1, 1, 2])):
        what = rng.randrange(5)
        if what == 0 and arrays:
            rng.choice(arrays)["dtype"] = rng.choice(DTYPES)
        elif what == 1 and arrays:
            rng.choice(arrays)["name"] = rng.choice(NAMES)
        elif what == 2:
            arrays.append({"name": rng.choice(NAMES), "dtype": rng.choice(DTYPES)})
        elif what == 3 and arrays:
            del arrays[rng.randrange(len(arrays))]
        else:
            arrays *= rng.choice([2, 2, 50])
    document["dtype"] = rng.choice(["bfloat16", "bfloat16", "float16", "float8_e4m3fn", "float32"])
    return json.dumps(document).encode()


def hostile_sizes(rng, document):
    """Geometries that the files do not have, huge ones among them."""
    key = rng.choice(["n_examples", "content_tokens_per_example", "d_model", "max_tokens_per_shard"])
    document[key] = rng.choice([1, 2, 7, 2**20, 2**31, 2**40, 2**53, document[key] + 1, document[key] * 2])
    return json.dumps(document).encode()


def hostile_array(rng, data):
    how = rng.randrange(8)
    if how == 0:
        return data[: rng.randrange(len(data))]
    if how == 1:
        return data + rng.randbytes(rng.choice([1, 8, 1000]))
    if how == 2:
        return rng.randbytes(len(data))
    if how == 3:
        return bytes(len(data))  # a mask that hides everything, a document that is one
    if how == 4:
        return b"\xff" * len(data)
    if how == 5:
        return b"\x01" * len(data)
    return mutate_bytes(rng, data)


def hostile(rng):
    """The files of a store, some of them changed."""
    this = rng.choice(CASES)
    files = dict(this.files())
    del files["digests.json"]  # it would give away every change
    how = rng.random()
    if how < 0.2:
        files["metadata.json"] = mutate_structure(rng, files["metadata.json"])
    elif how < 0.35:
        files["metadata.json"] = hostile_declarations(rng, json.loads(files["metadata.json"]))
    elif how < 0.45:
        files["metadata.json"] = hostile_sizes(rng, json.loads(files["metadata.json"]))
    for name in this.arrays:
        how = rng.random()
        if how < 0.15:
            files[f"{name}.bin"] = hostile_array(rng, files[f"{name}.bin"])
        elif how < 0.2:
            del files[f"{name}.bin"]
    return files


def hostile_condition(rng, store):
    names = [*store.token_arrays, rng.choice(NAMES)]
    number = rng.choice([0, 1, -1, 2**31, 2**63, -(2**63), 1.5, True, rng.choice(VALUES)])
    return {rng.choice(names): number if rng.random() < 0.5 else [number, rng.choice([0, 1, rng.choice(VALUES)])]}


def first_document(store):
    ids = store.token_arrays.get("document_ids")
    return 0 if ids is None else abs(int(ids[0, 0]))


def operations(rng, *, reads):
    """What may be asked of a store; without `reads` no vectors, whose memory is what the caller asks for."""
    found = [
        lambda store: dict(store.token_arrays.items()),
        lambda store: (store.labels, repr(store)),
        lambda store: store.sel(),
        lambda store: store.sel(tokens="content"),
        lambda store: store.sel(tokens="all", masked=True, examples=[0]).coordinates([0]),
        lambda store: store.sel(where=hostile_condition(rng, store)),
        lambda store: store.sel(where={}, masked=True),
        lambda store: store.sel(ignore_labels=[0, 255]),
        lambda store: store.context(rng.randrange(-2, 5), rng.randrange(-1, 4)),
        lambda store: store.validate(deep=rng.random() < 0.3, progress=False),
    ]
    if reads:
        found += [
            lambda store: store.sel().rows([0]),
            lambda store: store.sel(tokens="content", masked=True).rows([0]),
            lambda store: store.sel(where=hostile_condition(rng, store)).rows([0]),
            lambda store: store.read((0, 0, 0)),
            lambda store: store.document(first_document(store), masked=rng.random() < 0.5),
        ]
    return rng.sample(found, 3)


def asked(files, rng, outcomes, *, reads=True):
    """Open and read a store; anything but our own errors goes on to fail the test."""
    transport = (MemoryTransport if rng.random() < 0.5 else Far)(files, label="fuzz")
    todo = operations(rng, reads=reads)
    try:
        store = ShardStore.open(transport, damaged_ok=rng.random() < 0.3)
    except SaevStoreError as error:
        assert str(error)
        assert len(str(error)) < 20_000
        outcomes["refused"] += 1
        return
    outcomes["opened"] += 1
    for operation in todo:
        try:
            operation(store)
            outcomes["read"] += 1
        except SaevStoreError as error:
            assert str(error)
            assert len(str(error)) < 20_000
            outcomes["told"] += 1


@pytest.mark.parametrize("batch", range(N_BATCHES))
def test_hostile_stores(batch):
    rng, outcomes = random.Random(2000 + batch), dict.fromkeys(["refused", "opened", "read", "told"], 0)
    warnings.simplefilter("ignore", SaevStoreWarning)
    asked(CASES[0].files(), random.Random(0), dict.fromkeys(outcomes, 0))  # imports what is imported once
    for _ in range(N_INPUTS // N_BATCHES // 2):
        files = hostile(rng)
        measured = rng.random() < 0.1
        if measured:
            tracemalloc.start()
        try:
            asked(files, rng, outcomes, reads=not measured)
        finally:
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                nbytes = sum(map(len, files.values()))
                assert peak <= 64 * nbytes + (2 << 20), (peak, nbytes, files["metadata.json"])
    assert min(outcomes.values()) > 0 or N_INPUTS < 1000, outcomes


def opened(**arrays):
    this = CASES[0]
    files = this.files()
    del files["digests.json"]
    files |= {f"{name}.bin": values.tobytes() for name, values in arrays.items()}
    return this, ShardStore.open(MemoryTransport(files, label=this.name))


def test_large_numbers_are_compared_exactly():
    ids = np.array([[2**63 - 1, 2**53, 2**53 + 1]] * 4 + [[-1, -(2**63), 2 - 2**63]], np.int64)
    _, store = opened(document_ids=ids, mask=np.ones((5, 3), bool))

    def chosen(wanted, example=0):
        rows = store.sel(layer=2, tokens="content", examples=example, where={"document_ids": wanted})
        return rows.coordinates().token_idx.tolist()

    assert chosen(2**63 - 1) == [0]
    assert chosen(2**53 + 1) == [2]
    assert chosen(np.array([2**63 - 1, 2**53 + 1], np.uint64)) == [0, 2]
    # No number of this dtype, though the same bits are; NumPy makes floats of the second one.
    for too_large in (2**63, [2**63, 2**53], *(np.array([n, 1], np.uint64) for n in (2**63, 2**63 + 2, 2**64 - 1))):
        with pytest.raises(SelectionError):
            chosen(too_large)
    assert chosen([-1, 2 - 2**63], example=4) == [0, 2]
