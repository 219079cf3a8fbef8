"""The recipes for a folder's name, against the libraries that the writers used."""

import hashlib
import json
import math

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saev_store.documents import RECIPES, VERSIONS, content_hashes, match_hash, new_metadata
from saev_store.documents.writing import known_names
from saev_store.errors import ArgumentError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
#: What orjson can write: 64-bit integers, finite floats, Unicode text.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
FLOATS = [1e16, 1e-7, 1e-5, 0.1, -0.0, 1.0, 5e-324, 1.7976931348623157e308, 123456789012345680.0, 1e21, 1e22, 1e15]


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


def as_dataclass_would(document):
    """Field order at the top, keys sorted below: what orjson's OPT_SORT_KEYS does to a dataclass."""
    inner = b",".join(
        orjson.dumps(key) + b":" + orjson.dumps(value, option=orjson.OPT_SORT_KEYS) for key, value in document.items()
    )
    return b"{" + inner + b"}"


@given(st.dictionaries(TEXT, VALUES, max_size=6))
@example({"z": FLOATS, "data": {"b": {"y": 1e16, "x": [{"d": 1, "c": 2}]}, "a": "h\xe9 \u2028 \U0001f600 \x7f \x00"}})
def test_hashes_equal_those_of_the_writers_libraries(document):
    found = content_hashes(document)
    assert tuple(found) == RECIPES
    ascii_form = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert found["sorted-ascii"] == sha256(ascii_form.encode("utf-8"))
    assert found["field-order"] == sha256(as_dataclass_would(document))
    assert found["field-order-8"] == found["field-order"][:8]


def test_both_spellings_of_large_floats_are_known_names():
    document = json.loads('{"a":"1e+16 \\" 1e+17","w":1e22,"x":[-1.5e300,1e-7,1E+5]}')
    newer = b'{"a":"1e+16 \\" 1e+17","w":1e+22,"x":[-1.5e+300,1e-7,100000.0]}'
    older = b'{"a":"1e+16 \\" 1e+17","w":1e22,"x":[-1.5e300,1e-7,100000.0]}'
    names = known_names(document)
    for form in (newer, older):
        assert names[sha256(form)] == "field-order"
        assert names[sha256(form)[:8]] == "field-order-8"
    assert len(names) == 5
    assert content_hashes(document)["field-order"] == sha256(newer)


def test_where_recipes_agree_the_first_one_is_named():
    document = {"a": 1, "b": [2.5]}  # in order, ASCII, no large float: the same bytes by two recipes
    hashes = content_hashes(document)
    assert hashes["sorted-ascii"] == hashes["field-order"]
    assert known_names(document) == {hashes["sorted-ascii"]: "sorted-ascii", hashes["field-order-8"]: "field-order-8"}


def test_a_real_dataclass_hashes_the_same():
    import dataclasses

    @dataclasses.dataclass
    class Written:
        family: str
        data: dict
        layers: tuple
        weight: float

    value = Written("clip", {"b": [1e16, {"z": 1, "a": 1e-7}], "a": "ü"}, (2, 5), 1e22)
    document = orjson.loads(orjson.dumps(value))
    assert content_hashes(document)["field-order"] == sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def test_order_counts_at_the_top_only_in_one_recipe():
    a, b = content_hashes({"x": 1, "y": {"p": 1, "q": 2}}), content_hashes({"y": {"q": 2, "p": 1}, "x": 1})
    assert a["sorted-ascii"] == b["sorted-ascii"]
    assert a["field-order"] != b["field-order"]
    assert content_hashes({"x": {"p": 1, "q": 2}}) == content_hashes({"x": {"q": 2, "p": 1}})


@pytest.mark.parametrize("odd", [math.nan, math.inf, 10**400, "\ud800", "a\udcffb"])
def test_what_only_some_writers_can_write_still_has_a_hash(odd):
    plain = content_hashes({"data": {"a": None}})
    assert all(content_hashes({"data": {"a": odd}})[recipe] for recipe in RECIPES)
    assert content_hashes({"data": {"a": odd}})["sorted-ascii"] != plain["sorted-ascii"]


@pytest.mark.parametrize("document", [{"a": object()}, {"a": {1: 2, "b": 3}}, {"a": b"x"}, {"a": {1, 2}}])
def test_what_is_not_json_has_none(document):
    with pytest.raises(ArgumentError, match="no JSON form"):
        content_hashes(document)


def test_a_cycle_is_an_argument_error():
    loop = []
    loop.append(loop)
    with pytest.raises(ArgumentError, match="no JSON form"):
        content_hashes({"a": loop})


@pytest.mark.parametrize("protocol", ["1.0.0", "2.0", "2.1"])
def test_match_names_the_recipe(protocol):
    meta = new_metadata(
        protocol=protocol,
        family="clip",
        ckpt="ü",
        layers=[0],
        content_tokens_per_example=1,
        cls_token=False,
        d_model=1,
        n_examples=1,
        max_tokens_per_shard=1,
    )
    for recipe, name in meta.hashes.items():
        assert match_hash(meta, name) == recipe
    for wrong in ("", "renamed", meta.hashes["field-order"][:7], meta.hash.upper() + "x", meta.hash[:-1]):
        assert match_hash(meta, wrong) is None
    assert meta.hash == meta.hashes["field-order-8" if protocol == "2.1" else "sorted-ascii"]
    assert meta.version in VERSIONS


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_the_field_order_has_null_for_numbers_that_json_lacks(text):
    """As the JSON writer of that recipe prints them."""
    document = json.loads(f'{{"protocol": "2.1", "data": {{"scale": [{text}]}}}}')
    expected = hashlib.sha256(b'{"protocol":"2.1","data":{"scale":[null]}}').hexdigest()
    assert content_hashes(document)["field-order"] == expected
    compact = f'{{"data":{{"scale":[{text}]}},"protocol":"2.1"}}'
    assert content_hashes(document)["sorted-ascii"] == hashlib.sha256(compact.encode()).hexdigest()


def test_half_a_surrogate_pair_is_hashed_as_the_bytes_that_utf_8_would_give_it():
    """No JSON library of this recipe writes one; the name only has to exist, and to differ."""
    hashes = content_hashes({"protocol": "2.1", "layers": [2, 5], "ckpt": "\ud800"})
    field_form = b'{"protocol":"2.1","layers":[2,5],"ckpt":"\xed\xa0\x80"}'
    assert hashes["field-order"] == hashlib.sha256(field_form).hexdigest()
    sorted_form = b'{"ckpt":"\\ud800","layers":[2,5],"protocol":"2.1"}'
    assert hashes["sorted-ascii"] == hashlib.sha256(sorted_form).hexdigest()
