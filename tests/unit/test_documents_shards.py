"""shards.json and labels.bin: what agrees with the metadata opens, everything else is named."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.layout import Layout
from saev_store.core.token_arrays import LABELS
from saev_store.documents import (
    COUNT_KEYS,
    new_metadata,
    parse_shards,
    parse_token_array_size,
    shards_bytes,
)
from saev_store.errors import ArgumentError, DocumentError, UnsafeContentError


def metadata(n_examples=7, capacity=3, protocol="2.0"):
    return new_metadata(
        protocol=protocol,
        family="clip",
        ckpt="b",
        layers=[2, 5],
        content_tokens_per_example=4,
        cls_token=True,
        d_model=8,
        n_examples=n_examples,
        max_tokens_per_shard=capacity * 10,
    )


META = metadata()


def entries(*counts, key="n_ex"):
    return [{"name": f"acts{i:06d}.bin", key: count} for i, count in enumerate(counts)]


def parse(contents, meta=META):
    raw = contents if isinstance(contents, bytes) else json.dumps(contents).encode()
    return parse_shards(raw, meta, where="store/shards.json")


def problems_of(contents, meta=META):
    with pytest.raises(DocumentError) as caught:
        parse(contents, meta)
    assert str(caught.value).startswith("store/shards.json: ")
    assert caught.value.remedy
    return caught.value.problems


@given(
    n_examples=st.integers(1, 60),
    capacity=st.integers(1, 20),
    protocol=st.sampled_from(["1.0.0", "2.0", "2.1"]),
    trailing=st.booleans(),
)
def test_what_is_written_is_what_json_writes_and_is_read_back(n_examples, capacity, protocol, trailing):
    meta = metadata(n_examples, capacity, protocol)
    raw = shards_bytes(meta.layout, meta.count_key, trailing_empty=trailing)
    full, rest = divmod(n_examples, capacity)
    counts = [capacity] * full + [rest] * (rest > 0) + [0] * trailing
    assert raw == json.dumps(entries(*counts, key=meta.count_key), indent=2).encode()
    index = parse(raw, meta)
    assert index.counts.tolist() == counts
    assert not index.counts.flags.writeable
    assert (index.n_listed, index.trailing_empty, index.raw) == (len(counts), trailing, raw)
    assert index.names == tuple(f"acts{i:06d}.bin" for i in range(len(counts)))
    assert (index.problems, index.layout, index.count_key) == ((), meta.layout, meta.count_key)


@given(
    n_examples=st.integers(1, 12),
    capacity=st.integers(1, 5),
    counts=st.lists(st.integers(-1, 6), min_size=1, max_size=8),
)
def test_counts_are_accepted_exactly_if_they_follow_from_the_metadata(n_examples, capacity, counts):
    meta = metadata(n_examples, capacity)
    left, follows = n_examples, True
    for count in counts:  # The plain reading of the rule: fill each shard before the next one.
        follows &= count == min(left, capacity)
        left -= min(left, capacity)
    follows &= left == 0
    if follows:
        assert parse(entries(*counts), meta).counts.tolist() == counts
    else:
        assert problems_of(entries(*counts), meta)


@pytest.mark.parametrize(
    ("counts", "messages"),
    [
        ((3, 3, 0), ["entry 2 counts 0 examples; the last shard holds the remaining 1 of 7", "sum to 6; the metadata says 7"]),
        ((3, 2, 2), ["entry 1 counts 2 examples; every shard but the last one is full, with 3", "entry 2 counts 2"]),
        ((3, 4), ["entry 1 counts 4 examples; a shard holds at most 3", "lists 2 shards; 7 examples need 3 of 3"]),
        ((7,), ["entry 0 counts 7 examples; a shard holds at most 3", "lists 1 shards"]),
        ((3, 3, 1, 1), ["entry 3 counts 1 examples; all 7 examples of the metadata lie in the 3 shards", "sum to 8"]),
        ((3, 3, -1, 2), ["entry 2 counts -1 examples; a count cannot be negative", "entry 3 counts 2"]),
        ((3, 3), ["lists 2 shards; 7 examples need 3", "sum to 6"]),
        ((3, 3, 2**63), ['entry 2: "n_ex" is 9223372036854775808 (an integer); it must fit into 63 bits']),
        ((3, 3, 10**300), ['entry 2: "n_ex" is an integer of 997 bits']),
    ],
)  # fmt: skip
def test_wrong_counts_are_named_together(counts, messages):
    found = problems_of(entries(*counts))
    for message in messages:
        assert any(message in problem.message for problem in found), message
    assert all(problem.where == "store/shards.json" for problem in found)


@pytest.mark.parametrize("value", [True, 3.0, "3", None, [3]])
def test_counts_are_integers(value):
    (problem,) = problems_of(entries(3, value, 1))
    assert problem.loc == (1, "n_ex")
    assert "it must be an integer" in problem.message


@pytest.mark.parametrize(
    "name",
    ["../../outside.bin", "/etc/passwd", "..", ".", "sub/acts000001.bin", "..\\acts000001.bin", "C:acts000001.bin"]
    + ["s3://bucket/acts000001.bin", "acts000001.bin\0", "./acts000001.bin"],
)  # fmt: skip
def test_names_that_leave_the_folder_are_unsafe(name):
    bad = entries(3, 3, 1)
    bad[1]["name"] = name
    with pytest.raises(UnsafeContentError, match=r"shards\.json.*entry 1.*leads out.*acts000001\.bin") as caught:
        parse(bad)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "name", ["acts000002.bin", "acts1.bin", "acts00001.bin", "ACTS000001.BIN", "", " acts000001.bin", 1, None, ["x"]]
)
def test_names_are_those_of_their_position(name):
    bad = entries(3, 3, 1)
    bad[1]["name"] = name
    (problem,) = problems_of(bad)
    assert problem.loc == (1, "name")
    assert 'it must be "acts000001.bin"' in problem.message


def test_duplicate_and_shuffled_names_are_refused():
    good = entries(3, 3, 1)
    assert len(problems_of([good[1], good[0], good[2]])) == 2
    assert [p.loc for p in problems_of([good[0], good[0] | {"n_ex": 3}, good[2]])] == [(1, "name")]


def test_everything_wrong_with_entries_is_reported_at_once():
    found = problems_of(
        [
            7,
            {"name": "acts000001.bin", "n_ex": 3},
            {"n_ex": 3},
            {"name": "acts000003.bin"},
            {"name": "acts000004.bin", "n_ex": 1, "n_imgs": 1},
            {"name": "acts000005.bin", "n_imgs": 1},
        ]
    )
    assert [p.loc for p in found] == [(0,), (2, "name"), (3, "n_ex"), (4, "n_ex"), (5, "n_imgs")]
    assert [p.kind for p in found] == ["wrong_type", "missing_key", "missing_key", "mixed_spellings", "mixed_spellings"]


@pytest.mark.parametrize("raw", [b"{}", b"7", b"null", b'"acts000000.bin"'])
def test_the_document_must_be_an_array(raw):
    (problem,) = problems_of(raw)
    assert "it must be an array of shards" in problem.message


def test_an_empty_list_is_refused():
    assert "lists no shards" in problems_of([])[0].message


def test_the_key_of_another_generation_opens_with_a_problem():
    for key in COUNT_KEYS:
        index = parse(entries(3, 3, 1, key=key))
        assert index.count_key == key
        assert [(p.kind, p.severity) for p in index.problems] == ([] if key == "n_ex" else [("count_key", "warning")])


def test_unknown_keys_of_an_entry_are_ignored():
    assert parse([entry | {"sha256": "ab", "note": {"x": [1]}} for entry in entries(3, 3, 1)]).counts.tolist() == [
        3,
        3,
        1,
    ]


def test_many_problems_make_a_short_error():
    meta = metadata(n_examples=300_000, capacity=3)
    many = [{"name": "x", "n_ex": -1}] * 100_000
    with pytest.raises(DocumentError, match=r"and 92 more; 99900 more entries were not looked at") as caught:
        parse(many, meta)
    assert len(str(caught.value)) < 2000
    assert len(caught.value.problems) == 101
    assert caught.value.problems[-1].kind == "more_problems"
    with pytest.raises(DocumentError, match=r"more wrong counts were not looked at") as caught:
        parse(entries(*[2] * 100_000), meta)
    assert len(caught.value.problems) <= 102


def test_a_list_much_longer_than_the_metadata_asks_for_is_not_parsed():
    with pytest.raises(DocumentError, match=r"has \d+ bytes; such a document has at most 68608"):
        parse(entries(3, 3, 1, *[0] * 3000))


def test_more_than_a_million_shards():
    meta = metadata(n_examples=1_000_001, capacity=1)
    index = parse(shards_bytes(meta.layout, meta.count_key), meta)
    assert index.names[-1] == "acts1000000.bin"
    assert int(index.counts.sum()) == 1_000_001
    assert index.counts.dtype == np.int64


def test_no_memory_follows_the_number_of_shards_that_the_metadata_claims():
    meta = metadata(n_examples=2**40, capacity=1)
    tracemalloc.start()
    try:
        with pytest.raises(DocumentError, match="it lists 1 shards; 1099511627776 examples need 1099511627776"):
            parse(entries(1), meta)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_writing_is_bounded_and_checks_its_key():
    layout = Layout(2**40, (0,), 1, False, 1, 1)
    with pytest.raises(ArgumentError, match=r"max_tokens_per_shard: 1099511627776 shards .*larger budget"):
        shards_bytes(layout, "n_ex")
    with pytest.raises(ArgumentError, match=r"count_key is 'n'.*\"n_imgs\", \"n_ex\", \"n_examples\""):
        shards_bytes(META.layout, "n")


# -- labels.bin --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 100), st.integers(1, 100), st.booleans(), st.integers(0, 20_000))
def test_the_size_of_labels_is_exact(n_examples, tokens, cls_token, nbytes):
    layout = Layout(n_examples, (2, 5), tokens, cls_token, 8, 3)
    assert LABELS.nbytes(layout) == n_examples * tokens
    assert parse_token_array_size(n_examples * tokens, LABELS, layout, where="labels.bin") == (n_examples, tokens)
    if nbytes != n_examples * tokens:
        with pytest.raises(DocumentError):
            parse_token_array_size(nbytes, LABELS, layout, where="labels.bin")


@pytest.mark.parametrize(
    ("nbytes", "match"),
    [
        (27, r"labels\.bin: it has 27 bytes; 7 examples x 4 content tokens of one byte are 28\. It is cut off"),
        (0, "cut off"),
        (35, "column for CLS.*without the first column"),
        (56, "repeats the labels for every layer.*once"),
        (29, "of another store"),
        (28 * 8, "of one byte each"),
    ],
)
def test_a_wrong_size_of_labels_says_what_may_have_happened(nbytes, match):
    with pytest.raises(DocumentError, match=match) as caught:
        parse_token_array_size(nbytes, LABELS, META.layout, where="labels.bin")
    assert caught.value.problems[0].kind == "labels_size"
