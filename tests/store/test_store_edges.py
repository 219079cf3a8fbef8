"""Edges of an opened store: what is fresh, equal, refused, listed and released; against dense NumPy and literals."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import tracemalloc
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, plain_store
from plain_stores import plain_store as numbered_store
from token_stores import token_store
from transports import CountingTransport

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    MissingShardError,
    NotFoundError,
    SelectionError,
    TokenArrayNotFoundError,
)
from saev_store.loaders import Loader, stage
from saev_store.names import CLAIM_PATH
from saev_store.problems import Problem
from saev_store.store import card
from saev_store.store import identity as _identity
from saev_store.store.identity import recording_identity
from saev_store.store.sizes import sizes_by_dtype
from saev_store.transport import ReadCost, Transport
from saev_store.transport.local import LocalTransport

LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


class Far(MemoryTransport):
    """Memory that is read like a bucket."""

    is_local = False
    cost = ReadCost(0, 1 << 20)


@pytest.fixture
def plain() -> PlainStore:
    return plain_store(LAYOUT, labelled=True)


def opened(transport: Transport, **options: object) -> ShardStore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # what is in memory has no name
        return ShardStore.open(transport, **options)


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


# -- keys --------------------------------------------------------------------------------------------------------------


class Tensor:
    """Like a tensor of torch, which calls itself an integer where it has one number, whatever its dimensions, and also where it is a mask."""

    def __init__(self, values: object) -> None:
        self._values = np.asarray(values)
        self.ndim, self.shape, self.dtype = self._values.ndim, self._values.shape, self._values.dtype

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self._values

    def __index__(self) -> int:
        if self._values.size != 1:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self._values.reshape(()))


@pytest.mark.parametrize("values", [3, [3], [3, 1], -1, [False] * 7, [True] + [False] * 6])
def test_tensors_of_one_number_are_what_arrays_of_their_dimensions_are(
    values: object, plain: PlainStore, tmp_path: Path
):
    """A store lost the axis of a list of one, and rows had one for a number: the last of `randperm(n).split(2)` was another shape."""
    store, index = ShardStore.open(plain.write(tmp_path)), np.asarray(values)
    rows = store.sel(layer=5, tokens="special")
    same_bits(store[Tensor(values)], plain.dense[index])
    same_bits(store[:, Tensor([1])], plain.dense[:, [1]])
    same_bits(rows[Tensor(values)], plain.dense[:, 1, 0][index])


def test_masks_of_one_are_masks_and_truth_is_no_position(tmp_path: Path):
    store = ShardStore.open(plain_store(Layout(1, (2,), 4, True, 8, 1)).write(tmp_path))
    assert len(store[Tensor([False])]) == 0
    assert store.sel(layer=2, examples=Tensor([False])).shape == (0, 8)
    for item in (store, store.sel(layer=2)):
        with pytest.raises(SelectionError, match="dtype bool"):
            item[Tensor(values=True)]


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_positions_of_a_vector_end_where_the_tensor_does(engine: str, plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path), engine=engine)
    for axis, n in enumerate((7, 3, 5)):
        for at in (-n - 1, -n, -1, 0, n - 1, n, n + 1):
            key = tuple(at if other == axis else 1 for other in range(3))
            if -n <= at < n:
                same_bits(store[key], plain.dense[key])
            else:
                with pytest.raises(IndexError):
                    store[key]


@pytest.mark.parametrize("key", [(True, 0, 0), (0, True, 0), (0, 0, True), (np.True_, 0, 0), (False, 0, 0)])
def test_a_boolean_is_no_position(key: tuple[object, ...], plain: PlainStore, tmp_path: Path):
    """NumPy takes it for a mask without an axis, which is refused here; it is never 0 or 1."""
    with pytest.raises(SelectionError, match=r"(?i)bool|mask"):
        ShardStore.open(plain.write(tmp_path))[key]


def test_a_single_number_is_a_scalar_unless_memory_was_given(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    key = (4, 1, 2, 3)
    assert type(store[key]) is np.float32
    assert store[key].tobytes() == plain.dense[key].tobytes()
    out = np.empty((), np.float32)
    assert store.read(key, out=out) is out
    assert out.tobytes() == plain.dense[key].tobytes()


def test_arrays_of_the_store_are_of_the_type_that_was_asked_for(plain: PlainStore, tmp_path: Path):
    layout = Layout(3, (2,), 4, False, 8, 3)
    one = plain_store(layout)
    store = ShardStore.open(one.write(tmp_path))
    with np.errstate(all="ignore"):
        assert store.__array__(np.dtype(np.float64)).dtype == np.float64
        assert np.asarray(store, dtype=np.float64).dtype == np.float64
    assert np.shares_memory(np.asarray(store), store.as_numpy(copy=False))
    fresh = store.__array__(copy=True)
    assert fresh.flags.writeable
    assert not np.shares_memory(fresh, store.as_numpy(copy=False))
    with pytest.raises(ArgumentError, match="copy=False"):
        ShardStore.open(plain.write(tmp_path)).__array__(copy=False)
    with pytest.raises(ValueError, match="copy=False: numbers of float32 become float64 in a copy only"):
        np.array(store, dtype=np.float64, copy=False)
    assert np.shares_memory(np.array(store, dtype=np.float32, copy=False), store.as_numpy(copy=False))


# -- selections --------------------------------------------------------------------------------------------------------


def test_rows_that_are_not_contiguous_are_no_view(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    inside = {"examples": slice(3, 6)}
    for rows in (
        store.sel(layer=5, tokens="content", **inside),  # gaps between the examples
        store.sel(layer=[2, 11], **inside),
        store.sel(layer=[11, 2], **inside),
        store.sel(layer=[2, 5, 11], tokens="content", ignore_labels=[0], **inside),
    ):
        with pytest.raises(ArgumentError, match="copy=False"):
            rows.as_numpy(copy=False)
        for copy in (None, True):
            found = rows.as_numpy(copy=copy)
            assert found.flags.writeable
            same_bits(found, rows.rows(range(len(rows))))
    whole = store.sel(examples=slice(3, 6))
    same_bits(whole.as_numpy(copy=False), plain.dense[3:6].reshape(-1, 8))
    assert not whole.as_numpy(copy=False).flags.writeable
    assert whole.as_numpy(copy=True).flags.writeable


def test_layers_of_a_selection_keep_their_order(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    for layers, positions in (([11, 2], [2, 0]), ([11, 5, 2], [2, 1, 0]), ([5, 2, 11], [1, 0, 2])):
        rows = store.sel(layer=layers, tokens="all")
        assert rows.layers == tuple(layers)
        assert rows.nbytes == rows.as_numpy().nbytes == 7 * len(layers) * 5 * 8 * 4
        same_bits(rows.as_numpy(), plain.dense[:, positions].reshape(-1, 8))


@pytest.mark.parametrize("row", [3, np.int32(3), np.array(3)])
def test_one_row_is_a_vector(row: object, plain: PlainStore, tmp_path: Path):
    same_bits(ShardStore.open(plain.write(tmp_path)).sel(layer=5)[row], plain.dense[0, 1, 3])


def test_memory_that_may_not_be_written_is_refused(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    out = np.empty((5, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="writable"):
        store.read((0, 0), out=out)
    with pytest.raises(ArgumentError, match="writable"):
        store.sel(layer=2).rows(slice(5), out=out)


def test_an_estimate_of_some_rows_is_of_these_rows(plain: PlainStore, tmp_path: Path):
    rows = ShardStore.open(plain.write(tmp_path), engine="pread").sel(layer=5)
    assert rows.estimate([0, 4, 4]).bytes_wanted == 3 * 32
    assert rows.estimate(slice(2, 5)).bytes_wanted == 3 * 32
    assert rows.estimate().bytes_wanted == len(rows) * 32


# -- what is opened ----------------------------------------------------------------------------------------------------


def test_stores_are_equal_where_address_and_documents_are(plain: PlainStore, tmp_path: Path):
    one, two = (ShardStore.open(plain.write(tmp_path / name)) for name in "ab")
    again = ShardStore.open(one.url)
    assert one == again
    assert hash(one) == hash(again)
    assert one != two
    assert one != one.url
    other = dict(plain.files)
    other["metadata.json"] = other["metadata.json"].replace(b"random/0", b"random/1")
    here, there = (opened(MemoryTransport(files, label="x")) for files in (plain.files, other))
    assert here.url == there.url
    assert here != there


def test_a_far_folder_with_another_name_is_remarked(plain: PlainStore):
    with pytest.warns(SaevStoreWarning, match="renamed"):
        store = ShardStore.open(Far(plain.files, label="birds"))
    assert [problem.kind for problem in store.problems] == ["hash_mismatch"]
    assert ShardStore.open(Far(plain.files, label=plain.name)).problems == ()


def test_a_report_is_of_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where another one has files of the same sizes and times: what is lost here may be whole there."""
    plain, facts = plain_store(LAYOUT), _identity._facts
    # Nobody can choose the time of a change.
    monkeypatch.setattr(_identity, "_facts", lambda transport, name: (facts(transport, name)[0], "1", ""))
    stores = []
    for name in "ab":
        folder = plain.write(tmp_path / name)
        os.truncate(folder / "acts000001.bin", 0)
        stores.append(ShardStore.open(folder, damaged_ok=True))
    one, other = (store.validate() for store in stores)
    assert one.recording == other.recording
    with pytest.raises(ArgumentError, match="another store"):
        stores[1].repair(one)
    with stores[1].repair(other, on_nonfinite="allow") as writer:
        writer.append(plain.dense[3:6])
    same_bits(ShardStore.open(stores[1].url)[...], plain.dense)


def test_labels_of_a_damaged_store_that_have_a_wrong_size_never_come_out(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    (folder / "acts000001.bin").unlink()
    (folder / "labels.bin").write_bytes(plain.files["labels.bin"] + b"\0")
    with pytest.raises(MissingShardError):
        ShardStore.open(folder)
    store = ShardStore.open(folder, damaged_ok=True)
    for _ in range(2):
        with pytest.raises(DocumentError) as refused:
            _ = store.has_labels
        assert refused.value.where == f"{folder}/labels.bin"
    same_bits(store[0], plain.dense[0])


def test_labels_alone_are_a_fault_of_a_document(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    os.truncate(folder / "labels.bin", 3)
    with pytest.raises(DocumentError, match=r"labels\.bin"):
        ShardStore.open(folder)
    os.truncate(folder / "acts000001.bin", 3)
    with pytest.raises(CorruptShardError) as refused:
        ShardStore.open(folder)
    assert not isinstance(refused.value, DocumentError)


@pytest.mark.parametrize("n_missing", [7, 8, 9])
def test_at_most_eight_problems_are_shown_and_the_others_counted(n_missing: int, tmp_path: Path):
    folder = plain_store(Layout(12, (2,), 1, False, 2, 1)).write(tmp_path)
    for shard in range(n_missing):
        (folder / f"acts{shard:06d}.bin").unlink()
    with pytest.raises(MissingShardError) as refused:
        ShardStore.open(folder)
    message = str(refused.value)
    assert message.count("examples ") == min(n_missing, 8)
    assert ("more" in message) == (n_missing > 8)
    if n_missing > 8:
        assert f"and {n_missing - 8} more" in message


@pytest.mark.parametrize("n_examples", [7, 8, 9])
@pytest.mark.parametrize("left", [(2, 0, 3), (3, 3, 0), (0, 1, 1), (1, 3, 2)])
def test_what_is_left_of_each_shard(n_examples: int, left: tuple[int, int, int], tmp_path: Path):
    """Of neighbouring shards, of the last one, and of those whose loss begins in the middle."""
    layout = Layout(n_examples, (2, 5, 11), 4, True, 8, 3)
    plain = plain_store(layout, tail="cut")
    folder = plain.write(tmp_path)
    for shard, n in enumerate(left):
        if n < 3:
            with (folder / f"acts{shard:06d}.bin").open("r+b") as file:
                file.truncate(min(n * layout.example_nbytes, os.fstat(file.fileno()).st_size))
    store = ShardStore.open(folder, damaged_ok=True)
    assert dict(store.readable_examples) == {shard: n for shard, n in enumerate(left) if n < layout.examples_in(shard)}
    for example in range(n_examples):
        if example % 3 >= left[example // 3]:
            with pytest.raises(CorruptShardError, match=f"example {example} was lost"):
                store[example]
        else:
            same_bits(store[example], plain.dense[example])


def test_documents_alone_are_a_store_of_which_all_is_lost(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    for shard in folder.glob("acts*"):
        shard.unlink()
    with pytest.raises(MissingShardError, match="missing_shard acts000000.bin"):
        ShardStore.open(folder)
    store = ShardStore.open(folder, damaged_ok=True)
    assert dict(store.readable_examples) == {0: 0, 1: 0, 2: 0}
    assert np.array_equal(store.labels, plain.labels)
    for example in range(7):
        with pytest.raises(CorruptShardError, match=f"example {example} was lost.*only the first 0 can be read"):
            store[example]
    (entry,) = ShardStore.list(tmp_path)
    assert (entry.state, entry.note) == ("damaged", "7 of 7 examples lost")


@pytest.mark.parametrize("engine", ["mmap", "fsspec"])
def test_a_folder_with_a_writers_claim_alone_was_never_published(engine: str, tmp_path: Path):
    claim = tmp_path / "crashed" / CLAIM_PATH
    claim.parent.mkdir(parents=True)
    claim.write_text("{}")
    with pytest.raises(IncompleteStoreError, match="never published"):
        ShardStore.open(tmp_path / "crashed", engine=engine)


def test_closing_gives_back_maps_and_labels(plain: PlainStore, tmp_path: Path):
    """What is read afterwards is read from the files: of other ones that is an error, until the store is opened again."""
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder)
    same_bits(store[3:6], plain.dense[3:6])
    assert store.labels is not None
    store.close()
    other = plain_store(LAYOUT, seed=1, labelled=True)
    for name in ("acts000001.bin", "labels.bin"):
        (folder / "new").write_bytes(other.files[name])
        os.replace(folder / "new", folder / name)
    for read in (lambda: store[3:6], lambda: store[4, 1, 2], lambda: store.labels):
        with pytest.raises(CorruptShardError, match="when the store was opened"):
            read()
    store = ShardStore.open(folder)
    same_bits(store[3:6], other.dense[3:6])
    assert np.array_equal(store.labels, other.labels)


def test_a_store_without_maps_is_the_same_store(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    unmapped = store.unmapped()
    assert (store.transport.name, unmapped.transport.name) == ("mmap", "pread")
    assert unmapped == store
    same_bits(unmapped[3:6], plain.dense[3:6])
    assert unmapped.unmapped() is unmapped


# -- identity ----------------------------------------------------------------------------------------------------------


def test_the_same_files_cut_otherwise_are_another_recording(tmp_path: Path):
    """Digests of equal bytes are equal; what they mean is decided by the geometry."""
    plain = plain_store(LAYOUT)
    transport = MemoryTransport(plain.files)
    layouts = [
        LAYOUT,
        Layout(7, (2, 5, 11), 4, True, 8, 4),
        Layout(7, (2, 5, 11), 9, True, 4, 3),
    ]
    files = ["acts000000.bin"]
    assert len({recording_identity(transport, layout, files=files) for layout in layouts}) == 3


def test_versions_that_some_files_lack_are_not_used(plain: PlainStore):
    """Else a file without one could be replaced unnoticed under an identity that says otherwise."""

    class Some(CountingTransport):
        def version(self, path: str) -> str | None:
            return "1" if path == "acts000000.bin" else None

    assert recording_identity(Some(MemoryTransport(plain.files)), LAYOUT).kind == "sizes"


def test_where_versions_are_preferred_and_not_told_digests_are_next(tmp_path: Path):
    stored = numbered_store(tmp_path)
    stored.write_digests(64)
    far = CountingTransport(MemoryTransport({path.name: path.read_bytes() for path in stored.path.iterdir()}))
    layout = ShardStore.open(stored.path).layout
    found = recording_identity(far, layout, prefer="versions")
    assert found == recording_identity(far, layout)
    assert found.kind == "digests"


def test_a_file_that_is_missing_differs_from_an_empty_one(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder)
    (folder / "acts000002.bin").write_bytes(b"")
    os.utime(folder / "acts000002.bin", ns=(1, 1))
    empty = recording_identity(store.transport, LAYOUT)
    (folder / "acts000002.bin").unlink()
    missing = recording_identity(store.transport, LAYOUT)
    assert empty.kind == missing.kind == "versions"
    assert empty != missing


# -- listing and cards -------------------------------------------------------------------------------------------------


def test_the_loss_of_several_shards_is_counted_once(tmp_path: Path):
    folder = plain_store(LAYOUT).write(tmp_path)
    os.truncate(folder / "acts000000.bin", LAYOUT.example_nbytes)
    (folder / "acts000001.bin").unlink()
    (entry,) = ShardStore.list(tmp_path)
    assert (entry.state, entry.note) == ("damaged", "5 of 7 examples lost")


def test_damage_that_loses_no_example_is_named(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    os.truncate(folder / "labels.bin", 3)
    (entry,) = ShardStore.list(tmp_path)
    assert entry.state == "damaged"
    assert "labels.bin" in entry.note or "3 bytes" in entry.note


def test_a_list_as_text(tmp_path: Path):
    metadata = {
        "family": "gpt2", "ckpt": "<tiny>", "layers": (3, 7), "content_tokens_per_example": 4, "cls_token": False, "d_model": 8,
        "n_examples": 6,
    }  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.zeros((6, 2, 4, 8), np.float32))
    (whole,) = found = ShardStore.list(tmp_path)
    assert str(whole) == f"{whole.name}  6 x 2 x 4 x 8  1.5 KiB  layers [3, 7]  <tiny>"
    assert repr(found) == f"1 store in {tmp_path}\n  {whole}"
    shown = str(whole).replace("<tiny>", "&lt;tiny&gt;")
    assert found._repr_html_() == f"<p>1 store in <code>{tmp_path}</code></p><ul><li><code>{shown}</code></li></ul>"
    begun = ShardStore.create(tmp_path, {**metadata, "ckpt": "other"}, progress=False)
    begun.close()
    (tmp_path / "empty" / CLAIM_PATH).parent.mkdir(parents=True)
    (tmp_path / "empty" / CLAIM_PATH).write_bytes(b"{}")
    texts = {entry.name: str(entry) for entry in ShardStore.list(tmp_path)}
    name = Path(begun.url).name
    assert texts == {
        whole.name: str(whole),
        name: f"{name}  6 x 2 x 4 x 8  1.5 KiB  layers [3, 7]  other  unfinished: not published yet; create(…, resume=True) "
        "continues it",
        "empty": "empty  unfinished: its metadata cannot be read",
    }
    assert repr(ShardStore.list(tmp_path)).startswith(f"3 stores in {tmp_path}\n")


def test_what_is_only_remarkable_is_no_damage(plain: PlainStore, tmp_path: Path):
    """Another name, a link, a file that does not belong there."""
    folder = plain.write(tmp_path / "root").rename(tmp_path / "root/renamed")
    (tmp_path / "root/a-file").write_text("no folder")
    (folder / "acts000001.bin").rename(tmp_path / "elsewhere.bin")
    (folder / "acts000001.bin").symlink_to(tmp_path / "elsewhere.bin")
    (folder / "acts000009.bin").write_bytes(b"more")
    with pytest.warns(SaevStoreWarning):
        store = ShardStore.open(folder)
    assert {problem.severity for problem in store.problems} <= {"info", "warning"}
    assert "unlisted_shard" in {problem.kind for problem in store.problems}
    (entry,) = ShardStore.list(tmp_path / "root")
    assert (entry.name, entry.state, entry.note) == ("renamed", "complete", "")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1025, "1.0 KiB"), (1024**2 - 1, "1024.0 KiB"),
        (1024**2, "1.0 MiB"), (1024**3, "1.0 GiB"), (1024**4, "1.0 TiB"), (1024**5, "1.0 PiB"), (1024**6, "1024.0 PiB"),
    ],
)  # fmt: skip
def test_bytes_as_text(nbytes: int, text: str):
    assert card.human_bytes(nbytes) == text


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 7])
def test_a_card_shows_five_problems_and_counts_the_others(n: int, plain: PlainStore):
    store = opened(MemoryTransport(plain.files))
    problems = [Problem("kind", f"problem number {i}", "x") for i in range(n)]
    text = card.card_text(
        "x", card.card_rows(store.metadata, store.transport, problems, token_arrays=store.token_arrays)
    )
    assert text.count("problem number") == min(n, 5)
    assert ("none known" in text) == (n == 0)
    assert ("more in store.problems" in text) == (n > 5)
    assert n <= 5 or f"and {n - 5} more" in text


@pytest.mark.parametrize(("n_examples", "tail"), [(6, ""), (7, ", 1 in the last"), (5, ", 2 in the last")])
def test_a_card_says_how_full_the_last_shard_is(n_examples: int, tail: str):
    layout = Layout(n_examples, (2, 5, 11), 4, True, 8, 3)
    store = opened(MemoryTransport(plain_store(layout).files))
    (line,) = [line for line in repr(store).splitlines() if line.strip().startswith("shards")]
    assert line.endswith(f"of 3 examples{tail}")


def test_nothing_of_a_document_is_markup_in_a_card(plain: PlainStore):
    metadata = json.loads(plain.files["metadata.json"])
    metadata |= {"vit_family": "<i>", "vit_ckpt": "<b>&"}
    files = plain.files | {"metadata.json": json.dumps(metadata).encode()}
    page = opened(MemoryTransport(files, label="<x>"))._repr_html_()
    assert not {"<i>", "<b>", "<x>"} & {page[at : at + 3] for at in range(len(page))}
    assert "&lt;b&gt;&amp;" in page


def test_a_folder_that_is_not_there_is_told_from_one_that_is_no_store(tmp_path):
    with pytest.raises(NotFoundError, match="there is no such folder"):
        ShardStore.open(tmp_path / "absent")
    with pytest.raises(NotFoundError, match="there is no metadata.json"):
        ShardStore.open(tmp_path)


WIDE_READS = {
    "read": lambda store: store[0],
    "zarr": lambda store: store.as_zarr(),
    "xarray": lambda store: store.as_xarray(),
    "stats": lambda store: store.stats(save=False, progress=False),
    "sample": lambda store: store.stats(sample=1, save=False, progress=False),
    "ordered": lambda store: next(iter(Loader(store.sel(), batch_size=4, order="stored"))),
    "shuffled": lambda store: next(iter(Loader(store.sel(), batch_size=4, window_bytes=1 << 16))),
}


@pytest.mark.parametrize("what", WIDE_READS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_far_document_that_promises_many_tokens_takes_no_memory(plain, dtype, what):
    """A far store's shards are not looked at when it is opened: two small files could ask for all of a machine's memory."""
    n_tokens = 4_000_000
    metadata = new_metadata(
        family="f", ckpt="c", layers=[1, 2], content_tokens_per_example=n_tokens, cls_token=False, d_model=1, n_examples=2,
        max_tokens_per_shard=4 * n_tokens, dtype=dtype,
    )  # fmt: skip
    shards = json.dumps([{"name": "acts000000.bin", "n_examples": 2}]).encode()
    files = {"metadata.json": metadata.raw, "shards.json": shards, "acts000000.bin": bytes(64)}
    with ShardStore.open(Far(files, label=metadata.hash)) as store:
        WIDE_READS[what](ShardStore.open(Far(plain.files, label=plain.name)))  # imports take memory, too
        tracemalloc.start()
        try:
            with pytest.raises(CorruptShardError, match="acts000000.bin"):
                WIDE_READS[what](store)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()


def far_store_that_promises(n_examples: int) -> ShardStore:
    """Its shard has 64 bytes."""
    metadata = new_metadata(
        family="f", ckpt="c", layers=[1, 2], content_tokens_per_example=16, cls_token=False, d_model=1,
        n_examples=n_examples, max_tokens_per_shard=32 * n_examples,
    )  # fmt: skip
    shards = json.dumps([{"name": "acts000000.bin", "n_examples": n_examples}]).encode()
    files = {"metadata.json": metadata.raw, "shards.json": shards, "acts000000.bin": bytes(64)}
    return ShardStore.open(Far(files, label=metadata.hash))


def test_a_token_array_that_is_not_there_is_named_with_those_that_are(tmp_path):
    arrays = ShardStore.open(token_store(tmp_path, arrays={"labels": "uint8"}).path).token_arrays
    for ask in (lambda: arrays["nix"], lambda: arrays.declared("nix")):
        with pytest.raises(TokenArrayNotFoundError, match=r"no token array 'nix'; it has \['labels'\]"):
            ask()
    assert arrays.get("nix") is None
    assert issubclass(TokenArrayNotFoundError, KeyError)


HUGE_ARRAYS = {
    "coordinates": lambda store: store.sel().coordinates(),
    "coordinates of a slice": lambda store: store.sel(layer=2).coordinates(slice(1, None, 3)),
    "points": lambda store: store[:, [0, 1], [2, 3]],
}


@pytest.mark.parametrize("n_examples", [2**50, 2**55])
@pytest.mark.parametrize("what", HUGE_ARRAYS)
def test_arrays_for_all_rows_of_a_far_store_that_promises_too_many_are_refused(what: str, n_examples: int):
    with (
        far_store_that_promises(n_examples) as store,
        pytest.raises(ArgumentError),
    ):
        HUGE_ARRAYS[what](store)


@pytest.mark.parametrize("n_examples", [2**40, 2**55])
@pytest.mark.parametrize("order", ["stored", "shuffled"])
def test_a_loader_of_a_far_store_that_promises_too_many_looks_at_a_file_first(order, n_examples: int):
    with far_store_that_promises(n_examples) as store, pytest.raises(CorruptShardError, match="64 bytes"):
        Loader(store.sel(layer=2), batch_size=1024, order=order)


@pytest.mark.parametrize("n_examples", [2**50, 2**55])
@pytest.mark.parametrize("key", [..., np.s_[:, 0]], ids=["all", "layer"])
def test_an_estimate_of_a_far_store_that_promises_too_many_looks_at_a_file_first(key, n_examples: int):
    with far_store_that_promises(n_examples) as store, pytest.raises(CorruptShardError, match="64 bytes"):
        store.estimate(key)


def test_room_for_many_more_examples_costs_nothing(tmp_path):
    """A shard may hold 3e14 examples, and there are seven."""
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[1, 2], n_examples=7, content_tokens_per_example=3, d_model=8, cls_token=False,
        max_tokens_per_shard=10**15,
    )  # fmt: skip
    acts = np.arange(7 * 2 * 3 * 8, dtype=np.float32).reshape(7, 2, 3, 8)
    with ShardStore.create(tmp_path, metadata, pad=False) as writer:
        writer.append(acts)
    store = ShardStore.open(tmp_path / metadata.hash)
    views = [library for library in ("dask.array", "xarray") if find_spec(library.partition(".")[0])]
    for library in views:  # what imports take is not looked at
        importlib.import_module(library)
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(store[:], acts)
        assert (store.stats().count == 7 * 8).all()
        assert store.validate(deep=True).ok
        for library in views:
            view = store.as_dask() if library == "dask.array" else store.as_xarray()["activations"].data
            np.testing.assert_array_equal(view, acts)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_no_document_is_read_without_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has taken the place of a document, whatever its length, never fills the memory."""
    real, bounds = LocalTransport.read, dict[str, set[int | None]]()

    def read(self: LocalTransport, path: str, *, max_bytes: int | None = None) -> bytes:
        bounds.setdefault(path.rsplit("/", 1)[-1], set()).add(max_bytes)
        return real(self, path, max_bytes=max_bytes)

    monkeypatch.setattr(LocalTransport, "read", read)
    metadata = new_metadata(
        family="vit", ckpt="tiny", layers=[2, 5], content_tokens_per_example=4, cls_token=False, d_model=8, n_examples=6,
        max_tokens_per_shard=24,
    )  # fmt: skip
    acts, labels = np.ones((6, 2, 4, 8), np.float32), np.zeros((6, 4), np.uint8)
    with pytest.raises(IncompleteStoreError), ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts[:3], labels[:3])
    assert [entry.state for entry in ShardStore.list(tmp_path)] == ["unfinished"]
    with ShardStore.create(tmp_path, metadata, resume=True, progress=False) as writer:
        writer.append(acts[3:], labels[3:])
    path = tmp_path / metadata.hash
    stage(path, tmp_path / "near")
    stage(path, tmp_path / "near", layers=[5])
    assert len(ShardStore.list(tmp_path)) == 1
    (path / "acts000001.bin").write_bytes(b"")
    with ShardStore.open(path, damaged_ok=True) as store, store.repair() as repair:
        repair.append(acts[3:6])
    store = ShardStore.open(path)
    assert store.validate(deep=True).ok
    assert store.stats().n_examples == store.stats().n_examples == 6
    names = {"metadata.json", "shards.json", "digests.json", "stats.json", "000000.json"}
    assert names <= bounds.keys()
    assert [name for name, found in bounds.items() if None in found] == []
    assert max(max(found) for found in bounds.values()) <= 512 << 20


@pytest.mark.parametrize(("n", "rest"), [(8, ""), (9, ", … 1 more"), (12, ", … 4 more")])
def test_of_the_stores_of_a_root_eight_are_named(n: int, rest: str, tmp_path: Path):
    for idx in range(n):
        (tmp_path / f"s{idx:02d}").mkdir()
        (tmp_path / f"s{idx:02d}" / "metadata.json").write_text("{")
    with pytest.raises(NotFoundError) as caught:
        ShardStore.open(tmp_path)
    names = ", ".join(f"s{idx:02d}" for idx in range(8))
    assert f"this is no store but a folder that holds {n}: {names}{rest}. Name one of them" in str(caught.value)


def test_conditions_are_looked_at_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As many values as one example and a half: each example is a piece, or two are."""
    plain = token_store(tmp_path, n=7, content=6, arrays={"labels": "uint8", "mask": "bool", "positions": "int32"})
    labels, positions = np.arange(42, dtype=np.uint8).reshape(7, 6) % 5, np.arange(42, dtype=np.int32).reshape(7, 6) % 4
    (plain.path / "labels.bin").write_bytes(labels.tobytes())
    (plain.path / "positions.bin").write_bytes(positions.tobytes())
    stays = plain.arrays["mask"] & np.isin(positions, [1, 3]) & (labels != 2)
    for piece in (1, 6, 9, 12, 13, 41, 42, 100):
        monkeypatch.setattr("saev_store.store.token_arrays._PIECE", piece)
        rows = ShardStore.open(plain.path).sel(
            layer=5, tokens="content", where={"positions": [1, 3]}, ignore_labels=[2]
        )
        assert rows.kept.tolist() == stays.tolist()
        assert len(rows) == stays.sum()


def test_before_many_ranges_are_planned_the_first_shard_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """More than 30 are many here: a row is a range for each of its layers, 64 tokens that stay are one."""
    monkeypatch.setattr("saev_store.store.reader._WIDE", 30)
    folder = plain_store(Layout(250, (2, 5, 11), 9, True, 8, 100)).write(tmp_path)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "acts000000.bin"}
    for stack_layers, most in ((True, 10), (False, 30)):
        rows = opened(Far(files)).sel(tokens="content", stack_layers=stack_layers)
        assert rows.estimate(slice(0, most)).bytes_wanted == 30 * 32
        with pytest.raises(MissingShardError, match="examples 0 to 99 is missing"):
            rows.estimate(slice(0, most + 1))
    for key, next_key in (
        (np.s_[:2, :, :5], np.s_[:2, :, :6]),  # a range for each of some tokens
        (np.s_[:15, :2], np.s_[:16, :2]),  # for each of some layers
        (np.s_[:30], np.s_[:31]),  # for each example
    ):
        assert opened(Far(files)).estimate(key).bytes_wanted > 0
        with pytest.raises(MissingShardError, match="examples 0 to 99 is missing"):
            opened(Far(files)).estimate(next_key)
    with pytest.raises(MissingShardError, match="examples 0 to 99 is missing"):
        _ = opened(Far(files)).sel(tokens="content").kept
    monkeypatch.setattr("saev_store.store.reader._WIDE", 250 * 9 // 64)
    assert opened(Far(files)).sel(tokens="content").kept.shape == (250, 9)
    monkeypatch.setattr("saev_store.store.reader._WIDE", 100)
    assert opened(Far(files)).estimate().bytes_wanted == 250 * 3 * 10 * 32  # those of one shard are planned at once


def test_a_closed_store_forgets_which_token_arrays_it_had_read(plain: PlainStore, tmp_path: Path):
    """Else what is pickled from it later would still expect the old file."""
    store = ShardStore.open(plain.write(tmp_path))
    rows = store.sel(tokens="content")
    assert np.array_equal(store.labels, plain.labels)
    file = Path(store.url) / "labels.bin"
    before = file.stat()
    file.unlink()
    file.write_bytes((plain.labels ^ 1).tobytes())
    os.utime(file, ns=(1, 1))
    with pytest.raises(CorruptShardError, match="another file has taken the place"):
        pickle.loads(pickle.dumps(rows))
    store.close()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for arrays in (store.token_arrays, pickle.loads(pickle.dumps(rows)).token_arrays):
        assert np.array_equal(arrays["labels"], plain.labels ^ 1)


@pytest.mark.parametrize(
    ("dtype", "arrays", "said"),
    [
        ("float32", {}, "2.1 only: saev-store copy --protocol 2.1"),
        ("bfloat16", {}, "2.1 only: saev-store copy --dtype float32 --protocol 2.1"),
        ("bfloat16", {"labels": "uint8"}, "2.1 only: saev-store copy --dtype float32 --protocol 2.1"),
        ("float32", {"labels": "uint8"}, "2.1 only, which has no token arrays"),
        ("bfloat16", {"labels": "uint8", "mask": "bool"}, "2.1 only, which has no token arrays"),
    ],
)
def test_the_card_says_how_a_store_becomes_one_of_the_reference(dtype: str, arrays: dict, said: str, tmp_path: Path):
    assert f"the reference project's code reads {said}\n" in repr(
        ShardStore.open(token_store(tmp_path, dtype=dtype, arrays=arrays).path)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_a_store_takes_in_each_dtype_is_the_same_whichever_it_has(dtype: str):
    found = sizes_by_dtype(Layout(7, (2, 5, 11), 4, True, 8, 3, dtype=dtype), [TokenArray("token_ids", "int32")])
    assert {name: size.to_dict() for name, size in found.items()} == {
        name: {"vectors_nbytes": 7 * 3 * 5 * 8 * each, "token_arrays_nbytes": 112, "nbytes": 840 * each + 112}
        for name, each in (("float32", 4), ("bfloat16", 2), ("float16", 2))
    }


@pytest.mark.parametrize(
    "key",
    [np.s_[:: 10**25], np.s_[:: 10**25, [0, 1]], np.s_[[0, 1], :, :: 10**25], np.s_[:: 10**25, [0, 1], [0, 2]], np.s_[:, :, :: -(10**25)]],
    ids=str,
)  # fmt: skip
def test_steps_of_more_than_64_bits(tmp_path: Path, key: object):
    plain = numbered_store(tmp_path)
    store = ShardStore.open(plain.path)
    assert np.array_equal(store[key], plain.acts[key])
    assert store.estimate(key).bytes_wanted == plain.acts[key].nbytes
    rows = store.sel(layer=5)
    assert np.array_equal(rows[:: 10**25], rows[:1])
    assert np.array_equal(
        store.sel(layer=5, examples=slice(None, None, 10**25))[:], store.sel(layer=5, examples=[0])[:]
    )
