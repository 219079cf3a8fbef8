"""Where an export is written: never over a file of a store, and at the place that the address names."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from dense_stores import plain_store

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.core.layout import Layout
from saev_store.errors import AccessError, ArgumentError, SaevStoreError, SaevStoreWarning
from saev_store.export import write_kerchunk
from saev_store.export._repository import _sentence
from saev_store.transport import Transport as Lists
from saev_store.transport import Transport as Writes
from saev_store.transport import open_transport

LAYOUT = Layout(7, (2, 5), 3, True, 8, 3)
OUTSIDE = "Name a file outside the store's folder."


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore.open(plain_store(LAYOUT, labelled=True, tail="cut").write(tmp_path / "shards"))


def files(folder: str | Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def spelled(store: ShardStore, name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a file in a store's folder, as somebody could write it."""
    if how == "relative":
        monkeypatch.chdir(tmp_path)
        return os.path.relpath(f"{store.url}/{name}")
    if how == "link to the folder":
        (tmp_path / "link").symlink_to(store.url)
        return str(tmp_path / "link" / name)
    if how == "link to the file":
        (tmp_path / "link.json").symlink_to(f"{store.url}/{name}")
        return str(tmp_path / "link.json")
    if how == "dots":
        return f"{store.url}/../{os.path.basename(store.url)}/./{name}"
    return f"file://{store.url}/{name}" if how == "URL" else f"{store.url}/{name}"


@pytest.mark.parametrize("how", ["path", "URL", "dots", "relative", "link to the folder", "link to the file"])
@pytest.mark.parametrize("name", ["acts000001.bin", "metadata.json", "shards.json", "labels.bin", "new.json"])
def test_no_reference_replaces_a_file_of_the_store(
    store: ShardStore, name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = spelled(store, name, how, tmp_path, monkeypatch), files(store.url)
    with pytest.raises(ArgumentError) as caught:
        store.to_kerchunk(path)
    assert (caught.value.where, caught.value.remedy) == ("path", OUTSIDE)
    assert caught.value.message == f"{path!r} is in the folder of a store, whose files no export replaces"
    assert files(store.url) == before


@pytest.mark.parametrize("format", ["kerchunk", "tensorstore"])
@pytest.mark.parametrize("name", ["acts000001.bin", "metadata.json"])
def test_the_command_neither(
    store: ShardStore, name: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(store.url)
    assert main(["export", store.url, f"{store.url}/{name}", "--format", format]) == 2
    assert capsys.readouterr().err == (
        f"error: OUT: '{store.url}/{name}' is in the folder of a store, whose files no export replaces. {OUTSIDE}\n"
    )
    assert files(store.url) == before


def test_nor_one_below_the_folder_or_one_of_another_store(store: ShardStore, tmp_path: Path) -> None:
    other = plain_store(LAYOUT, seed=2).write(tmp_path / "others")
    (Path(store.url) / "mine").mkdir()
    for path in (f"{store.url}/mine/x.json", f"{other}/acts000000.bin"):
        with pytest.raises(ArgumentError, match="is in the folder of a store"):
            store.to_kerchunk(path)
    assert not (Path(store.url) / "mine" / "x.json").exists()
    assert ShardStore.open(other).validate(deep=True, progress=False).ok


def test_elsewhere_a_file_of_a_store_is_not_replaced_either() -> None:
    plain = plain_store(LAYOUT)
    folder = f"memory://h7/{plain.name}"
    target = open_transport(folder, engine="fsspec")
    assert isinstance(target, Writes)
    for name, data in plain.files.items():
        target.put(name, data)
    store = ShardStore.open(folder)
    for path in (f"{folder}/metadata.json", f"{folder}/below/x.json"):
        with pytest.raises(ArgumentError, match="is in the folder of a store"):
            store.to_kerchunk(path, base="s3://lab/s")
    store.to_kerchunk("memory://h7/x.json", base="s3://lab/s")
    store.to_kerchunk(f"{folder}.json", base="s3://lab/s")


def test_other_files_are_replaced(store: ShardStore, tmp_path: Path) -> None:
    """Beside the store's folder, and in one whose name begins as the store's."""
    beside = Path(f"{store.url}-refs")
    beside.mkdir()
    for path in (Path(store.url).parent / "refs.json", beside / "refs.json"):
        path.write_text("an earlier one")
        store.to_kerchunk(path)
        assert json.loads(path.read_text())["version"] == 1
        path.write_text("an earlier one")
        assert main(["export", store.url, str(path), "--format", "tensorstore"]) == 0
        assert set(json.loads(path.read_text())) >= {"activations", "layer"}


def test_a_url_with_a_bare_name_is_no_local_folder(
    store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    store.to_kerchunk("memory://h7-refs.json")
    there = open_transport("memory://", engine="fsspec")
    assert json.loads(there.read("h7-refs.json", max_bytes=1 << 20))["version"] == 1
    assert isinstance(there, Lists)
    assert sorted(os.listdir()) == before
    store.to_kerchunk("here.json")
    store.to_kerchunk(f"file://{tmp_path}/url.json")
    assert sorted(os.listdir()) == sorted([*before, "here.json", "url.json"])


@pytest.mark.parametrize("path", [5, None, b"x", "", "a\0b", "/", "s3://"])
def test_what_names_no_file_is_refused_as_such(store: ShardStore, path: Any) -> None:
    with pytest.raises(SaevStoreError) as caught:
        write_kerchunk(store, path)
    assert (type(caught.value), caught.value.where) == (ArgumentError, "path")
    with pytest.raises(ArgumentError):
        store.to_kerchunk(path)


@pytest.mark.parametrize("path", [5, None, b"x", "", "a\0b"])
def test_what_names_no_folder_is_refused_as_such(store: ShardStore, path: Any) -> None:
    pytest.importorskip("fastparquet")
    with pytest.raises(ArgumentError) as caught:
        store.to_kerchunk(path, format="parquet")
    assert caught.value.where == "path"


def icechunk_needed() -> None:
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")


@pytest.mark.parametrize("target", [5, None, b"x", "", "a\0b", ["x"]])
def test_what_names_no_repository_is_refused_as_such(store: ShardStore, target: Any) -> None:
    icechunk_needed()
    with pytest.raises(ArgumentError) as caught:
        store.to_icechunk(target)
    assert caught.value.where == "target"


@pytest.mark.parametrize("container", [5, "s3://lab", {}])
def test_what_is_no_container_is_refused_as_such(store: ShardStore, tmp_path: Path, container: Any) -> None:
    icechunk_needed()
    with pytest.raises(ArgumentError) as caught:
        store.to_icechunk(tmp_path / "r", container=container)
    assert caught.value.where == "container"
    assert not (tmp_path / "r").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place that nobody can write to")
def test_a_repository_where_nothing_can_be_written(store: ShardStore, capfd: pytest.CaptureFixture[str]) -> None:
    """Icechunk would panic, and print where."""
    icechunk_needed()
    assert main(["export", store.url, "/proc/saev-store/r", "--format", "icechunk"]) == 1
    printed = capfd.readouterr().err
    assert printed == "error: /proc/saev-store/r: could not write: No such file or directory (ENOENT)\n"


@pytest.mark.parametrize("call", ["mkdir", "scandir"])
def test_a_folder_that_the_system_refuses(
    store: ShardStore, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    icechunk_needed()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(AccessError) as caught:
        store.to_icechunk(tmp_path / ("new" if call == "mkdir" else "there"))
    assert "Permission denied (EACCES)" in caught.value.message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("  x object store error: No space left\n  | at y", "object store error: No space left"),
        (
            'failed to create: ICError { kind: Other("No such file (os error 2)"), context: SpanTrace [{ target: "x" }] }',
            'failed to create: Other("No such file (os error 2)")',
        ),
    ],
)
def test_what_icechunk_says_is_one_sentence(text: str, sentence: str) -> None:
    assert _sentence(RuntimeError(text)) == sentence


@pytest.mark.parametrize("there", [".saev_store/claim.json", "acts000000.bin"])
@pytest.mark.parametrize("name", ["acts000000.bin", "new.json"])
def test_no_reference_replaces_what_a_writer_has_begun(
    store: ShardStore, name: str, there: str, tmp_path: Path
) -> None:
    """The folder of a store that is not published yet has no documents."""
    begun = tmp_path / "begun"
    (begun / there).parent.mkdir(parents=True)
    (begun / there).write_bytes(b"{}")
    before = files(begun)
    with pytest.raises(ArgumentError, match="is in the folder of a store"):
        store.to_kerchunk(begun / name)
    for form in ("kerchunk", "tensorstore"):
        assert main(["export", store.url, str(begun / name), "--format", form]) == 2
    assert files(begun) == before


@pytest.mark.parametrize("how", ["in", "over", "over another"])
def test_no_folder_of_an_export_is_made_in_a_store(store: ShardStore, how: str, tmp_path: Path) -> None:
    target = f"{store.url}/labels" if how == "in" else store.url
    if how == "over another":
        target = str(plain_store(LAYOUT, seed=2).write(tmp_path / "others"))
    before = files(tmp_path)
    with pytest.raises(ArgumentError, match="is in the folder of a store"):
        store.to_kerchunk(target, format="parquet")
    with pytest.raises(SaevStoreError):
        store.to_icechunk(target)
    assert files(tmp_path) == before


@pytest.mark.skipif(os.name == "nt" or os.uname().sysname == "Darwin", reason="file systems there take no such name")
def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    folder = plain_store(LAYOUT, labelled=True, tail="cut").write(tmp_path / "caf\udce9")
    store = ShardStore.open(folder)
    for export in (
        lambda: store.to_kerchunk(tmp_path / "refs", format="parquet"),
        lambda: store.to_virtual_dataset(chunks=(1, 1, 4, 8)),
        lambda: store.to_icechunk(str(tmp_path / "repository")),
    ):
        with pytest.raises(ArgumentError, match="has bytes that are not UTF-8, which this format cannot hold"):
            export()
    store.to_kerchunk(tmp_path / "refs.json")
    (tmp_path / "link").symlink_to(os.fsencode(folder))
    with pytest.warns(SaevStoreWarning, match="folder is named 'link'"):
        linked = ShardStore.open(tmp_path / "link")
    assert linked.to_virtual_dataset(chunks=(1, 1, 4, 8))["activations"].shape == store.shape
