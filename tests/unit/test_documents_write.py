"""New documents: exactly the keys of their specification, formatted as the reference writers format them."""

import json
import pathlib
from types import MappingProxyType

import ml_dtypes
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.documents import VERSIONS, WRITABLE_VERSIONS, new_metadata, parse_metadata
from saev_store.errors import ArgumentError, SaevStoreWarning

SIZES = {
    "layers": [2, 5, 11],
    "content_tokens_per_example": 4,
    "cls_token": True,
    "d_model": 8,
    "n_examples": 7,
    "max_tokens_per_shard": 50,
}
GOOD = {"family": "clip", "ckpt": "ViT-B", **SIZES}
#: From the published texts, letter by letter; 2.1 has none, so what its writer writes.
KEYS = {
    "1.0.0": "vit_family vit_ckpt layers n_patches_per_img cls_token d_vit n_imgs max_patches_per_shard data dtype protocol",
    "2.0": "family ckpt layers patches_per_ex cls_token d_model n_ex patches_per_shard data dataset dtype protocol",
    "2.1": "family ckpt layers content_tokens_per_example cls_token d_model n_examples max_tokens_per_shard data dataset "
    "pixel_agg dtype protocol",
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize("protocol", KEYS)
def test_new_documents_have_exactly_the_keys_of_their_specification(protocol):
    meta = new_metadata(protocol=protocol, **GOOD)
    assert meta.keys == tuple(KEYS[protocol].split())
    assert meta.protocol == meta.version.protocol == protocol
    assert meta.problems == ()
    assert meta.extra == {}
    assert new_metadata(**GOOD).protocol == "2.0"
    assert list(WRITABLE_VERSIONS) == [*KEYS, "3.0"]


@given(
    protocol=st.sampled_from(list(KEYS)),
    family=TEXT,
    ckpt=TEXT,
    layers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5, unique=True),
    tokens=st.integers(1, 300),
    cls_token=st.booleans(),
    d_model=st.integers(1, 5000),
    n_examples=st.integers(1, 2**30),
    spare=st.integers(0, 10_000),
    data=st.dictionaries(TEXT, JSON, max_size=3),
    extra=st.dictionaries(TEXT.map(lambda key: "x" + key), JSON, max_size=2),
)
def test_new_documents_round_trip_in_the_bytes_of_the_reference_writers(
    protocol, family, ckpt, layers, tokens, cls_token, d_model, n_examples, spare, data, extra
):
    budget = (tokens + cls_token) * len(layers) + spare
    meta = new_metadata(
        protocol=protocol,
        family=family,
        ckpt=ckpt,
        layers=layers,
        content_tokens_per_example=tokens,
        cls_token=cls_token,
        d_model=d_model,
        n_examples=n_examples,
        max_tokens_per_shard=budget,
        data=data,
        extra=extra,
    )
    written = json.loads(meta.raw)
    if protocol == "2.1":
        assert meta.raw == orjson.dumps(written, option=orjson.OPT_INDENT_2)
        assert json.loads(meta.data) == data
    else:
        assert meta.raw == json.dumps(written, indent=4).encode("ascii")
        assert meta.data == data
    again = parse_metadata(meta.raw, where="metadata.json")
    assert again == meta
    for found in (meta, again):
        assert (found.family, found.ckpt, found.layers) == (family, ckpt, tuple(layers))
        assert (found.content_tokens_per_example, found.cls_token, found.d_model) == (tokens, cls_token, d_model)
        assert (found.n_examples, found.max_tokens_per_shard) == (n_examples, budget)
        assert (found.extra, found.dtype) == (extra, "float32")
        assert found.hash == meta.hash


def test_defaults_and_options():
    assert new_metadata(**GOOD).data == {}
    assert new_metadata(**GOOD).dataset == ""
    assert new_metadata(**GOOD, dataset=pathlib.PurePosixPath("/data/imgs")).dataset == "/data/imgs"
    with_agg = new_metadata(**GOOD, pixel_agg="prefer-fg")
    assert with_agg.keys == tuple(KEYS["2.0"].replace("dataset", "dataset pixel_agg").split())
    newest = new_metadata(**GOOD, protocol="2.1", data={"b": 1, "a": "ü"}, dataset="toy")
    assert (newest.data, newest.dataset, newest.pixel_agg) == ('{"a":"\\u00fc","b":1}', "toy", "majority")
    assert new_metadata(**GOOD, protocol="2.1", data="as it is").data == "as it is"
    assert new_metadata(**GOOD, data=MappingProxyType({"a": (1, 2)})).data == {"a": [1, 2]}
    assert new_metadata(**GOOD, extra={"note": 1}).keys[-1] == "note"


def test_numpy_values_are_plain_values():
    meta = new_metadata(
        family=np.str_("clip"),
        ckpt="x",
        layers=np.array([2, 5], dtype=np.int8),
        content_tokens_per_example=np.int64(4),
        cls_token=np.True_,
        d_model=np.uint16(8),
        n_examples=np.int32(7),
        max_tokens_per_shard=50,
    )
    assert (meta.layers, meta.cls_token, meta.n_examples) == ((2, 5), True, 7)
    assert new_metadata(**GOOD | {"layers": range(3)}).layers == (0, 1, 2)
    assert new_metadata(**GOOD | {"layers": (np.int64(3), 5)}).layers == (3, 5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"protocol": "1.1"}, r"protocol: protocol is '1\.1'.*written as 1\.0\.0, 2\.0, 2\.1"),
        ({"protocol": 2.0}, r"protocol is 2\.0"),
        ({"family": None}, "family is null; it must be a string"),
        ({"ckpt": b"x"}, "no JSON form"),
        ({"layers": []}, "layers is .*at least one"),
        ({"layers": [1, 1]}, r"layers\[1\] is 1.*once"),
        ({"layers": "12"}, "layers.* is '12'"),
        ({"layers": [1.0]}, r"layers.*1\.0"),
        ({"content_tokens_per_example": 0}, "metadata: content_tokens_per_example is 0"),
        ({"d_model": 8.5}, r"d_model is 8\.5"),
        ({"n_examples": -1}, "n_examples is -1"),
        ({"n_examples": True}, "n_examples is True"),
        ({"n_examples": float("nan")}, "no JSON form"),
        ({"n_examples": 10**5000}, "no JSON form|integer of"),
        ({"max_tokens_per_shard": 14}, "max_tokens_per_shard is 14.*at least 15"),
        ({"cls_token": 1}, "cls_token.* is 1"),
        ({"data": "text"}, r"data: data is 'text'.*protocol 2\.0 wants an object"),
        ({"data": [1]}, "wants an object"),
        ({"data": {"x": object()}}, "no JSON form"),
        ({"data": {"x": float("nan")}}, "no JSON form"),
        ({"data": {1: 2, "1": 3}}, "occurs twice"),
        ({"dataset": 7}, "dataset.* is 7"),
        ({"pixel_agg": 7}, "pixel_agg.* is 7"),
        ({"extra": {"n_ex": 1}}, 'extra: extra has "n_ex", which protocol 2.0 defines'),
        ({"extra": {"n_imgs": 1}}, "two generations are mixed"),
        ({"extra": {"x": {1, 2}}}, "no JSON form"),
        ({"protocol": "1.0.0", "dataset": "x"}, r"dataset: protocol 1\.0\.0 has no dataset\. Leave it out"),
        ({"protocol": "1.0.0", "pixel_agg": "x"}, r"pixel_agg: protocol 1\.0\.0 has no pixel_agg"),
        ({"protocol": "1.0.0", "n_examples": 0}, "n_examples is 0"),
        ({"protocol": "1.0.0", "max_tokens_per_shard": 1}, "metadata: max_tokens_per_shard is 1,"),
        ({"protocol": "2.1", "data": 7}, "data.* is 7"),
        ({"protocol": "2.1", "data": {"x": float("inf")}}, "no JSON form"),
        ({"protocol": "2.1", "ckpt": "\ud800"}, "no JSON form"),
        ({"d_model": 2**61}, "2\\^63"),
    ],
)  # fmt: skip
def test_arguments_that_break_a_rule_are_argument_errors(changes, match):
    with pytest.raises(ArgumentError, match=match):
        new_metadata(**GOOD | changes)


# -- replace -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.title)
def test_replace_makes_a_document_of_the_same_version(version):
    document = {version.spelling.keys[name]: value for name, value in GOOD.items()}
    document |= {"data": "x" if version.data == "string" else {"a": 1}, "note": "kept"}
    if version.requires_dataset:
        document["dataset"] = "/data"
    if version.protocol == "3.0":
        document["spec"] = "saev_store"
    document |= {"dtype": "float32", "protocol": version.protocol, "tail": [1]}
    before = parse_metadata(json.dumps(document).encode(), where="a/metadata.json")
    after = before.replace(layers=(5,), n_examples=np.int64(3), max_tokens_per_shard=5)
    assert after.version == before.version == version
    assert (after.layers, after.n_examples, after.layout.examples_per_shard) == ((5,), 3, 1)
    assert (after.ckpt, after.data, after.extra) == (before.ckpt, before.data, {"note": "kept", "tail": [1]})
    assert after.keys == before.keys
    assert after.hash != before.hash
    assert before.n_examples == 7
    assert before.replace().hash == before.hash
    assert before.replace(dataset="/elsewhere").dataset == "/elsewhere"


def test_replace_inserts_a_new_key_where_writers_have_it():
    changed = new_metadata(**GOOD).replace(pixel_agg="majority")
    assert changed.keys == tuple(KEYS["2.0"].replace("dataset", "dataset pixel_agg").split())


def test_replace_keeps_what_only_old_documents_may_hold():
    raw = json.dumps(
        {**json.loads(new_metadata(**GOOD).raw), "data": {"x": float("nan")}, "dataset": "\udcff"}
    ).encode()
    changed = parse_metadata(raw, where="m").replace(n_examples=1)
    assert changed.dataset == "\udcff"
    assert "NaN" in changed.raw.decode()
    first_day = json.dumps({**json.loads(new_metadata(**GOOD, protocol="1.0.0").raw), "data": "Imgs()"}).encode()
    assert parse_metadata(first_day, where="m").replace(n_examples=1).data == "Imgs()"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_ex": 3}, "'n_ex' cannot be changed; these can: family, ckpt, layers, content_tokens_per_example"),
        ({"protocol": "2.1"}, "'protocol' cannot be changed"),
        ({"dtype": "float16"}, "'dtype' cannot be changed"),
        ({"n_examples": 0}, "n_examples is 0"),
        ({"layers": [1, 1]}, "once"),
        ({"data": 7}, "data is 7"),
        ({"ckpt": object()}, "no JSON form"),
    ],
)
def test_replace_checks_names_and_values(changes, match):
    with pytest.raises(ArgumentError, match=match):
        new_metadata(**GOOD).replace(**changes)


def test_replace_of_an_unknown_minor_version_stays_one():
    raw = new_metadata(**GOOD).raw.replace(b'"2.0"', b'"2.9"')
    with pytest.warns(SaevStoreWarning):
        meta = parse_metadata(raw, where="m")
    with pytest.warns(SaevStoreWarning):
        assert meta.replace(n_examples=1).protocol == "2.9"


# -- dtypes as NumPy, ml_dtypes and torch have them --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("float32", [np.float32, np.dtype("<f4")]),
        ("bfloat16", [ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]),
        ("float16", [np.float16, np.dtype("float16")]),
    ],
)
def test_dtypes_of_numpy_describe_the_same_store_as_their_names(name: str, dtypes: list[object]):
    expected = new_metadata(**GOOD | {"dtype": name})
    assert [new_metadata(**GOOD | {"dtype": dtype}).raw for dtype in dtypes] == [expected.raw] * len(dtypes)


def test_dtypes_of_torch_describe_the_same_store_as_their_names():
    torch = pytest.importorskip("torch")
    arrays = {"mask": "bool", "labels": "uint8", "token_ids": "int32", "document_ids": "int64", "score": "float32"}
    for name in ("float32", "bfloat16", "float16"):
        expected = new_metadata(**GOOD | {"dtype": name, "token_arrays": arrays})
        of_torch = {array: getattr(torch, dtype) for array, dtype in arrays.items()}
        found = new_metadata(**GOOD | {"dtype": getattr(torch, name), "token_arrays": of_torch})
        assert found.raw == expected.raw


def test_token_arrays_take_dtypes_as_well_as_names():
    names = {"mask": "bool", "labels": "uint8", "token_ids": "int32", "document_ids": "int64", "score": "float32"}
    expected = new_metadata(**GOOD | {"token_arrays": names}).raw
    of_numpy = {
        "mask": bool,
        "labels": np.uint8,
        "token_ids": np.int32,
        "document_ids": np.dtype("int64"),
        "score": np.float32,
    }
    assert new_metadata(**GOOD | {"token_arrays": of_numpy}).raw == expected


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": np.int8}, 'metadata: dtype is \'int8\'.*holds "float32", "bfloat16", "float16" only'),
        ({"dtype": ml_dtypes.float8_e4m3fn}, "dtype is 'float8_e4m3fn'"),
        ({"dtype": {1, 2}}, "dtype: dtype is .*; it must be float32, bfloat16, float16"),
        ({"token_arrays": {"x": np.float64}}, "token array x has dtype 'float64'; it must be one of"),
        ({"token_arrays": {"mask": np.uint8}}, "token array mask has dtype uint8; arrays of that name are bool"),
        ({"token_arrays": {"x": object()}}, "metadata: token_arrays has no JSON form"),
        ({"family": object()}, "metadata: family has no JSON form"),
        ({"text": {"layout": object()}}, "metadata: text has no JSON form"),
    ],
)
@pytest.mark.filterwarnings("ignore::saev_store.errors.BreakingProtocolWarning")
def test_what_is_no_such_dtype_is_refused_under_its_name(changes: dict[str, object], match: str):
    with pytest.raises(ArgumentError, match=match):
        new_metadata(**GOOD | changes)


def test_what_is_changed_keeps_numbers_that_are_none_and_its_name():
    """Older documents have them; new ones do not."""
    raw = (
        new_metadata(protocol="2.0", data={"x": 1}, **GOOD)
        .raw.replace(b'"x": 1', b'"x": NaN')
        .replace(b'"x":1', b'"x":NaN')
    )
    assert b"NaN" in raw
    meta = parse_metadata(raw, where="store/metadata.json")
    assert meta.where == "store/metadata.json"
    assert b"NaN" in meta.replace(ckpt="ViT-L").raw


@pytest.mark.parametrize("name", ["dtype", "protocol", "extra"])
@pytest.mark.parametrize("value", [np.array([1, 2]), 10**5000, [1, 2]], ids=["array", "integer", "list"])
def test_what_has_no_truth_or_no_text_is_refused_by_name(name: str, value: object):
    with pytest.raises(ArgumentError) as refused:
        new_metadata(**GOOD, **{name: value})
    assert refused.value.where == name
