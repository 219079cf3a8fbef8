"""Documents of protocol 3.0: what they say, what they refuse, and that nothing is written as 3.0 that 2.0 can say."""

from __future__ import annotations

import json

import pytest

from saev_store.core.token_arrays import TokenArray
from saev_store.documents import content_hashes, new_metadata, parse_metadata
from saev_store.errors import ArgumentError, DocumentError, UnknownProtocolError

PLAIN = {
    "family": "gpt2", "ckpt": "gpt2", "layers": [0, 3], "content_tokens_per_example": 4, "cls_token": True, "d_model": 8,
    "n_examples": 7, "max_tokens_per_shard": 50,
}  # fmt: skip
NEW = {
    "dtype": "bfloat16",
    "hook_points": ["resid_mid", "resid_post"],
    "token_arrays": {"token_ids": "int32", "mask": "bool"},
    "text": {"layout": "stream", "tokenizer": {"name": "gpt2", "digest": "0" * 64}, "bos": False},
}
#: By hand: the keys of 2.1 and those that protocol 3.0 adds.
DOCUMENT = {
    **PLAIN,
    "data": {},
    "dataset": "",
    "hook_points": ["resid_mid", "resid_post"],
    "token_arrays": [{"name": "token_ids", "dtype": "int32"}, {"name": "mask", "dtype": "bool"}],
    "text": NEW["text"],
    "spec": "saev_store",
    "dtype": "bfloat16",
    "protocol": "3.0",
}


def parse(**changes):
    document = {**DOCUMENT, **changes}
    raw = json.dumps({key: value for key, value in document.items() if value is not ...}).encode()
    return parse_metadata(raw, where="metadata.json")


def test_a_new_document_says_all_of_it():
    meta = new_metadata(**PLAIN, **NEW)
    assert json.loads(meta.raw) == DOCUMENT
    assert meta.hash == content_hashes(DOCUMENT)["sorted-ascii"]
    assert (meta.dtype, meta.hook_points, meta.count_key) == ("bfloat16", ("resid_mid", "resid_post"), "n_examples")
    assert meta.token_arrays == (TokenArray("token_ids", "int32"), TokenArray("mask", "bool"))
    assert meta.text == NEW["text"]
    assert (meta.extra, meta.problems) == ({}, ())
    assert (meta.layout.itemsize, meta.layout.vector_nbytes, meta.layout.nbytes) == (2, 16, 7 * 2 * 5 * 8 * 2)


@pytest.mark.parametrize("name", NEW)
def test_each_new_thing_makes_it_3_0(name):
    assert new_metadata(**PLAIN, **{name: NEW[name]}).protocol == "3.0"
    with pytest.raises(ArgumentError, match=f'2.0 cannot hold "{name}"'):
        new_metadata(**PLAIN, protocol="2.0", **{name: NEW[name]})


def test_what_2_0_can_say_is_written_as_2_0():
    assert new_metadata(**PLAIN, hook_points=["resid_post"] * 2, token_arrays={}).raw == new_metadata(**PLAIN).raw
    assert new_metadata(**PLAIN).protocol == "2.0"
    with pytest.raises(ArgumentError, match="only where 2.0 cannot"):
        new_metadata(**PLAIN, protocol="3.0")


@pytest.mark.parametrize("spec", [..., "other", 1, None])
def test_another_projects_version_3_is_refused(spec):
    with pytest.warns(UserWarning, match="breaking"), pytest.raises(UnknownProtocolError, match="another project"):
        parse(spec=spec)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "<f2"])
def test_other_dtypes_are_refused(dtype):
    with pytest.warns(UserWarning, match="breaking"), pytest.raises(UnknownProtocolError, match="holds .*bfloat16"):
        parse(dtype=dtype)


def test_sixteen_bits_in_an_older_version_are_refused():
    with pytest.warns(UserWarning, match="breaking"), pytest.raises(UnknownProtocolError, match="unknown|2.x hold"):
        parse(protocol="2.1")


@pytest.mark.parametrize(
    "changes",
    [
        {"hook_points": ["resid_mid"]},
        {"hook_points": []},
        {"hook_points": ["a b", "c"]},
        {"hook_points": [1, 2]},
        {"hook_points": "resid_mid"},
        {"layers": [3, 3], "hook_points": ...},
        {"layers": [3, 3], "hook_points": ["attn_out", "attn_out"]},
        {"token_arrays": {"token_ids": "int32"}},
        {"token_arrays": [{"name": "token_ids"}]},
        {"token_arrays": [{"name": "token_ids", "dtype": "int32", "more": 1}]},
        {"token_arrays": [{"name": "token_ids", "dtype": "int64"}]},
        {"token_arrays": [{"name": "mask", "dtype": "uint8"}]},
        {"token_arrays": [{"name": "x", "dtype": "complex64"}]},
        {"token_arrays": [{"name": "x", "dtype": ["int32"]}]},
        {"token_arrays": [{"name": "x", "dtype": "int32"}, {"name": "x", "dtype": "bool"}]},
        {"token_arrays": [{"name": "acts000000", "dtype": "int32"}]},
        {"token_arrays": [{"name": "../x", "dtype": "int32"}]},
        {"token_arrays": [{"name": "X", "dtype": "int32"}]},
        {"token_arrays": [{"name": "", "dtype": "int32"}]},
        {"token_arrays": [{"name": f"a{i}", "dtype": "bool"} for i in range(65)]},
        {"text": {"layout": "pages"}},
        {"text": {"layout": "window", "bos": 1}},
        {"text": "window"},
        {"text": {"layout": ["window"]}},
    ],
)
def test_what_breaks_a_rule_is_refused(changes):
    with pytest.raises(DocumentError) as caught:
        parse(**changes)
    assert caught.value.remedy
    is_geometry = "layers" in changes or changes == {"hook_points": ["resid_mid"]}
    (found,) = caught.value.problems
    assert (found.kind, found.loc) == ("layout" if is_geometry else "wrong_value", (next(iter(changes)),))
    assert next(iter(changes)) in found.message


@pytest.mark.parametrize(
    ("array", "why"),
    [
        ({"name": "token_ids", "dtype": "int64"}, "token_ids has dtype int64; arrays of that name are int32"),
        (
            {"name": "x", "dtype": "complex64"},
            "x has dtype 'complex64'; it must be one of bool, uint8, int32, int64, float32",
        ),
        ({"name": "X", "dtype": "int32"}, "'X' has a name that is not allowed"),
    ],
)
def test_why_an_array_is_refused_is_said(array, why):
    with pytest.raises(DocumentError) as caught:
        parse(token_arrays=[array])
    assert why in caught.value.problems[0].message


def test_all_that_is_wrong_is_said_at_once():
    wrong = {
        "token_arrays": [{"name": "X", "dtype": "int32"}], "hook_points": [1], "text": [], "layers": [0, "a"], "d_model": -1,
        "family": ...,
    }  # fmt: skip
    with pytest.raises(DocumentError) as caught:
        parse(**wrong)
    assert {problem.loc[0] for problem in caught.value.problems} == wrong.keys()


def test_what_is_at_the_end_of_a_rule_is_allowed():
    arrays = [{"name": f"a{i}", "dtype": "bool"} for i in range(64)]
    assert len(parse(token_arrays=arrays).token_arrays) == 64
    longest = ["a" * 128, "resid_mid"]
    assert parse(hook_points=longest).hook_points == tuple(longest)
    with pytest.raises(DocumentError):
        parse(hook_points=["a" * 129, "resid_mid"])
    for layout in ("window", "stream"):
        assert parse(text={"layout": layout, "more": 1}).text == {"layout": layout, "more": 1}
    assert parse(text=None).text is None
    assert parse(text=...).text is None
    assert parse(hook_points=None).hook_points is None
    assert parse(token_arrays=[]).token_arrays == ()


def test_a_layer_may_occur_with_several_hook_points():
    layout = parse(layers=[3, 3], hook_points=["attn_out", "mlp_out"]).layout
    assert layout.layer_keys == ((3, "attn_out"), (3, "mlp_out"))
    assert layout.layer_index((3, "mlp_out")) == 1
    with pytest.raises(Exception, match="2 hook points"):
        layout.layer_index(3)
