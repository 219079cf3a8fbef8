"""Names, braces, shares and positions, against dull models; and whole data sets from random samples."""

from __future__ import annotations

import itertools
import re
import tarfile

import pytest
from energon_tars import FORMATS, tar_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from transports import LatencyTransport

from saev_store.errors import ArgumentError, DocumentError, SaevStoreError
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon._view import View
from saev_store.sources.energon.keys import idx_path, is_safe_path, join_name, split_name
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.energon.split import SplitPlan, collapse, deal, escape, expand, parse_ratio
from saev_store.sources.energon.tar_idx import parse_tar_idx, tar_idx_bytes
from saev_store.transport import MemoryTransport

name_text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0/."), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", ("a", "txt")), ("a.b.c", ("a", "b.c")), ("a.", ("a", "")), ("x/y.z", ("x/y", "z")),
        ("x.d/y.z", ("x.d/y", "z")), ("./a.b", ("./a", "b")), ("a", None), (".a", None), ("", None), ("x.y/z", None),
        ("__x__/a.b", None), ("__x__", None), ("____/a.b", None), ("__x/a.b", ("__x/a", "b")), ("y/__x__/a.b", ("y/__x__/a", "b")),
        ("__x__.json", ("__x__", "json")), ("__a.b__", None), ("__a.b__/c.d", None), ("__a.b__.c", ("__a", "b__.c")), ("a b.c d", ("a b", "c d")), ("ü.é", ("ü", "é")), ("a\nb.c", ("a\nb", "c")),
    ],
)  # fmt: skip
def test_keys_and_parts(name, expected):
    assert split_name(name) == expected
    assert expected is None or join_name(*expected) == name


@given(st.text("a./_\n", max_size=12))
def test_names_are_split_as_energon_splits_them(name):
    """By the expression in its code, which takes quadratic time for long names."""
    found = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL).fullmatch(name)
    is_meta = re.match(r"__[^/]*__(?:/|$)", name, re.DOTALL) is not None
    assert split_name(name) == (None if found is None or is_meta else (found[1], found[2]))


def test_a_long_name_is_split_in_linear_time():
    assert split_name("a/" * 1_000_000) is None
    assert split_name("a/" * 1_000_000 + "b.txt") == ("a/" * 1_000_000 + "b", "txt")


@given(st.lists(st.text("ab0129{},.\\/", min_size=1, max_size=6), max_size=30))
def test_collapsed_names_expand_to_themselves(names):
    patterns = collapse(names)
    assert len(patterns) <= len(names)
    assert list(itertools.chain.from_iterable(expand(pattern, where="x") for pattern in patterns)) == names


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["00.tar", "1.tar"], ["00.tar", "1.tar"]),  # a range of padded numbers has one width
        (["9.tar", "10.tar"], ["9.tar", "10.tar"]),
        (["099.tar", "100.tar", "101.tar"], ["{099..101}.tar"]),
        (["1.tar", "0.tar"], ["1.tar", "0.tar"]),
        (["0.tar", "2.tar"], ["0.tar", "2.tar"]),
        (["0.tar", "0.tar"], ["0.tar", "0.tar"]),
        (["a0-0.tar", "a0-1.tar", "a1-1.tar"], ["a0-{0..1}.tar", "a1-1.tar"]),
        (["1" * 17 + "1", "1" * 17 + "2"], ["{" + "1" * 18 + ".." + "1" * 17 + "2}"]),
        (["1" * 18 + "1", "1" * 18 + "2"], ["1" * 18 + "1", "1" * 18 + "2"]),  # no reader expands so long a number
    ],
)
def test_ranges_count_up_one_by_one_in_one_number(names, patterns):
    assert collapse(names) == patterns
    assert list(itertools.chain.from_iterable(expand(pattern, where="x") for pattern in patterns)) == names


@given(st.integers(0, 999), st.integers(2, 60), st.integers(3, 6))
def test_runs_become_one_range(first, n, width):
    names = [f"s/{i:0{width}d}-of-99.tar" for i in range(first, min(first + n, 10**width))]
    assert len(collapse(names)) == 1


@given(st.text("a{},.\\1", max_size=14))
def test_patterns_are_expanded_or_refused(pattern):
    try:
        names = expand(pattern, where="x")
    except DocumentError:
        return
    assert names
    assert expand(escape(pattern), where="x") == [pattern]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{1..3}", "1 2 3"), ("{03..1}", "03 02 01"), ("{1..7..3}", "1 4 7"), ("{-1..1}", "-1 0 1"),
        ("{a,b}{1,2}", "a1 a2 b1 b2"), ("{x}", "{x}"), (r"\{a,b\}", "{a,b}"), ("{,x}y", "y xy"),
        ("x{1..2}y{a,b}", "x1ya x1yb x2ya x2yb"), ("{08..10}", "08 09 10"), ("{1..1}", "1"),
    ],
)  # fmt: skip
def test_braces_mean_what_a_shell_means(pattern, names):
    assert expand(pattern, where="x") == names.split()


@given(st.integers(0, 200), st.lists(st.decimals(0, 100, places=3), min_size=1, max_size=4).filter(any))
def test_every_shard_is_dealt(n_shards, shares):
    ratio = parse_ratio(",".join(map(str, shares)))
    runs = deal(n_shards, ratio)
    assert [a for a, _ in runs] == [0, *(b for _, b in runs[:-1])]
    assert runs[-1][1] == n_shards
    for (a, b), share in zip(runs, ratio, strict=True):
        assert abs((b - a) - n_shards * share / sum(ratio)) < 1
        assert share or a == b


def test_a_pattern_begins_where_a_path_begins():
    shards = {"train_0.tar": 1, "old/train_1.tar": 1, "train_2.tar.bak.tar": 1}
    found, problems = SplitPlan(None, ["train:train_.*"]).assign(shards)
    assert found == {"train": ("train_0.tar", "train_2.tar.bak.tar")}
    assert [(problem.kind, problem.where) for problem in problems] == [("in_no_split", "old/train_1.tar")]


@pytest.mark.parametrize(
    ("n", "text", "counts"),
    [(10, "7,2,1", [7, 2, 1]), (1, "0.8,0.1,0.1", [1, 0, 0]), (3, "1,1,1", [1, 1, 1]), (2, "1,1,0", [1, 1, 0]), (0, "1,1,1", [0, 0, 0]), (10, "0.7,0.2,0.1", [7, 2, 1])],
)  # fmt: skip
def test_shares_that_others_get_wrong(n, text, counts):
    assert [b - a for a, b in deal(n, parse_ratio(text))] == counts


@pytest.mark.parametrize(
    "text", ["", ",", "1,,2", "-1,2,3", "nan,1,1", "inf,1,1", "1e999999999,1,1", "0,0", "x", "1" * 300]
)
def test_shares_that_are_none(text):
    with pytest.raises(ArgumentError):
        parse_ratio(text)


@given(st.data())
def test_views_against_lists(data):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    ids = data.draw(st.permutations(range(len(counts))))[: data.draw(st.integers(0, len(counts)))]
    everything = [(shard, i) for shard in ids for i in range(counts[shard])]
    left_out = data.draw(st.lists(st.sampled_from(everything), max_size=6)) if everything else []
    expected = [place for place in everything if place not in left_out]
    view = View(ids, [counts[shard] for shard in ids], [*left_out, (99, 0)])
    assert len(view) == len(expected)
    assert view.places(range(len(expected))) == expected
    for position, place in enumerate(expected):
        assert view.position(*place) == position
    for place in left_out:
        assert view.position(*place) is None
    assert view.position(99, 0) is None
    for shard in ids:
        start, end = view.span(shard)
        assert expected[start:end] == [place for place in expected if place[0] == shard]


@given(st.lists(st.integers(1, 100), max_size=20))
def test_tar_idx(blocks):
    offsets = [0, *itertools.accumulate(512 * n for n in blocks)]
    raw = tar_idx_bytes(offsets)
    found = parse_tar_idx(raw, where="x", n_samples=len(blocks), tar_nbytes=offsets[-1] + 1024)
    assert found.tolist() == offsets
    for wrong in (raw[:-1], raw + bytes(8), raw[8:]):
        with pytest.raises(DocumentError):
            parse_tar_idx(wrong, where="x", n_samples=len(blocks), tar_nbytes=10**9)
    if blocks:
        with pytest.raises(DocumentError):
            parse_tar_idx(raw, where="x", n_samples=len(blocks), tar_nbytes=offsets[-1] - 1)
        with pytest.raises(DocumentError):
            parse_tar_idx(raw[::-1], where="x", n_samples=len(blocks), tar_nbytes=10**9)


def test_paths():
    assert [idx_path(name) for name in ("a.tar", "x/b.tar", "c", "d.tar.tar")] == [
        "a.tar.idx",
        "x/b.tar.idx",
        "c.tar.idx",
        "d.tar.tar.idx",
    ]
    assert all(map(is_safe_path, ["a.tar", "x/y z.tar", "ü.tar", "..a/b.."]))
    assert not any(map(is_safe_path, ["..", "a/..", "./a", "a/", "", "file://a", "x::y"]))


samples = st.dictionaries(
    st.builds("/".join, st.lists(name_text, min_size=1, max_size=3)).filter(lambda key: split_name(f"{key}.x") is not None),
    st.dictionaries(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0/"), max_size=8), st.binary(max_size=1100), min_size=1, max_size=3),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(deadline=None, max_examples=120)
@given(samples, st.sampled_from(sorted(FORMATS)), st.integers(1, 3))
def test_whatever_is_written_is_read(truth, format, n_shards):
    """Random keys and parts, in all header formats: the data set has exactly what went into the tars."""
    shards = [list(truth.items())[i::n_shards] for i in range(n_shards)]
    files = {}
    for i, content in enumerate(shards):
        try:
            members = [(join_name(key, part), data) for key, parts in content for part, data in parts.items()]
            files[f"{i}.tar"] = tar_bytes(members, format=format)
        except ValueError:  # USTAR has no room for such a name
            return
    # What `tarfile` itself reads back is what can be asked for: USTAR and GNU headers end names at blanks and slashes.
    for name, data in files.items():
        with tarfile.open(fileobj=__import__("io").BytesIO(data)) as tar:
            if [info.name for info in tar] != [join_name(k, p) for k, parts in shards[int(name[:-4])] for p in parts]:
                return
    transport = MemoryTransport(files)
    try:
        prepare("", transport=transport, split="1,0,0", progress=False)
    except SaevStoreError as error:
        pytest.fail(str(error))
    dataset = EnergonDataset("", transport=transport)
    assert {sample.key: dict(sample.parts) for batch in dataset.batches(4) for sample in batch} == truth
    for key, parts in truth.items():
        for part, data in parts.items():
            assert dataset.part(key, part) == data
            assert dataset.part(key, part, start=1, end=-1) == data[1:-1]
    assert dataset.validate(deep=True, progress=False).ok


def test_many_shards_over_a_slow_link_are_read_at_once():
    """Samples of one batch from many shards: the requests run side by side, so it takes one latency, not one for each."""
    files = {f"{i}.tar": tar_bytes([(f"k{i}.txt", b"%d" % i)]) for i in range(12)}
    transport = MemoryTransport(files)
    prepare("", transport=transport, split="1,0,0", progress=False)
    slow = LatencyTransport(transport, latency_s=0.001)
    dataset = EnergonDataset("", transport=slow)
    assert [sample.parts["txt"] for sample in dataset.rows(range(12))] == [
        b"%d" % i for i in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)
    ]
