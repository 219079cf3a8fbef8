"""Stores in archives, in folders of other file systems and behind caches: their names, their copies, their bytes."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store.store.listing import list_stores
from saev_store.transport import open_transport
from saev_store.writer import copy_store


@pytest.fixture
def plains(tmp_path: Path) -> list[Plain]:
    return [plain_store(tmp_path / "root", seed=seed, layers=(seed, 7)) for seed in (0, 1)]


def zipped(path: Path, folder: Path, *, below: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            if file.is_file():
                archive.write(file, f"{below}{file.relative_to(folder)}")
    return path


@pytest.mark.parametrize("below", ["", "data/"])
def test_stores_of_an_archive_keep_their_names(plains, tmp_path, below):
    archive = zipped(tmp_path / "two.zip", tmp_path / "root", below=below)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plain in plains:
            store = ShardStore.open(f"zip://{below}{plain.path.name}::{archive}")
            assert store.name == plain.path.name
            np.testing.assert_array_equal(store[...], plain.acts)
            copy_store(store.url, tmp_path / "copies", progress=False)
            np.testing.assert_array_equal(ShardStore.open(tmp_path / "copies" / plain.path.name)[...], plain.acts)
        root = open_transport(f"zip://{below.rstrip('/')}::{archive}")
        assert sorted(entry.name for entry in list_stores(root)) == sorted(plain.path.name for plain in plains)
        for plain in plains:  # an address that is shown can be opened
            url = root.at(plain.path.name).url
            assert url == f"zip://{below}{plain.path.name}::{archive}"
            assert ShardStore.open(url).name == plain.path.name


@pytest.mark.parametrize("ending", ["zip", "ZIP"])
def test_a_store_that_is_an_archive_is_named_like_it(plains, tmp_path, ending):
    path = plains[0].path
    archive = zipped(tmp_path / f"{path.name}.{ending}", path, below="")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ShardStore.open(f"zip://::{archive}").name == path.name


def test_a_tar_of_a_folder_from_within_has_its_names_below_a_dot(plains, tmp_path):
    """`shutil.make_archive`, like `tar cf x.tar .`, writes `./` before each name."""
    archive = shutil.make_archive(str(tmp_path / "two"), "tar", tmp_path / "root")
    for plain in plains:
        store = ShardStore.open(f"tar://./{plain.path.name}::file://{archive}")
        assert store.name == plain.path.name
        np.testing.assert_array_equal(store[...], plain.acts)
    root = open_transport(f"tar://./::file://{archive}")
    assert sorted(entry.name for entry in list_stores(root)) == sorted(plain.path.name for plain in plains)


def test_a_store_in_a_folder_of_another_file_system(plains, tmp_path):
    path = plains[0].path
    store = ShardStore.open(f"dir://{path.name}::file://{path.parent}")
    assert store.name == path.name
    assert Path(copy_store(store.url, tmp_path / "copies", progress=False)).name == path.name


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_a_cache_in_front_of_a_server_that_lists_folders_without_sizes(plains, tmp_path, cache):
    pytest.importorskip("aiohttp")
    path = plains[0].path
    handler = functools.partial(QuietHandler, directory=str(path.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"{cache}::http://127.0.0.1:{server.server_port}/{path.name}"
        store = ShardStore.open(url, {cache: {"cache_storage": str(tmp_path / "cache")}})
        np.testing.assert_array_equal(store[...], plains[0].acts)
    finally:
        server.shutdown()
        server.server_close()
