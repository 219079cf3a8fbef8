"""JSON from strangers: what is refused, with which words, and that refusing is cheap."""

import json
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.documents import _parse
from saev_store.errors import DocumentError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def loads(raw):
    return _parse.parse_json(raw, where="x.json", max_nbytes=1 << 20)


def refused(raw, match):
    with pytest.raises(DocumentError, match=match) as caught:
        loads(raw)
    assert caught.value.where == "x.json"
    assert caught.value.remedy
    assert caught.value.problems


@given(JSON, st.booleans(), st.sampled_from([None, 2]))
def test_json_round_trips(value, ascii_only, indent):
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert loads(raw) == value


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "it is empty"),
        (b" \n\t", "it is empty"),
        (bytes(401), "nothing but 401 zero bytes"),
        (b'{"a": 1', r"line 1, column 8 \(character 7 of 7\); it looks cut off.*copy it again"),
        (b'{"a": 1}}', r"Extra data at line 1, column 9"),
        (b'{"a": 1,}', r"not JSON.*line 1"),
        (b"{'a': 1}", r"not JSON.*column 2"),
        (b'{"a": "x\ny"}', r"Invalid control character"),
        (b'{"a": "\\u12"}', r"not JSON"),
        (b'{"a": \xff}', r"byte 6 \(0xff\) is not UTF-8"),
        (b"\xff\xfe{\0}\0", r"byte 0 \(0xff\) is not UTF-8.*save it as UTF-8"),
        ('{"a": "\ud800"}'.encode("utf-8", "surrogatepass"), "is not UTF-8"),
        (b'{"a": 1, "b": 2, "a": 3}', r"'a' occurs twice.*Remove the value"),
        (b'{"x": {"b": 1, "b": 1}}', r"'b' occurs twice"),
        (b'{"a": 1, "\\u0061": 3}', r"'a' occurs twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"more than 4300 digits"),
        (b'{"a": -' + b"9" * 5000 + b"}", r"more than 4300 digits"),
        (b"[" * 65 + b"]" * 65, r"more than 64 levels"),
        (b"[" * 500_000, r"more than 64 levels"),
        (b'{"a":' * 100_000, r"more than 64 levels"),
        (b'{"a":[' * 40 + b"]}" * 40, r"more than 64 levels"),
        (b" " * (1 << 20) + b"1", r"has 1048577 bytes; such a document has at most 1048576"),
        (b"nul", "not JSON"),
        (b"[1 2]", "not JSON"),
        (b"NaNs", "not JSON"),
    ],
)
def test_each_kind_of_broken_json_has_its_message(raw, match):
    refused(raw, match)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"\xef\xbb\xbf[1]", [1]),
        (b"[" * 64 + b"]" * 64, None),
        (b'["' + b"[" * 1000 + b'"]', ["[" * 1000]),
        (b'["\\"' + b"[" * 1000 + b'"]', ['"' + "[" * 1000]),
        (b'["' + b"[" * 100 + b'","' + b"]" * 100 + b'"]', ["[" * 100, "]" * 100]),
        (b'["\\\\", "' + b"{" * 99 + b'"]', ["\\", "{" * 99]),
        (b"[" + b"[]," * 1000 + b"{}]", [[]] * 1000 + [{}]),
        (b"[Infinity, -Infinity, 1e999]", [float("inf"), -float("inf"), float("inf")]),
        (b"[" + b"9" * 4300 + b"]", [10**4300 - 1]),
        (b'["' + b"9" * 5000 + b'"]', ["9" * 5000]),
    ],
)
def test_odd_but_valid_json_is_read(raw, value):
    found = loads(raw)
    assert value is None or found == value


@pytest.mark.parametrize("raw", [b"[}" * 500, b"[" * 64 + b"}" * 10, b"]" * 500, b'{"a": "' + b"[" * 500, b'["\\'])
def test_brackets_that_do_not_match_are_a_syntax_error_not_a_deep_document(raw):
    refused(raw, "it is not JSON")


def nesting(value):
    if isinstance(value, dict | list):
        return 1 + max(map(nesting, value.values() if isinstance(value, dict) else value), default=0)
    return 0


@given(
    JSON | st.recursive(st.just([]), lambda x: st.builds(lambda v: [v], x) | st.builds(lambda v: {'"]': v}, x)),
    st.integers(1, 6),
)
def test_the_depth_is_measured_exactly(value, limit):
    raw = json.dumps([value] * 7).encode()
    before, _parse.MAX_DEPTH = _parse.MAX_DEPTH, limit
    try:
        _parse.parse_json(raw, where="x", max_nbytes=len(raw))
        refused = False
    except DocumentError as error:
        refused = f"{limit} levels" in str(error)
    finally:
        _parse.MAX_DEPTH = before
    assert refused == (nesting([value]) > limit)


def test_depth_does_not_rest_on_the_limits_of_the_interpreter():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        refused(b"[" * 1_000_000, "64 levels")
    finally:
        sys.setrecursionlimit(before)


def test_numbers_are_bounded_even_where_the_interpreter_does_not_bound_them():
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        refused(b"[" + b"9" * 1_000_000 + b"]", "more than 4300 digits")
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 900_000,
        b"{" * 900_000,
        b'"' * 900_000,
        b'"\\' * 450_000,
        b'["\\"' * 200_000,
        b'["["' * 200_000,
        b'["[\\"]"]' * 100_000,
        b"[}" * 450_000,
    ]
    + [b'{"a":0' + b',"a":0' * 150_000 + b"}", b"9" * 900_000, b"\\" * 900_000, b"[" + b"[]," * 300_000],
    ids=lambda raw: repr(raw[:8]),
)
def test_refusing_a_hostile_document_takes_memory_in_proportion_to_it(raw):
    tracemalloc.start()
    try:
        with pytest.raises(DocumentError):
            loads(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(raw) + (1 << 16)


@pytest.mark.parametrize("n_digits", [4299, 4300])
def test_numbers_of_as_many_digits_as_are_allowed(n_digits):
    assert loads(b"[" + b"9" * n_digits + b"]") == [10**n_digits - 1]


@pytest.mark.parametrize(("n", "n_named", "n_shown"), [(1, 1, 1), (8, 8, 8), (9, 9, 8), (100, 100, 8), (150, 100, 8)])
def test_as_many_keys_that_occur_twice_are_named(n, n_named, n_shown):
    raw = "{" + ", ".join(f'"k{i}": 0, "k{i}": 1' for i in range(n)) + "}"
    with pytest.raises(DocumentError) as caught:
        loads(raw.encode())
    assert [(p.kind, p.message) for p in caught.value.problems] == [
        ("duplicate_key", f"the key 'k{i}' occurs twice in one object") for i in range(n_named)
    ]
    assert caught.value.message.count("occurs twice") == n_shown
    assert caught.value.remedy == "Remove the value that is wrong."


def test_a_long_key_that_occurs_twice_is_cut():
    with pytest.raises(DocumentError) as caught:
        loads(b'{"' + b"k" * 1000 + b'": 0, "' + b"k" * 1000 + b'": 1}')
    assert caught.value.problems[0].message == f"the key '{'k' * 80}' occurs twice in one object"


def test_the_limit_of_digits_is_that_of_the_interpreter_where_it_is_lower():
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert loads(b"[" + b"9" * 640 + b"]") == [10**640 - 1]
        refused(b"[" + b"9" * 641 + b"]", "more than 640 digits")
    finally:
        sys.set_int_max_str_digits(before)
