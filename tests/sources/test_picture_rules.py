"""Folders of images, text files and the door to all formats: what they say of themselves, what they close, errors with their places."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from api import MemoryTransport
from photographs import noise, png, write_energon, write_folder
from token_files import llmbatch_bytes, mmididx_bytes

from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    TransportError,
)
from saev_store.sources import (
    ImageFolder,
    MapStyle,
    TextFile,
    _new_file,
    image_folder,
    open_source,
    recorded_from,
    reopen,
    sniff,
)
from saev_store.sources._new_file import NewFile
from saev_store.sources._source import check_index, check_positions
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.framing import Framing
from saev_store.sources.pictures import open_images, picture_of, picture_px
from saev_store.sources.places import Framed, Patches, ids_of
from saev_store.sources.sniff import find_source
from saev_store.sources.texts import text_of
from saev_store.transport import Entry, open_transport
from saev_store.transport.durable import TEMP_PREFIX

BATCHES = llmbatch_bytes(np.zeros((1, 2, 3), np.uint32))


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


class Closing(MemoryTransport):
    """Counts how often it was closed."""

    n_closed = 0

    def at(self, path: str) -> MemoryTransport:
        return self if not path else super().at(path)

    def close(self) -> None:
        self.n_closed += 1
        super().close()


# -- folders of images ---------------------------------------------------------------------------------------------------


def test_what_a_folder_of_images_says_of_itself():
    images = {"b.png": png(noise(0, 2, 3)), "a/x.png": png(noise(1, 4, 5))}
    transport = Closing(images)
    with ImageFolder("", transport=transport) as folder:
        assert repr(folder).splitlines() == [
            "Images memory://",
            "  images        2",
            "  first         a/x.png",
            "  read through  memory",
        ]
        hasher = xxhash.xxh3_128()
        for name in ("a/x.png", "b.png"):
            hasher.update(xxhash.xxh3_128_hexdigest(len(images[name]).to_bytes(8, "little") + images[name]).encode())
        for name in ("a/x.png", "b.png"):
            hasher.update(f"{name}\0{len(images[name])}\0".encode())
        digest = {"algorithm": "xxh3_128", "scope": "sampled", "value": hasher.hexdigest()}
        assert folder.describe() == {"format": "images", "url": "memory://", "n_samples": 2, "digest": digest}
        assert folder.raw(-1) == images["b.png"]
        assert [found.shape for found in folder.rows([1, 0, 1])] == [(2, 3, 3), (4, 5, 3), (2, 3, 3)]
        assert folder[0].flags.writeable
        np.testing.assert_array_equal(folder[1], noise(0, 2, 3))
        assert transport.n_closed == 0
    assert transport.n_closed == 1


@pytest.mark.parametrize(("n", "n_sampled"), [(1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (7, 3), (9, 3), (10, 3)])
def test_so_many_files_are_sampled_at_most(n: int, n_sampled: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_folder, "_N_SAMPLED", 3)
    folder = ImageFolder("", transport=MemoryTransport({f"{i:02d}.png": b"x" for i in range(n)}))
    read: list[str] = []
    digest = folder._digest
    monkeypatch.setattr(folder, "_digest", lambda path, scope: (read.append(path), digest(path, scope))[1])
    folder.describe()
    assert len(read) == n_sampled
    del read[:]
    folder.describe(digest="full")
    assert sorted(read) == list(folder.paths)


def test_a_size_that_is_not_told_is_no_empty_file(monkeypatch: pytest.MonkeyPatch):
    transport = MemoryTransport({"a.png": png(noise(0)), "b.png": b""})
    listed = transport.list
    monkeypatch.setattr(
        transport, "list", lambda path: [Entry(each.path, each.is_dir, None) if each.name == "a.png" else each for each in listed(path)]
    )  # fmt: skip
    monkeypatch.setattr(transport, "at", lambda _: transport)
    report = ImageFolder("", transport=transport).validate()
    assert [(problem.where, problem.message) for problem in report.problems] == [("b.png", "the file is empty")]


def test_a_text_file_closes_what_it_opened():
    transport = Closing({"x.txt": b"a"})
    with TextFile("x.txt", transport=transport) as source:
        assert repr(source).splitlines() == ["Texts memory://x.txt", "  texts         1", "  read through  memory"]
        assert source.describe() == {
            "format": "text", "url": "memory://x.txt", "n_samples": 1,
            "digest": {"algorithm": "xxh3_128", "scope": "full", "value": xxhash.xxh3_128_hexdigest(bytes([1, *[0] * 7]) + b"a")},
        }  # fmt: skip
    assert transport.n_closed == 1
    MapStyle([1]).close()
    assert repr(MapStyle([1])).splitlines() == ["Data set list", "  samples  1"]
    report = MapStyle([1, 2]).validate(deep=True)
    assert (report.n_examples, report.problems, report.deep) == (2, (), True)


# -- parts of samples ----------------------------------------------------------------------------------------------------


def test_the_field_map_tells_the_image_and_the_text(tmp_path: Path):
    """Also where other parts could be meant."""
    parts = [("a.png", png(noise(0))), ("a.thumb.png", b"small"), ("a.txt", b"t"), ("a.json", b'{"said": "j"}')]
    kind = {"sample_type": "CaptioningSample", "field_map": {"image": "png", "caption": "json[said]"}}
    with EnergonDataset(write_energon(tmp_path / "e", [parts], **kind)) as source:
        sample = source[0]
        assert picture_of(source, sample, None, where="x") == parts[0][1]
        assert picture_of(source, sample, "thumb.png", where="x") == b"small"
        assert text_of(source, sample, "caption", where="x") == "j"
        assert text_of(source, sample, "txt", where="x") == "t"
        assert text_of(source, sample, "text", where="x") == "t"
    kind["field_map"]["image"] = "json[said]"  # the name of an image, say; the only part that is one is meant
    with EnergonDataset(write_energon(tmp_path / "g", [[parts[0], *parts[2:]]], **kind)) as source:
        assert picture_of(source, source[0], None, where="x") == parts[0][1]
    with EnergonDataset(write_energon(tmp_path / "f", [parts])) as source:
        error = refused(lambda: picture_of(source, source[0], None, where="x"))
        assert (error.message, error.remedy) == ("x has several images: png, thumb.png", "Name the part of the image.")
        error = refused(lambda: picture_of(source, source[0], "gif", where="x"))
        assert (error.message, error.where) == ("the sample has no part 'gif'; it has png, thumb.png, txt, json", "x")
        assert error.remedy == "Pass another image_key."
        error = refused(lambda: text_of(MapStyle([1]), {"a": 1}, "b", where="sample 3"))
        assert (error.message, error.remedy) == ("sample 3 has no 'b'; it has ['a']", "Pass text_key=….")


def test_sizes_of_pictures():
    raw = png(noise(0, 4, 7))
    assert picture_px(raw, where="x") == (4, 7)
    error = refused(lambda: picture_px(b"no", where="here"))
    assert (type(error), error.where) == (DocumentError, "here")
    assert error.message == "it is no image that can be decoded: its format is not known"
    for shape, size in (((5, 6, 4), (5, 6)), ((4, 5, 6), (5, 6)), ((5, 6, 5), (6, 5))):
        assert picture_px(np.zeros(shape), where="x") == size


def test_images_at_an_address_are_opened_with_its_options(monkeypatch: pytest.MonkeyPatch):
    given: list[object] = []
    memory = MemoryTransport({"a.png": b""})
    monkeypatch.setattr(
        "saev_store.sources.pictures.open_transport", lambda url, options: given.append((url, options)) or memory
    )
    assert open_images("s3://a/b", {"key": "x"}).format == "images"
    assert given == [("s3://a/b", {"key": "x"})]


@pytest.mark.parametrize("resize", [None, 8, (6, 9)])
@pytest.mark.parametrize("crop", [None, (4, 4)])
def test_how_images_were_framed_is_described(resize: Any, crop: Any):
    data = recorded_from(
        MapStyle([0]), patches=(2, 2), image_px=(4, 4), framing=Framing(resize, crop), image_key="photo", patch_px=(2, 1)
    )  # fmt: skip
    found = json.loads(json.dumps(data))["content"]["patches"]
    assert found["image_key"] == "photo"
    assert found["patch_px"] == [2, 1]
    described = Patches.model_validate(found).framing
    assert described is not None
    assert described.framing() == Framing(resize, crop)
    assert Framed.model_validate({"resize": None, "crop": None}).framing() == Framing()


@pytest.mark.parametrize("scope", ["sampled", "full"])
def test_the_digest_of_a_recording_is_as_it_was_asked_for(scope: Any):
    source = ImageFolder("", transport=MemoryTransport({"a.png": b"x"}))
    data = recorded_from(source, patches=(1, 1), image_px=(2, 2), digest=scope)
    assert data["source"]["digest"]["scope"] == scope
    assert data["__class__"] == "Source"


@pytest.mark.parametrize(
    ("sample", "is_text"), [(np.arange(3), True), (np.zeros(0, int), True), (np.zeros((2, 3), int), False), (np.array(5), False), ([1, 2], False), ("text", False), (None, False)]
)  # fmt: skip
def test_which_samples_are_token_ids(sample: object, is_text: bool):
    found = ids_of(sample)
    assert (found is not None) == is_text
    assert found is None or found is sample


@pytest.mark.parametrize(("marks", "told"), [(("train", "abc"), {"split": "train", "fingerprint": "abc"}), ((None, None), {}), ((3, 7), {}), (("", ""), {"split": "", "fingerprint": ""})])  # fmt: skip
def test_what_a_data_set_in_memory_tells_of_itself(marks: tuple[object, object], told: dict):
    class Told(list[int]):
        split, _fingerprint = marks

    assert MapStyle(Told([1, 2])).describe() == {"format": "map_style", "class": "Told", "n_samples": 2, **told}


# -- the door ------------------------------------------------------------------------------------------------------------


class Failing(MemoryTransport):
    """Every request fails in one way."""

    def __init__(self, error: SaevStoreError) -> None:
        super().__init__({"x": b"a"})
        self.error = error

    def size(self, path: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (AccessError("no", where="x"), True), (TransportError("busy", where="x", transient=True), True),
        (TransportError("a folder", where="x"), False), (CorruptShardError("cut", where="x"), False), (NotFoundError("no", where="x"), False),
    ],
)  # fmt: skip
def test_which_errors_of_a_service_are_those_of_the_caller(error: SaevStoreError, is_raised: bool):
    transport = Failing(error)
    if is_raised:
        assert refused(lambda: sniff("x.idx", transport=transport)) is error
    else:
        with pytest.raises((DocumentError, NotFoundError, TransportError)) as caught:
            find_source("x.idx", transport=transport)
        assert caught.value.where in {"x", "memory://x.idx"}


class Busy(MemoryTransport):
    """One request of one kind fails in a way that may pass; a folder is no file."""

    def __init__(self, operation: str, path: str, passes: bool) -> None:
        super().__init__({"f/x": b"a"})
        self.fails, self.passes = (operation, path), passes

    def _check(self, operation: str, path: str) -> None:
        if (operation, path) == self.fails:
            raise TransportError("busy", where=path, transient=self.passes)

    def size(self, path: str) -> int:
        self._check("size", path)
        return super().size(path)

    def list(self, path: str = "") -> Sequence[Entry]:
        self._check("list", path)
        return super().list(path)


@pytest.mark.parametrize("operation", ["size", "list"])
@pytest.mark.parametrize("call", [sniff, find_source])
def test_a_failure_that_passes_is_never_told_as_the_absence_of_data(operation: str, call: Callable[..., object]):
    """A script that tries again what passes would give up."""
    error = refused(lambda: call("f", transport=Busy(operation, "f", passes=True)))
    assert (type(error), error.message) == (TransportError, "busy")
    lasting = Busy(operation, "f", passes=False)
    if call is sniff:
        assert sniff("f", transport=lasting) is None
    else:
        assert type(refused(lambda: call("f", transport=lasting))) in {DocumentError, NotFoundError}


@pytest.mark.parametrize("n", [1, 2, 8, 9, 10])
def test_of_many_data_sets_eight_are_named(n: int):
    memory = MemoryTransport({f"f/{i:02d}.batch": BATCHES for i in range(n)} | {"f/a.tar.idx": bytes(16)})
    if n == 1:
        assert open_source("f", transport=memory).url == "memory://f/00.batch"
        return
    error = refused(lambda: open_source("f", transport=memory))
    shown = ", ".join(f"{i:02d}.batch" for i in range(min(n, 8)))
    more = f" and {n - 8} more" if n > 8 else ""
    assert (type(error), error.where, error.remedy) == (ArgumentError, "memory://f", "Name one.")
    assert error.message == f"the folder holds {n} data sets: {shown}{more}"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("none", NotFoundError, "there is nothing of that name"), ("folder", DocumentError, "the folder holds no data set of a known format"),
        ("x.dat", DocumentError, "the file is of no known format: neither LLMBATCH (.batch) nor MMIDIDX (.idx beside .bin)"),
    ],
)  # fmt: skip
def test_what_is_no_data_set(name: str, kind: type[Exception], message: str, tmp_path: Path):
    (tmp_path / "x.dat").write_bytes(b"LLMBATC")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").touch()
    error = refused(lambda: open_source(tmp_path / name))
    assert (type(error), error.message, error.where) == (kind, message, f"{tmp_path}/{name}")


def test_endings_decide_where_the_content_does_not():
    idx, bin_ = mmididx_bytes([np.arange(3, dtype=np.int32)])
    memory = MemoryTransport(
        {"a.batch": BATCHES, "a.idx": idx, "a.bin": bin_, "b.batch": b"", "c.idx": b"xx", "d": b"MMIDIDX\0"}
    )
    for name, found in (("a", ("mmididx", "a.idx")), ("a.bin", ("mmididx", "a.idx")), ("a.batch", ("llmbatch", "a.batch")), ("b.batch", ("llmbatch", "b.batch")),
                        ("b", ("llmbatch", "b.batch")), ("c", ("mmididx", "c.idx")), ("c.bin", ("mmididx", "c.idx")), ("d", None), ("e", None)):  # fmt: skip
        told = sniff(name, transport=memory)
        assert (None if told is None else (told.format, told.path)) == found


def test_a_data_set_with_missing_tars_is_opened_where_that_is_allowed(tmp_path: Path):
    folder = write_energon(tmp_path / "e", [[("a.txt", b"")], [("b.txt", b"")]])
    (folder / "shard_1.tar").unlink()
    found = sniff(folder)
    assert found is not None
    assert (found.format, found.path) == ("energon", "e")
    assert type(refused(found.open)) is CorruptShardError
    assert [problem.kind for problem in found.open(damaged_ok=True).problems] == ["missing_shard"]


def test_a_description_is_opened_with_the_options_of_the_caller(tmp_path: Path):
    write_folder(tmp_path, {"a.png": b"x", "x.txt": b"t", "x.batch": BATCHES})
    for source in (ImageFolder(tmp_path), TextFile(tmp_path / "x.txt"), open_source(tmp_path / "x.batch")):
        described = source.describe()
        for engine in ("pread", "mmap"):
            again = reopen(described, engine=engine)
            assert again.transport.name == engine
            assert type(again) is type(source)
        name = str(described["url"]).rpartition("/")[2] if described["format"] != "images" else ""
        assert (
            reopen(described, url=name, transport=open_transport(tmp_path)).describe()["digest"] == described["digest"]
        )
        error = refused(lambda described=described: reopen({**described, "n_samples": 9}))
        assert (type(error), error.message) == (
            CorruptShardError,
            f"n_samples is {len(source)}, but was 9 when it was described",
        )
        assert error.remedy == "These are other data; pass url= if the described ones were moved."
        error = refused(lambda described=described: reopen({**described, "digest": {"scope": "x"}}))
        assert error.where == "description"


@pytest.mark.parametrize(
    ("call", "kind", "where", "message"),
    [
        (lambda: ImageFolder("", {}, transport=MemoryTransport()), ArgumentError, "storage_options", "a transport has its options already"),
        (lambda: ImageFolder("", transport=MemoryTransport({"a": b""})), NotFoundError, "memory://", "there is no image in the folder or below it"),
        (lambda: TextFile("x", transport=MemoryTransport()), NotFoundError, "memory://x", "there is no such file"),
        (lambda: check_index(0, 0, what="row"), SelectionError, "row", "row 0 does not exist; it must be there, but there are none"),
        (lambda: check_index("a", 2, what="row"), SelectionError, "row", "'a' is no position: rows are numbered"),
        (lambda: check_positions([0, 5], 3, what="row"), SelectionError, "row", "rows from 0 to 5 of 3 do not exist"),
        (lambda: check_positions(slice("a"), 3, what="row"), SelectionError, "row", "is no slice of rows"),
        (lambda: check_positions([[1], [2, 3]], 3, what="row"), ArgumentError, "row", "is no list of rows"),
        (lambda: recorded_from(MapStyle([1]), by_token=True, first=1), ArgumentError, "by_token", "by_token says where each token comes from; leave the others out"),
        (lambda: recorded_from(MapStyle([1]), patches=(1, 1)), ArgumentError, "patches", "patches and image_px must be given together"),
        (lambda: recorded_from(MapStyle([1]), patches=(2, 2), image_px=(5, 4)), ArgumentError, "patches", "an image of 5 x 4 pixels has no grid of 2 x 2 equal patches"),
        (lambda: recorded_from(MapStyle([1]), patches=(2, 2), image_px=(4, 4), patch_px=(3, 2)), ArgumentError, "patch_px", "2 x 2 patches of 3 x 2 pixels are larger than 4 x 4"),
        (lambda: recorded_from(MapStyle([1]), first_token=-1), ArgumentError, "first_token", "first_token is -1"),
        (lambda: NewFile(MemoryTransport({"a": b"x"}), "a"), None, "memory://a", "a file of that name exists already"),
        (lambda: NewFile(MemoryTransport({"a": b""}), "a"), None, "memory://a", "an empty file of that name exists"),
    ],
)  # fmt: skip
def test_errors_name_their_place(call: Callable[[], object], kind: type[Exception] | None, where: str, message: str):
    error = refused(call)
    assert message in error.message
    assert error.where == where
    assert kind is None or type(error) is kind


# -- new files -----------------------------------------------------------------------------------------------------------


def test_a_new_file_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = MemoryTransport()
    for is_committed in (True, False):
        with NewFile(memory, f"x{is_committed}") as file:
            file.write(b"abc")
            assert len(list(tmp_path.iterdir())) == 1
            if is_committed:
                file.commit()
                for call in (lambda file=file: file.write(b"d"), file.commit):
                    error = refused(call)
                    assert (error.message, error.where) == ("this file is complete or abandoned", "memory://xTrue")
        assert list(tmp_path.iterdir()) == []
    assert memory.files == {"xTrue": b"abc"}


def test_an_upload_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch):
    memory, ended = MemoryTransport(), list[str]()
    opened = memory.open_sink

    def open_sink(*given: Any, **options: Any) -> Any:
        sink = opened(*given, **options)

        class Cut:
            def write(self, *_: object) -> None:
                raise TransportError("the line is cut", where="x")

            def abort(self) -> None:
                ended.append("aborted")
                sink.abort()

        return Cut()

    monkeypatch.setattr(memory, "open_sink", open_sink)
    with NewFile(memory, "x") as file:
        file.write(b"abc")
        assert refused(file.commit).message == "the line is cut"
    assert ended == ["aborted"]
    assert memory.files == {}


@pytest.mark.parametrize("is_local", [True, False])
def test_a_new_file_that_the_system_refuses_to_open_leaves_nothing(
    is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python makes the file, and then asks for its position."""

    def failing(file: str, mode: str, opener: object) -> None:
        Path(file).touch()
        raise OSError(errno.EIO, "")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(_new_file, "open", failing, raising=False)
    with pytest.raises(TransportError, match="EIO"):
        NewFile(open_transport(tmp_path) if is_local else MemoryTransport(), "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["x", "a/b/x"])
def test_a_new_file_grows_under_a_hidden_name_in_its_folder(path: str, tmp_path: Path):
    """Which `clean` and preparations recognise."""
    transport = open_transport(tmp_path)
    with NewFile(transport, path) as file, NewFile(transport, path) as other:
        for each in (file, other):
            growing = Path(each.temporary)
            assert growing.parent == (tmp_path / path).parent
            assert growing.name.startswith(f"{TEMP_PREFIX}{os.getpid()}-")
            assert growing.exists()
        assert file.temporary != other.temporary
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == []


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ""])
def test_a_new_file_lies_below_the_root(path: str, overwrite: bool, tmp_path: Path):
    (tmp_path / "root").mkdir()
    for transport in (open_transport(tmp_path / "root"), MemoryTransport()):
        with pytest.raises(SaevStoreError):
            NewFile(transport, path, overwrite=overwrite)
    assert list(tmp_path.rglob("*")) == [tmp_path / "root"]
