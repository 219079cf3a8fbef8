"""metadata.json: every spelling opens under canonical names, every rule has its message."""

import copy
import inspect
import json
import pickle
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_stores import plain_store

from saev_store import ShardStore
from saev_store.documents import (
    METADATA_MAX_NBYTES,
    PROTOCOLS,
    VERSIONS,
    depth_order,
    match_hash,
    parse_metadata,
)
from saev_store.errors import (
    ArgumentError,
    BreakingProtocolWarning,
    DocumentError,
    SaevStoreWarning,
    UnknownProtocolError,
)

COMMON = {"layers": [2, 5, 11], "cls_token": True}
IMAGE_KEYS = {
    "vit_family": "clip",
    "vit_ckpt": "ViT-B",
    "n_patches_per_img": 4,
    "d_vit": 8,
    "n_imgs": 7,
    "max_patches_per_shard": 50,
}
EX_KEYS = {"family": "clip", "ckpt": "ViT-B", "patches_per_ex": 4, "d_model": 8, "n_ex": 7, "patches_per_shard": 50}
TOKEN_KEYS = {
    "family": "clip",
    "ckpt": "ViT-B",
    "content_tokens_per_example": 4,
    "d_model": 8,
    "n_examples": 7,
    "max_tokens_per_shard": 50,
}
N_CONTENT_KEYS = {
    **{k: v for k, v in TOKEN_KEYS.items() if k != "content_tokens_per_example"},
    "n_content_tokens_per_example": 4,
}
OBJECT = {"root": "/data", "__class__": "Imgs"}


def doc(keys, protocol, **more):
    return {**keys, **COMMON, "data": OBJECT, **more, "dtype": "float32", "protocol": protocol}


#: Every spelling that the history of the reference project shows: its document, and what it implies.
SPELLINGS = {
    "2025-06-19 first day": (doc(IMAGE_KEYS, "1.0.0", data="Imgs(root='/data')"), "2025-06-19", "n_imgs"),
    "2025-06-19": (doc(IMAGE_KEYS, "1.0.0"), "2025-06-19", "n_imgs"),
    "2025-09-15": (doc(IMAGE_KEYS, "1.1"), "2025-09-15", "n_imgs"),
    "2025-09-16": (doc(IMAGE_KEYS, "1.1", pixel_agg="majority"), "2025-09-15", "n_imgs"),
    "2025-09-16 null": (doc(IMAGE_KEYS, "1.1", pixel_agg=None), "2025-09-15", "n_imgs"),
    "2025-10-02 morning": (doc(EX_KEYS, "1.1", pixel_agg=None), "2025-10-02", "n_ex"),
    "2025-10-02": (doc(EX_KEYS, "2.0", pixel_agg="prefer-fg"), "2025-10-02", "n_ex"),
    "2025-10-03": (doc(EX_KEYS, "2.0", dataset="/data", pixel_agg=None), "2025-10-03", "n_ex"),
    "text of 2.0": (doc(EX_KEYS, "2.0", dataset="/data"), "2025-10-03", "n_ex"),
    "2025-10-07": (doc(N_CONTENT_KEYS, "2.0", dataset="/data", pixel_agg=None), "2025-10-07", "n_examples"),
    "2025-10-08": (doc(TOKEN_KEYS, "2.0", dataset="/data", pixel_agg=None), "2025-10-08", "n_examples"),
    "2025-10-13": (doc(TOKEN_KEYS, "2.1", data="gASV", dataset="/data", pixel_agg=None), "2025-10-13", "n_examples"),
    "2025-10-14": (
        doc(TOKEN_KEYS, "2.1", data="gASV", dataset="/data", pixel_agg="majority"),
        "2025-10-13",
        "n_examples",
    ),
    "3.0": (doc(TOKEN_KEYS, "3.0", dataset="/data", spec="saev_store"), "2026-11-22", "n_examples"),
}
GOOD = SPELLINGS["2025-10-14"][0]


def parse(document, where="store/metadata.json"):
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_metadata(raw, where=where)


def problems_of(document, error=DocumentError):
    with pytest.raises(error) as caught:
        parse(document)
    assert str(caught.value).startswith("store/metadata.json: ")
    assert caught.value.remedy
    assert all(problem.where == "store/metadata.json" for problem in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_opens_under_canonical_names(name):
    document, since, count_key = SPELLINGS[name]
    meta = parse(document)
    assert (meta.version.since, meta.count_key) == (since, count_key)
    assert (meta.family, meta.ckpt, meta.layers) == ("clip", "ViT-B", (2, 5, 11))
    assert (meta.content_tokens_per_example, meta.cls_token, meta.d_model) == (4, True, 8)
    assert (meta.n_examples, meta.max_tokens_per_shard) == (7, 50)
    assert (meta.data, meta.dataset) == (document["data"], document.get("dataset"))
    assert (meta.pixel_agg, meta.dtype, meta.protocol) == (document.get("pixel_agg"), "float32", document["protocol"])
    assert meta.keys == tuple(document)
    assert meta.extra == {}
    assert meta.problems == ()
    assert meta.layout.shape == (7, 3, 5, 8)
    assert meta.layout.examples_per_shard == 3
    assert match_hash(meta, meta.hash) == meta.version.recipe


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_told_by_its_keys_whatever_their_order(name):
    document, since, _ = SPELLINGS[name]
    assert parse(dict(reversed(document.items()))).version.since == since


def test_every_version_is_covered_above():
    assert {(v.since, v.protocol) for v in VERSIONS} == {(s, d["protocol"]) for d, s, _ in SPELLINGS.values()}
    assert PROTOCOLS == ("1.0.0", "1.1", "2.0", "2.1", "3.0")


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_missing_key_is_named(name):
    document, since, _ = SPELLINGS[name]
    for key in document:
        left = {k: v for k, v in document.items() if k != key}
        if key == "pixel_agg" or (key == "dataset" and since == "2025-10-03"):
            parse(left)  # Optional, or not there yet on the first day of its version.
            continue
        if key == "spec":  # without it the document is another project's
            assert [p.kind for p in problems_of(left, UnknownProtocolError)] == ["unknown_protocol"]
            continue
        found = problems_of(left)
        assert [p.kind for p in found] == ["missing_key"]
        # Without the one key that tells this spelling from the next one, the next one is missed.
        named = "content_tokens_per_example" if key == "n_content_tokens_per_example" else key
        assert [p.loc for p in found] == [(named,)]
        assert f'"{named}" is missing' in found[0].message


def test_the_message_of_a_missing_protocol_says_why_it_matters():
    left = {k: v for k, v in GOOD.items() if k != "protocol"}
    assert "how the vectors are laid out" in problems_of(left)[0].message


@pytest.mark.parametrize(
    "old",
    [
        {"vit_family": "clip", "vit_ckpt": "x", "layers": [1], "n_patches_per_img": 4, "cls_token": True, "d_vit": 8}
        | {"seed": 1, "n_imgs": 7, "n_patches_per_shard": 50, "data": "d"},
        {"model_org": "clip", "model_ckpt": "x", "layers": [1], "n_patches_per_img": 4, "cls_token": True, "d_vit": 8},
        {"model": "clip", "n_patches_per_shard": 7},
        {k: v for k, v in doc(IMAGE_KEYS, "").items() if k not in {"dtype", "protocol"}},
    ],
)
def test_documents_from_before_the_protocol_are_explained(old):
    (problem,) = problems_of(old)
    assert problem.kind == "unversioned"
    assert "June 2025" in problem.message
    with pytest.raises(DocumentError, match=r"Record the activations again"):
        parse(old)


# -- values ------------------------------------------------------------------------------------------------------------

COUNTS = ["content_tokens_per_example", "d_model", "n_examples", "max_tokens_per_shard"]


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", ["7", 8.5, 8.0, True, False, None, [7], {}, 0, -1, 2**63, 10**400, float("nan")])
def test_counts_are_integers_from_1_to_63_bits(key, value):
    (problem,) = problems_of({**GOOD, key: value})
    assert problem.loc == (key,)
    assert f'"{key}" is ' in problem.message
    assert "an integer from 1 to 2^63 - 1" in problem.message
    assert len(problem.message) < 300


@pytest.mark.parametrize(
    ("key", "values", "rule"),
    [
        ("family", [None, 7, ["clip"]], "a string"),
        ("ckpt", [None, 7, {}], "a string"),
        ("dataset", [None, 7], "a string"),
        ("pixel_agg", [7, True, []], "a string or null"),
        ("cls_token", ["true", 1, 0, None], "true or false"),
        ("data", [None, 7, [], True], "an object or a string"),
        ("dtype", [None, 32], "a string"),
        ("protocol", [None, 2.1, 2, ["2.1"]], "a string"),
        ("layers", [None, 7, "2", {}, [], True], "an array of distinct integers, at least one"),
    ],
)
def test_types_are_strict(key, values, rule):
    for value in values:
        (problem,) = problems_of({**GOOD, key: value})
        assert problem.loc == (key,), value
        assert problem.message.endswith(f"it must be {rule}")


def test_layers_are_distinct_64_bit_integers_and_each_wrong_one_is_named():
    found = problems_of({**GOOD, "layers": [2, "5", 2, 5.0, True, None, 2**63, -(2**63) - 1, 11]})
    assert [p.loc for p in found] == [("layers", i) for i in (1, 2, 3, 4, 5, 6, 7)]
    assert "each layer may occur once" in found[1].message
    assert "an integer of 64 bits" in found[0].message
    assert parse({**GOOD, "layers": [-(2**63), 2**63 - 1], "max_tokens_per_shard": 10}).layers[0] == -(2**63)


def test_a_million_wrong_layers_make_a_short_error():
    found = problems_of({**GOOD, "layers": ["x"] * 1_000_000})
    assert len(found) == 20


def test_all_problems_are_reported_at_once():
    bad = {**GOOD, "n_examples": "7", "d_model": 8.5, "cls_token": "true", "layers": [2, 2]}
    del bad["ckpt"]
    found = problems_of(bad)
    assert {p.loc for p in found} == {("n_examples",), ("d_model",), ("cls_token",), ("layers", 1), ("ckpt",)}
    with pytest.raises(DocumentError, match=r"5 problems: \(1\) .*\(5\) .* The rules are those of protocol 2\.1"):
        parse(bad)


def test_the_budget_must_hold_one_example():
    (problem,) = problems_of({**GOOD, "max_tokens_per_shard": 14})
    assert problem.loc == ("max_tokens_per_shard",)
    assert "15 vectors" in problem.message
    assert "Use at least 15" in problem.message
    old = doc(IMAGE_KEYS, "1.0.0") | {"max_patches_per_shard": 14}
    assert "max_patches_per_shard is 14" in problems_of(old)[0].message
    assert parse({**GOOD, "max_tokens_per_shard": 15}).layout.examples_per_shard == 1


def test_the_tensor_must_fit_into_63_bits():
    (problem,) = problems_of({**GOOD, "n_examples": 2**62, "d_model": 2**20})
    assert problem.kind == "layout"
    assert "below 2^63" in problem.message


def test_data_is_opaque_and_may_hold_what_python_writes():
    raw = json.dumps({**GOOD, "data": {"a": float("nan"), "b": [float("inf")], "c": 10**400, "d": "\ud800"}}).encode()
    meta = parse(raw)
    assert meta.data["c"] == 10**400
    assert [p.kind for p in meta.problems] == ["unusual_data"]
    assert len(meta.hash) == 8
    assert set(map(len, meta.hashes.values())) == {64, 8}


def test_a_path_with_half_a_surrogate_pair_opens():
    raw = json.dumps({**GOOD, "dataset": "/data/\udcff"}).encode()
    meta = parse(raw)
    assert meta.dataset == "/data/\udcff"
    assert len(meta.hash) == 8
    with pytest.raises(DocumentError, match="half a surrogate pair"):
        parse(json.dumps({**GOOD, "\udcff": 1}).encode())


def test_unknown_keys_are_kept_and_count_in_the_hash():
    more = {"note": [1, {"b": 2, "a": 1}], "model_dump": 3, "__class__": "X", "copy": None}
    meta = parse({**GOOD, **more})
    assert meta.extra == more
    assert meta.keys[-4:] == tuple(more)
    assert meta.hash != parse(GOOD).hash
    assert meta.layers == (2, 5, 11)
    assert meta.problems == ()


def test_documents_are_frozen_comparable_and_picklable():
    meta = parse(GOOD)
    with pytest.raises(AttributeError):
        meta.raw = b""
    with pytest.raises(AttributeError):
        meta.ckpt = "other"
    same = pickle.loads(pickle.dumps(meta))
    assert same == meta == copy.deepcopy(meta)
    assert hash(same) == hash(meta)
    assert same.hash == meta.hash
    assert meta != parse({**GOOD, "ckpt": "other"})


def test_changing_the_data_that_was_handed_out_does_not_change_the_hash():
    meta = parse(SPELLINGS["2025-10-03"][0])
    before = parse(SPELLINGS["2025-10-03"][0]).hash
    meta.data["root"] = "changed"
    assert meta.hash == before


# -- spellings mixed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "theirs"),
    [
        ({**doc(IMAGE_KEYS, "1.0.0"), "n_ex": 7}, "n_ex"),
        ({**doc(EX_KEYS, "2.0"), "n_imgs": 7}, "n_imgs"),
        ({**doc(EX_KEYS, "2.0"), "n_examples": 7}, "n_examples"),
        ({**GOOD, "patches_per_ex": 4}, "patches_per_ex"),
        ({**GOOD, "n_content_tokens_per_example": 4}, "n_content_tokens_per_example"),
        ({**doc(N_CONTENT_KEYS, "2.0", dataset=""), "d_vit": 4}, "d_vit"),
    ],
)
def test_keys_of_two_generations_are_refused_and_both_named(document, theirs):
    (problem,) = problems_of(document)
    assert problem.kind == "mixed_spellings"
    assert problem.loc == (theirs,)
    mine, _, other = problem.message.partition("), and ")
    assert f'"{theirs}"' in other
    assert "keys of two generations" in mine
    assert "protocol" in mine
    assert "protocol" in other


def test_a_key_under_the_name_of_another_generation_is_a_mixture_not_an_alias():
    document = doc(IMAGE_KEYS, "1.0.0")
    document["n_examples"] = document.pop("n_imgs")
    found = problems_of(document)
    assert {p.kind for p in found} == {"mixed_spellings", "missing_key"}


@pytest.mark.parametrize(
    ("keys", "protocol"), [(IMAGE_KEYS, "2.0"), (IMAGE_KEYS, "2.7"), (TOKEN_KEYS, "1.1"), (N_CONTENT_KEYS, "1.0.0")]
)
def test_keys_of_one_major_version_under_another_are_refused(keys, protocol):
    found = problems_of(doc(keys, protocol, dataset=""))
    assert [p.loc for p in found] == [("protocol",)]
    assert repr(protocol) in found[0].message


def test_a_document_without_any_known_key_lists_what_is_missing():
    found = problems_of({"protocol": "2.1"})
    assert len(found) == 11
    assert all(p.kind == "missing_key" for p in found)
    assert {p.kind for p in problems_of({})} == {"missing_key"}


# -- protocol and dtype ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol",
    ["9.9", "3.0", "3.0.0", "0.9", "10.0", "", "two", "2", "v2.1", "2.1 ", "2.1rc1", "2.", "02.1", "2.1.1.1.1", "٢.١"]
    + ["2." + "9" * 5000, "9" * 5000 + ".0"],
)
@pytest.mark.parametrize("as_errors", [False, True])
def test_unknown_protocols_are_refused_after_a_breaking_warning(protocol, as_errors):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error" if as_errors else "always")
        (problem,) = problems_of({**GOOD, "protocol": protocol}, UnknownProtocolError)
    assert problem.kind == "unknown_protocol"
    assert problem.loc == ("protocol",)
    assert len(problem.message) < 400
    assert [w.category for w in caught] == ([] if as_errors else [BreakingProtocolWarning])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "<f4", "float64", ""])
def test_other_dtypes_are_refused_after_a_breaking_warning(dtype):
    with pytest.warns(BreakingProtocolWarning, match="dtype"):
        (problem,) = problems_of({**GOOD, "dtype": dtype}, UnknownProtocolError)
    assert problem.loc == ("dtype",)
    assert repr(dtype) in problem.message
    assert "float32" in problem.message


def test_unknown_protocol_and_dtype_are_reported_together():
    with pytest.warns(BreakingProtocolWarning):
        found = problems_of({**GOOD, "dtype": "float16", "protocol": "3.0"}, UnknownProtocolError)
    assert [p.loc for p in found] == [("protocol",), ("dtype",)]


@pytest.mark.parametrize(
    ("keys", "protocol", "since"),
    [
        (IMAGE_KEYS, "1.4", "2025-09-15"),
        (IMAGE_KEYS, "1.0", "2025-09-15"),
        (IMAGE_KEYS, "1.0.1", "2025-09-15"),
        (EX_KEYS, "1.2", "2025-10-02"),
        (EX_KEYS, "2.7", "2025-10-03"),
        (N_CONTENT_KEYS, "2.7", "2025-10-07"),
        (TOKEN_KEYS, "2.7", "2025-10-13"),
        (TOKEN_KEYS, "2.1.5", "2025-10-13"),
    ],
)
def test_an_unknown_minor_version_opens_with_a_warning(keys, protocol, since):
    data = "gASV" if since == "2025-10-13" else OBJECT
    with pytest.warns(SaevStoreWarning, match=r"store/metadata\.json.*minor version that is not known"):
        meta = parse(doc(keys, protocol, data=data, dataset="/data", shiny_new_key=1))
    assert (meta.protocol, meta.version.since, meta.n_examples) == (protocol, since, 7)
    assert [(p.kind, p.severity) for p in meta.problems] == [("unknown_minor", "warning")]
    assert meta.extra == {"shiny_new_key": 1}


def test_warnings_point_at_the_caller():
    """Not at a frame of the package, however deep the document is read in it."""
    with pytest.warns(SaevStoreWarning) as caught:
        parse({**GOOD, "protocol": "2.7"})
    with pytest.warns(BreakingProtocolWarning) as refused, pytest.raises(UnknownProtocolError):
        parse({**GOOD, "protocol": "9.9"})
    assert (caught[0].filename, refused[0].filename) == (__file__, __file__)


def test_warnings_of_an_opened_store_point_at_who_opened_it(tmp_path):
    plain = plain_store(tmp_path)
    file = plain.path / "metadata.json"
    text = file.read_text()
    file.write_text(text.replace('"2.0"', '"2.7"'))
    with pytest.warns(SaevStoreWarning) as caught:
        opened, line = ShardStore.open(plain.path), inspect.currentframe().f_lineno
    assert opened.metadata.protocol == "2.7"
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, line)}
    file.write_text(text.replace('"2.0"', '"9.7"'))
    with pytest.warns(BreakingProtocolWarning) as refused, pytest.raises(UnknownProtocolError):
        ShardStore.open(plain.path)
    assert {warning.filename for warning in refused} == {__file__}


def test_a_known_protocol_with_keys_that_it_never_had_opens_with_a_problem():
    meta = parse(doc(EX_KEYS, "2.1", dataset="/data"))
    assert [(p.kind, p.severity) for p in meta.problems] == [("unusual_protocol", "warning")]


@pytest.mark.parametrize(("name", "data"), [("2025-10-03", "gASV"), ("2025-09-15", "x"), ("2025-10-14", OBJECT)])
def test_data_of_the_other_kind_opens_with_a_problem(name, data):
    meta = parse({**SPELLINGS[name][0], "data": data})
    assert meta.data == data
    (problem,) = meta.problems
    assert (problem.kind, problem.severity, problem.loc) == ("unusual_data", "warning", ("data",))


# -- the order of layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "in_order"),
    [
        ([5], True),
        ([-2], True),
        ([2, 5, 11], True),
        ([-3, -2, -1], True),
        ([3, 7, -1], True),
        ([11, 2], False),
        ([-1, -2], False),
        ([-1, 0], False),
        ([5, -3, 2], False),
        ([3, -2], None),
        ([-2, 3], None),
    ],
)
def test_layers_out_of_depth_order_are_worth_a_problem(layers, in_order):
    assert depth_order(tuple(layers)) is in_order
    meta = parse({**GOOD, "layers": layers})
    assert meta.layers == tuple(layers)
    found = [(p.kind, p.severity, p.loc) for p in meta.problems]
    assert found == ([] if in_order else [("layer_order", "warning", ("layers",))])
    if meta.problems:
        assert str(layers) in meta.problems[0].message
        assert ("depends on its depth" in meta.problems[0].message) == (in_order is None)


@given(st.integers(1, 20), st.data())
def test_depth_order_agrees_with_every_depth_it_is_sure_for(depth, data):
    labels = list(range(-depth, depth))
    layers = data.draw(st.lists(st.sampled_from(labels), unique_by=lambda label: label % depth, min_size=1))
    positions = [label % depth for label in layers]
    verdict = depth_order(tuple(layers))
    if verdict is not None:
        assert verdict == (positions == sorted(positions))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_document_must_be_an_object():
    for raw in (b"[]", b"7", b'"x"', b"null", b"true"):
        (problem,) = problems_of(raw)
        assert "it must be an object" in problem.message


def test_a_file_that_is_too_large_is_not_looked_at():
    (problem,) = problems_of(b" " * (METADATA_MAX_NBYTES + 1))
    assert str(METADATA_MAX_NBYTES) in problem.message


def test_bytes_are_asked_for():
    for wrong in ("{}", None, bytearray(b"{}")):
        with pytest.raises(ArgumentError, match="pass the bytes of the file"):
            parse_metadata(wrong, where="metadata.json")
