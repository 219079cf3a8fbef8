"""Rules that all sources share: positions, ranges, keys, digests of files, texts of samples; against plain Python."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from token_files import mmididx_bytes

from saev_store.errors import ArgumentError, DocumentError, SelectionError, TransportError
from saev_store.sources import MapStyle, TextFile, recorded_from
from saev_store.sources._files import digest_files, file_identity, sample_ranges
from saev_store.sources._new_file import NewFile
from saev_store.sources._source import check_index, check_positions, steps
from saev_store.sources.convert import samples_to_documents
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.mmididx import IndexedDataset
from saev_store.sources.places import sample_of, token_place
from saev_store.sources.texts import text_of
from saev_store.transport import open_transport

KIB = 1 << 10


def write_energon(folder: Path, parts: list[tuple[str, bytes]]) -> Path:
    """A prepared data set of one tar."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, data in parts:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    prepare(folder, split="1,0,0", progress=False)
    return folder


# -- positions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_positions_are_those_of_a_list(n: int) -> None:
    items = list(range(100, 100 + n))
    for position in range(-n - 2, n + 2):
        is_there = -n <= position < n
        if is_there:
            assert items[check_index(position, n, what="sample")] == items[position]
            assert (
                check_positions([position, position], n, what="sample").tolist() == [items.index(items[position])] * 2
            )
            continue
        with pytest.raises(SelectionError, match=f"sample {position} does not exist"):
            check_index(position, n, what="sample")
        with pytest.raises(SelectionError, match="do not exist"):
            check_positions([0, position] if n else [position], n, what="sample")
    for key in (slice(None), slice(1, None), slice(None, None, -1), slice(-2, 9, 2), slice(3, 1)):
        assert check_positions(key, n, what="sample").tolist() == list(range(n))[key]
    assert check_positions([], n, what="sample").dtype == np.int64
    for wrong in ([1.0], [[0]], 0, ["0"], [None], slice(None, None, 0), slice("a")):
        with pytest.raises((SelectionError, ArgumentError)):
            check_positions(wrong, n, what="sample")


@pytest.mark.parametrize("n", [0, 1, 6, 7])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 8])
@pytest.mark.parametrize("start", [0, 1, 6, 9])
def test_batches_are_slices(n: int, batch_size: int, start: int) -> None:
    items = list(range(n))
    truth = [items[at : at + batch_size] for at in range(start, n, batch_size)]
    source = MapStyle(items)
    assert [items[a:b] for a, b in steps(n, batch_size, start=start)] == truth
    assert [[*batch] for batch in source.batches(batch_size, start=start)] == truth
    full = [batch for batch in truth if len(batch) == batch_size]
    assert [[*batch] for batch in source.batches(batch_size, start=start, drop_last=True)] == full


def test_keys_are_positions_in_digits() -> None:
    source = MapStyle(list("abcdefghijkl"))
    assert [source.index_of(source.key(i)) for i in range(12)] == list(range(12))
    assert source.key(-1) == "11"
    for wrong in ("12", "-1", "00", "07", "+7", " 7", "7 ", "", "a", "1_0", "٣", "9" * 30):
        with pytest.raises(SelectionError, match="no sample has the key"):
            source.index_of(wrong)
    assert source.split("all") is source
    with pytest.raises(SelectionError, match="has only 'all'"):
        source.split("train")


# -- files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 32 * KIB, 1024 * KIB - 1, 1024 * KIB, 1024 * KIB + 1, 5_000_000, 10**12 + 7])
def test_a_sampled_digest_covers_even_pieces_from_the_first_byte_to_the_last(nbytes: int) -> None:
    starts, ends = sample_ranges(nbytes)
    assert (starts[0], ends[-1]) == (0, nbytes)
    if nbytes <= 1024 * KIB:
        assert len(starts) == 1
        return
    assert [end - start for start, end in zip(starts, ends, strict=True)] == [32 * KIB] * 32
    gaps = np.diff(starts)
    assert gaps.max() - gaps.min() <= 1
    assert gaps.min() >= 32 * KIB


def test_every_byte_and_every_size_is_in_a_full_digest() -> None:
    files = {"a": b"abc", "b": b"", "c": b"defg"}

    def digest(files: dict[str, bytes]) -> str:
        return digest_files(MemoryTransport(files), [(name, len(data)) for name, data in files.items()], scope="full")

    found = {digest(files), digest({"a": b"ab", "b": b"c", "c": b"defg"}), digest({"a": b"abc", "c": b"defg"})}
    for name, data in files.items():
        for at in range(len(data)):
            found.add(digest(files | {name: data[:at] + b"x" + data[at + 1 :]}))
    assert len(found) == 3 + 7
    assert digest({"other": b"abc", "names": b"", "here": b"defg"}) == digest(files)
    with pytest.raises(ArgumentError, match="no scope of a digest"):
        digest_files(MemoryTransport(files), [("a", 3)], scope="some")


def test_what_tells_a_file_from_another_of_its_name(tmp_path: Path) -> None:
    file, transport = tmp_path / "x", open_transport(tmp_path)
    file.write_bytes(b"abc")
    os.utime(file, ns=(1, 10**18))
    found = {file_identity(transport, "x")}
    assert file_identity(transport, "x") in found
    os.utime(file, ns=(1, 10**18 + 1))
    found.add(file_identity(transport, "x"))
    (tmp_path / "y").write_bytes(b"abd")
    os.utime(tmp_path / "y", ns=(1, 10**18 + 1))
    (tmp_path / "y").rename(file)
    found.add(file_identity(transport, "x"))
    file.write_bytes(b"abcd")
    os.utime(file, ns=(1, 10**18 + 1))
    found.add(file_identity(transport, "x"))
    file.write_bytes(b"abcx")  # in place, and then as old as it was
    os.utime(file, ns=(1, 10**18 + 1))
    found.add(file_identity(transport, "x"))
    assert len(found) == 5
    memory = MemoryTransport({"x": b"abc"})
    assert file_identity(memory, "x") == (3,)


def test_a_new_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, bool]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        flushed.append((os.fstat(fd).st_ino, (tmp_path / "a" / "x").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    with NewFile(open_transport(tmp_path), "a/x") as file:
        file.write(b"abc")
        del flushed[:]
        file.commit()
    assert (tmp_path / "a" / "x").read_bytes() == b"abc"
    assert ((tmp_path / "a" / "x").stat().st_ino, False) in flushed
    assert ((tmp_path / "a").stat().st_ino, True) in flushed
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]


# -- texts --------------------------------------------------------------------------------------------------------------


def test_a_report_about_a_text_file_says_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n  \n{"text": 5}\r\n')
    source = TextFile(tmp_path / "x.jsonl")
    quick, deep = source.validate(), source.validate(deep=True)
    assert (quick.checked_bytes, quick.deep, quick.n_examples, len(quick.problems)) == (0, False, 2, 0)
    assert (deep.checked_bytes, deep.deep, deep.n_examples) == (13 + 12, True, 2)
    assert [problem.lost for problem in deep.problems] == [((1, 2),)]


def test_neighbouring_texts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(9)))
    monkeypatch.setattr("saev_store.sources.text_file.CHUNK_BYTES", 3 * 14)
    source = TextFile(tmp_path / "x.jsonl", engine="pread")
    before = source.transport.counters.requests
    assert [*source.rows(range(9))] == list("012345678")
    assert source.transport.counters.requests == before + 3
    assert [*source.rows([0, 2, 1, 1, 8])] == ["0", "2", "1", "1", "8"]


@pytest.mark.parametrize(
    ("sample", "key", "found"),
    [
        ("a text", "text", "a text"), ({"text": "t", "label": 3}, "text", "t"), ({"body": "t"}, "body", "t"), (("t", 3), 0, "t"),
        ((3, "t"), 1, "t"), ([5, 6], "text", [5, 6]), ({0: "t"}, 0, "t"), ("tx", 0, "tx"),
    ],
)  # fmt: skip
def test_the_text_of_a_sample(sample: object, key: str | int, found: object) -> None:
    assert text_of(MapStyle([0]), sample, key, where="x") == found


@pytest.mark.parametrize(("sample", "key"), [({"a": 1}, "text"), (("t", 3), 2), ({"a": 1}, 0), (7, 0)])
def test_a_sample_without_that_text(sample: object, key: str | int) -> None:
    with pytest.raises(ArgumentError, match="x has no ") as caught:
        text_of(MapStyle([0]), sample, key, where="x")
    assert caught.value.where == "text_key"


# -- data sets of other libraries ---------------------------------------------------------------------------------------


class Failing:
    """A data set whose samples raise errors."""

    split, _fingerprint = "train", "abc"

    def __init__(self, *errors: Exception) -> None:
        self._errors = errors

    def __len__(self) -> int:
        return len(self._errors)

    def __getitem__(self, sample: int) -> object:
        raise self._errors[sample]


def test_errors_of_a_data_set_are_of_the_sample_or_of_the_system() -> None:
    source = MapStyle(
        Failing(OSError("cut"), OSError(5, "I/O"), ValueError("odd"), KeyError("k"), SelectionError("own"))
    )
    kinds = [DocumentError, TransportError, DocumentError, DocumentError, SelectionError]
    for position, kind in enumerate(kinds):
        with pytest.raises(kind) as caught:
            source[position]
        assert type(caught.value) is kind
        if kind is not SelectionError:
            assert caught.value.where == "Failing"
            assert caught.value.message.startswith(f"sample {position} cannot be read: ")
    assert source.describe() == {
        "format": "map_style", "class": "Failing", "n_samples": 5, "split": "train", "fingerprint": "abc",
    }  # fmt: skip
    assert MapStyle([1]).describe() == {"format": "map_style", "class": "list", "n_samples": 1}
    for wrong in (7, iter([1]), {1, 2}):
        with pytest.raises(ArgumentError, match="no map-style data set"):
            MapStyle(wrong)


def test_too_little_memory_is_no_fault_of_a_sample() -> None:
    """The caller may make room and ask again."""
    source = MapStyle(Failing(MemoryError("none left")))
    with pytest.raises(MemoryError, match="none left"):
        source[0]
    with pytest.raises(MemoryError, match="none left"):
        list(source.rows([0]))


# -- what a store says of its source ------------------------------------------------------------------------------------


def test_skipped_samples_move_the_later_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 12))
        skipped = np.flatnonzero(rng.random(n) < rng.random()).tolist()
        truth = [sample for sample in range(n) if sample not in skipped]
        assert sample_of(np.arange(len(truth)), skipped).tolist() == truth


@pytest.mark.parametrize("skipped", [[3], [5], [3, 4, 9], [9], []])
def test_samples_that_may_be_skipped(skipped: list[int]) -> None:
    found = recorded_from(MapStyle(list(range(10))), first=3, skipped=skipped, first_token=0)
    assert found["examples"] == ({"first": 3, "skipped": skipped} if skipped else {"first": 3})


@pytest.mark.parametrize("skipped", [[2], [2, 5], [5, 4], [5, 5], [0]])
def test_samples_that_are_skipped_come_in_order_behind_the_first(skipped: list[int]) -> None:
    with pytest.raises(ArgumentError, match="it must be samples from 3 on, in ascending order"):
        recorded_from(MapStyle(list(range(10))), first=3, skipped=skipped)


@pytest.mark.parametrize(
    ("patches", "image_px", "patch_px", "is_right"),
    [
        ((2, 3), (8, 9), None, True), ((2, 3), (8, 9), (4, 3), True), ((2, 3), (8, 9), (3, 2), True), ((2, 3), (7, 9), None, False),
        ((2, 3), (8, 10), None, False), ((2, 3), (8, 9), (5, 3), False), ((2, 3), (8, 9), (4, 4), False), ((2, 3), (9, 10), (4, 3), True),
    ],
)  # fmt: skip
def test_patches_lie_in_the_image(
    patches: tuple[int, int], image_px: tuple[int, int], patch_px: tuple[int, int] | None, is_right: bool
) -> None:
    def found() -> object:
        return recorded_from(MapStyle([0]), patches=patches, image_px=image_px, patch_px=patch_px)["content"]

    if is_right:
        said = {"grid": [*patches], "image_px": [*image_px], **({"patch_px": [*patch_px]} if patch_px else {})}
        assert found() == {"patches": said}
    else:
        with pytest.raises(ArgumentError):
            found()


@pytest.mark.parametrize("reach", [0, 1, 2, 9])
def test_the_neighbours_of_a_token(reach: int) -> None:
    ids = list(range(10, 16))
    for position in range(6):
        place = token_place(np.array(ids), 0, position, reach)
        assert place.token_id == ids[position]
        assert (*place.before, place.token_id, *place.after) == tuple(
            ids[i] for i in range(6) if abs(i - position) <= reach
        )
        assert len(place.before) == min(position, reach)
    for position in (-1, 6):
        with pytest.raises(SelectionError, match="it is padding"):
            token_place(np.array(ids), 0, position, reach)


def test_a_document_of_every_length_is_described_by_its_digest() -> None:
    found = set()
    for sequences in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]], [[1, 2, 3]]):
        idx, bin_ = mmididx_bytes([np.array(ids, np.int32) for ids in sequences])
        source = IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bin_}))
        found.add(source.describe(digest="full")["digest"]["value"])
    assert len(found) == 4


# -- samples of tars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "key", "found"),
    [
        (("txt",), "text", "txt"), (("text", "jpg"), "text", "text"), (("jpg", "transcript"), "text", "transcript"),
        (("a.TXT", "json"), "text", "a.TXT"), (("txt", "text"), "text", "text"), (("txt", "transcript"), "transcript", "transcript"),
        (("caption", "txt"), "caption", "caption"), (("caption",), "text", None), (("txt", "transcript"), "text", None),
        (("txt.gz",), "text", None), (("mytxt",), "text", None),
    ],
)  # fmt: skip
def test_the_part_of_a_sample_that_is_its_text(
    tmp_path: Path, parts: tuple[str, ...], key: str, found: str | None
) -> None:
    folder = write_energon(tmp_path / "e", [(f"s.{part}", f"the {part}".encode()) for part in parts])
    with EnergonDataset(folder) as source:
        if found is None:
            with pytest.raises(DocumentError, match="Name the part or the field with text_key="):
                text_of(source, source[0], key, where="x")
        else:
            text = text_of(source, source[0], key, where="x")
            assert (text.decode() if isinstance(text, bytes) else text) == f"the {found}"


@pytest.mark.parametrize("said", ["b.jpg", "b.jpg\n", " b.jpg\r\n"])
def test_the_name_of_a_file_in_a_text_is_that_without_white_space(tmp_path: Path, said: str) -> None:
    folder = write_energon(tmp_path / "e", [("s.txt", said.encode())])
    (tmp_path / "b.jpg").write_bytes(b"B")
    with JoinedDataset(EnergonDataset(folder), {"images": FolderFiles(tmp_path)}, names={"images": "txt"}) as joined:
        assert joined[0].media == {"images": {"b.jpg": b"B"}}


BLOCK = 512


@pytest.mark.parametrize(
    ("encoding", "raw"), [("utf-8", "ü".encode()), ("latin-1", b"\xfc"), ("utf-16", "ü".encode("utf-16"))]
)
def test_texts_are_decoded_as_the_caller_says(tmp_path: Path, encoding: str, raw: bytes) -> None:
    folder = write_energon(tmp_path / "e", [("s.txt", raw)])
    with EnergonDataset(folder) as source:
        samples_to_documents(
            source, tmp_path / "x.idx", lambda text: [*map(ord, text)], encoding=encoding, progress=False
        )
        assert IndexedDataset(tmp_path / "x.idx")[0].tolist() == [0xFC]
        if encoding != "latin-1":
            with pytest.raises(DocumentError, match="no text in 'ascii'"):
                samples_to_documents(source, tmp_path / "y.idx", lambda _: [0], encoding="ascii", progress=False)
