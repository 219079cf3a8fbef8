"""What is said of some two hundred documents, right and wrong: kinds, places, words and remedies, one document a line.

tests/data/documents_judged.jsonl holds what the code said once. A change of what is said changes that file, where a reviewer sees it.
Of many problems it has the first two and the last one.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path, PurePosixPath
from unittest.mock import ANY

import numpy as np
import pytest

from saev_store.core.layout import Layout
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents import (
    VERSIONS,
    WrittenVersion,
    content_hashes,
    new_metadata,
    parse_json,
    parse_metadata,
    parse_shards,
    parse_token_array_size,
    shards_bytes,
)
from saev_store.documents import writing as writing_module
from saev_store.documents._parse import Findings, key_list, shown
from saev_store.documents.versions import _all_but
from saev_store.documents.writing import plain
from saev_store.errors import ArgumentError, DocumentError, SaevStoreError
from saev_store.problems import Problem

LINES = Path(__file__).parent.parent.joinpath("data/documents_judged.jsonl").read_text("ascii").splitlines()
CASES = [json.loads(line) for line in LINES]
META = new_metadata(
    family="clip", ckpt="b", layers=[2, 5], content_tokens_per_example=4, cls_token=True, d_model=8, n_examples=7,
    max_tokens_per_shard=30,
)  # fmt: skip


@pytest.mark.parametrize("room", ["metadata", "shards"])
def test_what_is_said_of_a_document(room: str):
    cases = [case for case in CASES if case["room"] == room]
    assert len(cases) > 50
    for case in cases:
        assert judged(case) == {key: value for key, value in case.items() if key not in {"room", "about", "raw"}}, case


def judged(case: dict[str, object]) -> dict[str, object]:
    raw, found = str(case["raw"]).encode(), {}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            if case["room"] == "metadata":
                meta = parse_metadata(raw, where="store/metadata.json")
                found, problems = {"since": meta.version.since}, meta.problems
            else:
                index = parse_shards(raw, META, where="store/shards.json")
                found, problems = {"counts": index.counts.tolist()}, index.problems
        except SaevStoreError as error:
            found = {name: getattr(error, name) for name in ("kind", "message", "remedy", "where")}
            found["error"] = type(error).__name__
            problems = error.problems if isinstance(error, DocumentError) else ()
    found["n_problems"] = len(problems)
    found["problems"] = [said(problem) for problem in problems]
    if len(problems) > 14:
        found["problems"] = [*map(said, problems[:2]), said(problems[-1])]
    if given:
        found["warnings"] = [[warning.category.__name__, str(warning.message)] for warning in given]
    return found


def said(problem: Problem) -> list[object]:
    return [problem.kind, list(problem.loc), problem.severity, problem.message]


GIVEN: dict[str, object] = {
    "family": "clip", "ckpt": "b", "layers": [2, 5], "content_tokens_per_example": 4, "cls_token": True, "d_model": 8,
    "n_examples": 7, "max_tokens_per_shard": 30,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "where", "message", "remedy"),
    [
        ({"protocol": "4.0"}, "protocol", "protocol is '4.0' (a string); new stores are written as 1.0.0, 2.0, 2.1, 3.0", None),
        ({"protocol": 2}, "protocol", "protocol is 2 (an integer); new stores are written as 1.0.0, 2.0, 2.1, 3.0", None),
        ({"protocol": "1.0.0", "dataset": "x"}, "dataset", "protocol 1.0.0 has no dataset", "Leave it out."),
        ({"protocol": "1.0.0", "pixel_agg": "x"}, "pixel_agg", "protocol 1.0.0 has no pixel_agg", "Leave it out."),
        ({"extra": [1]}, "extra", "extra is [1] (an array); it must map names to JSON values", None),
        ({"extra": {1: 2}}, "extra", "extra is {1: 2} (an object); it must map names to JSON values", None),
        ({"extra": {"a": 1, "n_ex": 2, "ckpt": 3}}, "extra",
         'extra has "ckpt", "n_ex", which protocol 2.0 defines itself', None),
        ({"extra": {"a": {1}}}, "metadata",
         "a has no JSON form (Object of type set is not JSON serializable)", "Use plain values."),
        ({"extra": {"a": float("nan")}}, "metadata",
         "a has no JSON form (Out of range float values are not JSON compliant: nan)", "Use plain values."),
        ({"data": "x"}, "data", "data is 'x' (a string); protocol 2.0 wants an object", "Pass a dict."),
        ({"data": [1]}, "data", "data is [1] (an array); protocol 2.0 wants an object", "Pass a dict."),
        ({"protocol": "2.1", "data": {"a": {1}}}, "data",
         "data has no JSON form (Object of type set is not JSON serializable)", "Use plain values."),
        ({"protocol": "2.1", "data": {"a": float("inf")}}, "data",
         "data has no JSON form (Out of range float values are not JSON compliant: inf)", "Use plain values."),
        ({"d_model": 0}, "metadata", "d_model is 0 (an integer); it must be an integer from 1 to 2^63 - 1",
         "The rules are those of protocol 2.0 (as written since 2025-10-03)."),
        ({"protocol": "1.0.0", "d_model": 0}, "metadata",
         "d_model is 0 (an integer); it must be an integer from 1 to 2^63 - 1",
         "The rules are those of protocol 1.0.0 (as written since 2025-06-19)."),
        ({"max_tokens_per_shard": 9}, "metadata",
         ("max_tokens_per_shard is 9, but one example has 10 vectors (tokens x layers); a shard must hold at least one "
          "example. Use at least 10."), "The rules are those of protocol 2.0 (as written since 2025-10-03)."),
    ],
)  # fmt: skip
def test_what_is_said_of_arguments(change: dict[str, object], where: str, message: str, remedy: str | None):
    with pytest.raises(ArgumentError) as caught:
        new_metadata(**{**GIVEN, **change})
    found = caught.value
    assert (found.where, found.message.replace(": nan", "").replace(": inf", ""), found.remedy or None) == (
        where, message.replace(": nan", "").replace(": inf", ""), remedy,
    )  # fmt: skip


@pytest.mark.parametrize("protocol", ["1.0.0", "2.0", "2.1"])
def test_what_is_said_of_a_replacement(protocol: str):
    meta = new_metadata(**{**GIVEN, "protocol": protocol})
    for name in ("dtype", "protocol", "n_imgs", "shiny"):
        with pytest.raises(ArgumentError) as caught:
            meta.replace(**{name: 1})
        assert caught.value.where == name
        assert caught.value.message == (
            f"{name!r} cannot be changed; these can: family, ckpt, layers, content_tokens_per_example, cls_token, d_model, "
            "n_examples, max_tokens_per_shard, data, dataset, pixel_agg"
        )
    assert meta.replace(n_examples=5).n_examples == 5
    text = json.dumps({"a": [1, 2]}, separators=(",", ":"))
    assert meta.replace(data={"a": [1, 2]}).data == (text if protocol == "2.1" else {"a": [1, 2]})
    assert meta.replace(data=None).data == ("{}" if protocol == "2.1" else {})
    if protocol == "2.1":
        assert meta.replace(data="gASV").data == "gASV"
    assert meta.replace(layers=np.array([7, 1])).layers == (7, 1)
    assert meta.replace(layers=range(3)).layers == (0, 1, 2)
    extended = new_metadata(**{**GIVEN, "protocol": protocol, "extra": {"note": 1}})
    assert extended.extra == {"note": 1}
    assert extended.keys == (*meta.keys, "note")
    if protocol == "2.0":
        added = extended.replace(pixel_agg="x")
        assert added.keys == (*meta.keys[:-2], "note", "pixel_agg", "dtype", "protocol")


def test_documents_are_equal_when_their_bytes_are():
    one, same, other = (new_metadata(**{**GIVEN, "n_examples": n}) for n in (7, 7, 8))
    assert (one == same, one == other, one == "x", one != other) == (True, False, False, True)
    assert len({one, same, other}) == 2
    assert hash(one) == hash(same) != hash(other)
    assert one == ANY  # what is no metadata is asked itself
    assert one.hashes == content_hashes(json.loads(one.raw))
    assert one.hash == one.hashes["sorted-ascii"]


def test_plain_values():
    class Place(os.PathLike[str]):
        def __fspath__(self) -> str:
            return "/a/b"

    assert plain(np.float64(0.5)) == 0.5
    assert type(plain(np.int32(3))) is int
    assert plain(np.array([[1, 2]])) == [[1, 2]]
    assert plain((np.int8(1), (2,))) == [1, [2]]
    assert plain([np.int8(1), [PurePosixPath("/x")]]) == [1, ["/x"]]
    assert plain(range(2)) == [0, 1]
    assert plain(Place()) == "/a/b"
    for same in ("x", None, 1.5, True):
        assert plain(same) is same
    assert type(plain([np.int8(1)])[0]) is int


@pytest.mark.parametrize("n", [1, 12, 13, 30])
def test_a_list_of_keys_shows_the_first_twelve(n: int):
    keys = [f"k{i}" for i in range(n)]
    expected = ", ".join(f'"k{i}"' for i in range(min(n, 12))) + (f" and {n - 12} more" if n > 12 else "")
    assert key_list(keys) == expected
    assert key_list(["x" * 61]) == f'"{"x" * 60}"'


def test_a_value_is_shown_with_its_type():
    assert shown(2**128 - 1) == "340282366920938463463374607431768211455 (an integer)"
    assert shown(2**128) == "an integer of 129 bits"
    assert shown(-(2**128)) == "an integer of 129 bits"
    assert [shown(value) for value in (None, True, 1.5, "a", [1], {"a": 1}, b"x")] == [
        "null", "True (a boolean)", "1.5 (a number with a fraction or exponent)", "'a' (a string)", "[1] (an array)",
        "{'a': 1} (an object)", "b'x' (bytes)",
    ]  # fmt: skip
    assert len(shown("x" * 1000)) < 100


@pytest.mark.parametrize("n", [1, 2, 8, 9, 99, 100, 101, 250])
def test_findings_are_bounded(n: int):
    findings = Findings("x.json")
    for i in range(n):
        assert findings.is_full(n - i, "things") == (i >= 100)
        if i < 100:
            findings = findings if i else Findings("x.json")
        findings.add("kind", f"problem {i}", loc=(i,))
        findings.add("odd", f"warning {i}", severity="warning")
    assert findings.n_errors == n
    assert len(findings.warnings) == min(n, 100)
    error = findings.error(remedy="Do it.")
    assert type(error) is DocumentError
    assert (error.where, error.remedy, len(error.problems)) == ("x.json", "Do it.", min(n, 100) + (n > 100))
    if n == 1:
        assert error.message == "problem 0"
    else:
        listed = "; ".join(f"({i + 1}) problem {i}" for i in range(min(n, 8)))
        unchecked = "; 1 more things were not looked at" if n > 100 else ""
        assert error.message == f"{n} problems: {listed}{f'; and {n - 8} more' if n > 8 else ''}{unchecked}"
    if n > 100:
        assert error.problems[-1].message == f"and {n - 100} more; 1 more things were not looked at"
        assert (error.problems[-1].kind, error.problems[-1].where) == ("more_problems", "x.json")


def test_problems_that_were_not_looked_at_are_counted():
    findings = Findings("x.json")
    for i in range(100):
        findings.add("kind", f"problem {i}")
    assert findings.is_full(7, "entries")
    assert findings.error(remedy="Do it.").problems[-1].message == (
        "the first 100 problems are listed; 7 more entries were not looked at"
    )


@pytest.mark.parametrize(
    ("nbytes", "message", "remedy"),
    [
        (35, ", while this size has a column for CLS, which has no label", "Write it again without the first column."),
        (56, ", while this size repeats the labels for every layer", "Write them once for each example."),
        (27, "", "It is cut off or of another store: copy it again, or remove it to read the store without labels."),
        (0, "", "It is cut off or of another store: copy it again, or remove it to read the store without labels."),
        (29, "", "It is of another store, or not of one byte each: replace it, or remove it."),
    ],
)
def test_what_is_said_of_the_size_of_labels(nbytes: int, message: str, remedy: str):
    with pytest.raises(DocumentError) as caught:
        parse_token_array_size(nbytes, LABELS, META.layout, where="store/labels.bin")
    text = f"it has {nbytes} bytes; 7 examples x 4 content tokens of one byte are 28{message}"
    assert (caught.value.message, caught.value.remedy, caught.value.where) == (text, remedy, "store/labels.bin")
    assert [(p.kind, p.message, p.where) for p in caught.value.problems] == [("labels_size", text, "store/labels.bin")]
    assert parse_token_array_size(28, LABELS, META.layout, where="labels.bin") == (7, 4)
    # Of one layer without CLS neither guess is made.
    with pytest.raises(DocumentError) as caught:
        parse_token_array_size(35, LABELS, Layout(7, (0,), 4, False, 8, 3), where="labels.bin")
    assert (caught.value.remedy, caught.value.where) == (
        "It is of another store, or not of one byte each: replace it, or remove it.", "labels.bin",
    )  # fmt: skip


def test_a_column_for_cls_is_counted_in_bytes_of_the_array():
    """7 examples x 5 tokens of 4 bytes are 140; 35 bytes are not, whatever they are of labels."""
    ids = TokenArray("token_ids", "int32")
    for nbytes, is_column in ((140, True), (35, False)):
        with pytest.raises(DocumentError) as caught:
            parse_token_array_size(nbytes, ids, META.layout, where="token_ids.bin")
        assert ("has a column for CLS, which has no token_id" in caught.value.message) is is_column
        assert (caught.value.remedy == "Write it again without the first column.") is is_column


def test_a_shards_json_is_bounded(monkeypatch: pytest.MonkeyPatch):
    layout = Layout(10, (0,), 1, False, 1, 1)
    for most, trailing, fits in ((450, False, True), (449, False, False), (495, True, True), (494, True, False)):
        monkeypatch.setattr(writing_module, "SHARDS_MAX_NBYTES", most)
        if fits:
            listed = json.loads(shards_bytes(layout, "n_ex", trailing_empty=trailing))
            assert [entry["n_ex"] for entry in listed] == [1] * 10 + [0] * trailing
        else:
            with pytest.raises(ArgumentError) as caught:
                shards_bytes(layout, "n_ex", trailing_empty=trailing)
            assert caught.value.message == (f"{10 + trailing} shards make a shards.json of more than {most} bytes")
            assert (caught.value.where, caught.value.remedy) == (
                "max_tokens_per_shard", "Use a larger budget for each shard.",
            )  # fmt: skip
    with pytest.raises(ArgumentError) as caught:
        shards_bytes(layout, "n")
    assert caught.value.where == "count_key"


def test_a_document_is_given_as_bytes():
    for wrong in ("{}", bytearray(b"{}"), None):
        with pytest.raises(ArgumentError) as caught:
            parse_json(wrong, where="x.json", max_nbytes=10)
        assert caught.value.message == f"it is a {type(wrong).__name__}; pass the bytes of the file"
        assert caught.value.where == "x.json"
    assert parse_json(b"[1234567]", where="x.json", max_nbytes=9) == [1234567]
    with pytest.raises(DocumentError) as caught:
        parse_json(b"[1234567] ", where="x.json", max_nbytes=9)
    assert caught.value.message == "it has 10 bytes; such a document has at most 9"
    assert [(p.kind, p.where) for p in caught.value.problems] == [("json", "x.json")]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.since)
def test_what_follows_from_the_row_of_a_version(version: WrittenVersion):
    """Made once more, as the table makes them when it is imported."""
    spelling = replace(version.spelling)
    names = (
        "family", "ckpt", "layers", "content_tokens_per_example", "cls_token", "d_model", "n_examples",
        "max_tokens_per_shard", "data", "dataset", "pixel_agg", "dtype", "protocol",
    )  # fmt: skip
    added = ("hook_points", "token_arrays", "text", "spec")
    assert tuple(spelling.keys) == (*names, *added)
    assert [key for name, key in spelling.keys.items() if name not in spelling.renamed] == [
        name for name in (*names, *added) if name not in spelling.renamed
    ]
    assert {name: spelling.keys[name] for name in spelling.renamed} == dict(spelling.renamed)
    again = replace(version)
    assert again.title == f"protocol {version.protocol} (as written since {version.since})"
    optional = {"pixel_agg"} if version.since >= "2025-10-03" else {"dataset", "pixel_agg"}
    fields = (*names[:-2], *added, *names[-2:]) if version.protocol == "3.0" else names
    assert again.fields == fields
    optional |= {"hook_points", "token_arrays", "text"}
    assert again.required_keys == tuple(spelling.keys[name] for name in fields if name not in optional)
    assert _all_but("dataset", "pixel_agg") == tuple(name for name in names if name not in {"dataset", "pixel_agg"})
