"""Documents and files nobody would write: hostile values, mutations, and the check that only our errors come out.

`SAEV_STORE_FUZZ_INPUTS=100000` (any number) makes the fuzz tests as long as one likes; the default takes seconds.
"""

import copy
import json
import os
import tracemalloc
import warnings

from saev_store.errors import SaevStoreError, SaevStoreWarning

N_INPUTS = int(os.environ.get("SAEV_STORE_FUZZ_INPUTS", "5000"))

#: Values and keys with a history of trouble.
VALUES = [None, True, False, 0, -1, 1, 7, 3.0, 1e308, float("nan"), float("inf"), 2**31, 2**53 + 1, 2**63 - 1, 2**63]
VALUES += [-(2**63) - 1, 10**400, "", "7", "true", "\ud800", "\0", "../x", "acts000001.bin", "2.7", "9.9", "float16"]
VALUES += [
    [],
    {},
    [[]],
    [1, 1],
    [0, -1],
    list(range(50)),
    {"name": "acts000000.bin"},
    {"name": "mask", "dtype": "bool"},
    {"name": "labels", "dtype": "int64"},
    {"layout": "stream"},
    "bfloat16",
    "saev_store",
    "mask",
    "int32",
    {"": {}},
    [None] * 300,
    "x" * 3000,
]
KEYS = [
    "protocol",
    "dtype",
    "layers",
    "data",
    "dataset",
    "pixel_agg",
    "n_ex",
    "n_imgs",
    "n_examples",
    "d_vit",
    "d_model",
    "name",
    "seed",
    "model",
    "spec",
    "hook_points",
    "token_arrays",
    "text",
    "layout",
    "__class__",
]
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b":",
    b",",
    b"-",
    b"e9",
    b"NaN",
    b"null",
    b"true",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
]
TOKENS += [
    b"9" * 30,
    b"9" * 5000,
    b"[" * 70,
    b'{"a":' * 70,
    b"\\ud800",
    b"\\u0000",
    b'"a":1,',
    b"1e999",
    "é".encode(),
    b" " * 500,
]


def mutate_bytes(rng, raw):
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([0, 1, 1, 4, 30]))
        action = rng.randrange(6)
        if action == 0:
            data[start:end] = b""
        elif action == 1:
            data[start:end] = rng.choice(TOKENS)
        elif action == 2:
            data[start:end] = bytes(rng.randrange(256) for _ in range(end - start))
        elif action == 3:
            data[start:start] = data[rng.randrange(len(data) + 1) :][: rng.choice([3, 20, 200])]
        elif action == 4 and start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        elif action == 5 and rng.random() < 0.3:
            del data[start:]
    return bytes(data)


def mutate_structure(rng, raw):
    """Change some node of the parsed document; the result is JSON again, mostly."""
    holder = [json.loads(raw)]
    for _ in range(rng.choice([1, 1, 2, 5])):
        node = holder
        while True:  # Walk down a random path.
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not places:
                break
            place = rng.choice(places)
            if isinstance(node[place], dict | list) and rng.random() < 0.7:
                node = node[place]
                continue
            action = rng.randrange(6)
            if action == 0 and node is not holder:
                del node[place]
            elif action == 1 and isinstance(node, dict):
                node[rng.choice(KEYS)] = node.pop(place)
            elif action == 2 and isinstance(node, dict):
                node[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
            elif action == 3 and isinstance(node, list) and node is not holder:
                node.extend([copy.deepcopy(node[place])] * rng.choice([1, 3, 200]))
            elif action == 4 and isinstance(node[place], int):
                node[place] += rng.choice([-1, 1, 2**31, 2**62, -node[place]])
            else:
                node[place] = copy.deepcopy(rng.choice(VALUES))
            break
    return json.dumps(holder[0], ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")


def mutate(rng, seeds):
    raw = rng.choice(seeds)
    if rng.random() < 0.1:
        raw = json.dumps(json.loads(raw) | {"data": VALUES}) if raw.startswith(b"{") else raw.decode()
        raw = raw.encode()
    raw = mutate_structure(rng, raw) if rng.random() < 0.6 else mutate_bytes(rng, raw)
    return mutate_bytes(rng, raw) if rng.random() < 0.1 else raw


def only_ours(rng, raw, parse):
    """What `parse` makes of `raw`, None if it refuses; anything but our own exceptions fails the test."""
    measure = rng.random() < 0.02
    with warnings.catch_warnings():
        strict = rng.random() < 0.5
        warnings.simplefilter("error" if strict else "ignore")
        if measure:
            tracemalloc.start()
        try:
            return parse(raw)
        except SaevStoreError as error:
            assert str(error)
            assert error.where
            assert len(str(error)) < 20_000
        except SaevStoreWarning:
            assert strict
        finally:
            if measure:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak <= 64 * len(raw) + (1 << 19), raw
    return None
