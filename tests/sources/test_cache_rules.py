"""Every argument of `import_cache` reaches its place, and each error of a cache names its file, its value and the remedy."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors_files import safetensors

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
)
from saev_store.sources import caches
from saev_store.sources.caches import hidden_states as hidden_states_module
from saev_store.sources.caches import import_cache
from saev_store.sources.caches._arrow import read_rows
from saev_store.sources.caches._cache import check_context, entries_of
from saev_store.sources.caches.npy import mapped
from saev_store.sources.npy_header import parse_npy_header
from saev_store.sources.safetensors import read_header
from saev_store.transport import MemoryTransport, open_transport

MODEL = {"family": "llama", "ckpt": "tiny", "progress": False}
BF16 = np.dtype(ml_dtypes.bfloat16)


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def request(n: int = 5, dtype: object = np.float32, value: float | None = None) -> dict[str, np.ndarray]:
    acts = np.arange(n * 2 * 4).reshape(n, 2, 4).astype(dtype)
    if value is not None:
        acts[1, 1, 1] = value
    return {"hidden_states": acts, "token_ids": np.arange(n)}


def write(folder: Path, *tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(tensors):
        (folder / f"hs_{number}.safetensors").write_bytes(safetensors(each))
    return folder


def imported(folder: Path, out: object, **more: Any) -> ShardStore:
    return import_cache(folder, out, **{**MODEL, "layers": [1, 2], "context": 2, **more})


# -- arguments -----------------------------------------------------------------------------------------------------------


def test_what_is_told_of_the_data_is_in_the_metadata(tmp_path: Path):
    folder = write(tmp_path / "hs", request())
    told = {"__class__": "Mine", "words": 7}
    store = imported(folder, tmp_path / "out", data=told, dataset="/data/texts", max_tokens_per_shard=4)
    data = store.metadata.data
    assert data["words"] == 7
    assert data["__class__"] == "Mine"
    assert data["imported"]["format"] == "hidden-states"
    assert data["imported"]["url"] == str(folder)
    assert {name: data["imported"]["digest"][name] for name in ("algorithm", "scope")} == {
        "algorithm": "xxh3_128", "scope": "sampled",
    }  # fmt: skip
    assert store.metadata.dataset == "/data/texts"
    assert store.layout.examples_per_shard == 1
    plain = imported(folder, tmp_path / "other")
    assert plain.metadata.data["__class__"] == "Import"
    assert plain.layout.n_shards == 1
    assert plain.metadata.data["imported"]["digest"] == data["imported"]["digest"]


def test_a_finished_import_is_opened_unless_it_must_be_new(tmp_path: Path):
    folder = write(tmp_path / "hs", request())
    first = imported(folder, tmp_path / "out")
    assert imported(folder, tmp_path / "out").url == first.url
    assert type(refused(lambda: imported(folder, tmp_path / "out", resume=False))) is StoreExistsError


@pytest.mark.parametrize(("pad", "n_vectors"), [(None, None), (True, 4), (False, 2)])
def test_the_last_shard_is_full_where_that_is_asked_for(pad: bool | None, n_vectors: int | None, tmp_path: Path):
    """Three examples of two tokens and two layers, two in a shard: the last shard has one, of 64 bytes."""
    store = imported(write(tmp_path / "hs", request(6)), tmp_path / "out", max_tokens_per_shard=8, pad=pad)
    nbytes = Path(store.url, "acts000001.bin").stat().st_size
    if n_vectors is not None:
        assert nbytes == n_vectors * 2 * 16


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(value: float, tmp_path: Path):
    folder = write(tmp_path / "hs", request(value=value))
    with pytest.raises(SaevStoreError):
        imported(folder, tmp_path / "out")
    store = imported(folder, tmp_path / "allowed", on_nonfinite="allow")
    np.testing.assert_array_equal(store.read()[0, 1, 1, 1], value)
    with pytest.warns(SaevStoreWarning, match="finite"):
        imported(folder, tmp_path / "warned", on_nonfinite="warn")


def test_numbers_that_no_float16_holds(tmp_path: Path):
    folder = write(tmp_path / "hs", request(value=1e6))
    options = {"dtype": "float16", "on_nonfinite": "allow"}
    with pytest.raises(SaevStoreError):
        imported(folder, tmp_path / "out", **options)
    store = imported(folder, tmp_path / "most", on_overflow="saturate", **options)
    assert store.read(dtype="stored")[0, 1, 1, 1] == np.finfo(np.float16).max


def test_how_a_cache_is_written_is_said_by_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written: list[tuple[object, dict[str, object]]] = []

    def noted(examples: Any, target: Any, options: Any) -> None:
        written.append((target.url, options._asdict()))
        raise KeyboardInterrupt

    monkeypatch.setattr(caches, "import_examples", noted)
    folder = write(tmp_path / "hs", request())
    told = {"resume": False, "verify": False, "max_block_bytes": 99, "pad": True, "on_nonfinite": "warn", "on_overflow": "saturate", "progress": True}  # fmt: skip
    default = {"resume": "auto", "verify": True, "max_block_bytes": 256 << 20, "pad": None, "on_nonfinite": "raise", "on_overflow": "raise", "progress": None}  # fmt: skip
    for more in (told, {"progress": None}):
        with pytest.raises(KeyboardInterrupt):
            imported(folder, tmp_path / "out", **more)
    assert written == [(str(tmp_path / "out"), told), (str(tmp_path / "out"), default)]


@pytest.mark.parametrize("kind", ["folder", "array"])
def test_both_addresses_have_options_of_their_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is read, and where the store is written."""
    given: list[tuple[str, str, object]] = []

    def seen(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(url: object, options: object = None, **more: Any) -> Any:
            options = more.get("storage_options", options)
            given.append((what, Path(str(url)).name, options))
            more.pop("storage_options", None)
            return call(url, None, **more)

        return noted

    monkeypatch.setattr(caches, "locate", seen("read", caches.locate))
    if kind == "folder":
        url = write(tmp_path / "hs", request())
        monkeypatch.setattr(caches, "open_transport", seen("open", caches.open_transport))
        imported(url, tmp_path / "out", storage_options={"a": 1}, dst_storage_options={"b": 2})
        assert given == [("read", "hs", {"a": 1}), ("open", "hs", {"a": 1}), ("open", "out", {"b": 2})]
        return
    np.save(tmp_path / "x.npy", np.ones((3, 4, 8), np.float32))
    passed: dict[str, object] = {}
    monkeypatch.setattr(caches, "from_array", lambda *_, **options: passed.update(options))
    told = {"resume": False, "verify": False, "max_block_bytes": 99, "pad": True, "on_nonfinite": "warn", "on_overflow": "saturate", "progress": False}  # fmt: skip
    own = {"family": "f", "ckpt": "c", "dataset": "d", "max_tokens_per_shard": 77, "data": {"x": 1}, "dtype": "float32", "dims": ["token"]}  # fmt: skip
    import_cache(
        tmp_path / "x.npy", tmp_path, layers=[3, (4, "mlp_out")], cls_token=True, storage_options={"a": 1}, dst_storage_options={"b": 2},
        **told, **own,
    )  # fmt: skip
    axis = {"layers": [3, 4], "hook_points": ["resid_post", "mlp_out"], "cls_token": True}
    assert passed == {**told, **own, **axis, "storage_options": {"b": 2}}
    assert given == [("read", "x.npy", {"a": 1})]


def test_layers_that_are_not_named_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    np.save(tmp_path / "x.npy", np.ones((3, 4, 8), np.float32))
    passed: dict[str, object] = {}
    monkeypatch.setattr(caches, "from_array", lambda *_, **options: passed.update(options))
    import_cache(tmp_path / "x.npy", tmp_path, **MODEL)
    assert (passed["layers"], passed["hook_points"], passed["cls_token"], passed["dims"]) == (None, None, False, None)
    assert passed["max_tokens_per_shard"] == 2_400_000


@pytest.mark.parametrize(
    ("arguments", "where", "message", "remedy"),
    [
        ({"family": " "}, "family", "it is ' '; it must be a name", "Name the family of models, such as gpt2."),
        ({"format": "x"}, "format", "format is 'x'; it must be 'saelens' or 'hidden-states' or 'memmap' or 'npy'", None),
        ({"dims": ["a"]}, "dims", "dims says nothing about a cache of the format 'hidden-states'", "Leave it out: the files tell it, or have no such thing."),
        ({"cls_token": True}, "cls_token", "cls_token says nothing about a cache of the format 'hidden-states'", "Leave it out: the files tell it, or have no such thing."),
        ({"bos_token": 0}, "bos_token", "bos_token says nothing about a cache of the format 'hidden-states'", "Leave it out: the files tell it, or have no such thing."),
        ({"ckpt": None}, "ckpt", "the cache does not name its model", "Pass ckpt=…."),
        ({"context": None}, "context", "documents lie end to end in this cache, and have to be cut into examples", "Pass context=256 or the like: every example has so many tokens."),
        ({"context": 0}, "context", "context is 0; it must be a positive integer", None),
        ({"layers": [1]}, "layers", "1 layers are named; hs_0.safetensors has 2", None),
        ({"layers": None}, "layers", "the cache has 2 layers and does not say which", "Pass layers=…, as labels of blocks, or layer_ids=…, as vLLM was given them: one of the two."),
        ({"layers": None, "layer_ids": [1, True]}, "layer_ids", "layer_ids has True; ids are integers of 0 or more", None),
    ],
)  # fmt: skip
def test_errors_of_arguments(arguments: dict, where: str, message: str, remedy: str | None, tmp_path: Path):
    folder = write(tmp_path / "hs", request())
    error = refused(lambda: imported(folder, tmp_path / "out", **arguments))
    assert (type(error), error.where, error.message, error.remedy) == (ArgumentError, where, message, remedy)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "where"),
    [({"max_block_bytes": 0}, "max_block_bytes"), ({"verify": "no"}, "verify"), ({"layers": "12"}, "layers"), ({"layers": 3}, "layers"), ({"layers": {1, 2}}, "layers")],
)  # fmt: skip
def test_arguments_are_checked_before_anything_is_read(arguments: dict, where: str, tmp_path: Path):
    error = refused(lambda: imported(tmp_path / "nowhere", tmp_path / "out", **arguments))
    assert (type(error), error.where) == (ArgumentError, where)
    assert not (tmp_path / "out").exists()


def test_the_format_that_is_named_decides_not_the_ending(tmp_path: Path):
    values = np.arange(24, dtype=np.float32).reshape(1, 1, 3, 8)
    with open(tmp_path / "array.data", "wb") as file:
        np.save(file, values)
    store = import_cache(tmp_path / "array.data", tmp_path / "out", **MODEL, format="npy", layers=[1])
    assert store.read(dtype="stored").tobytes() == values.tobytes()
    folder = write(tmp_path / "hs.npy", request(4))
    assert imported(folder, tmp_path / "out", format="hidden-states").layout.n_examples == 2
    error = refused(lambda: imported(folder, tmp_path / "out"))
    assert type(error) is not NotFoundError  # the ending says that it is an array


def test_the_address_of_a_cache_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever folder the next program runs in."""
    write(tmp_path / "hs", request(4))
    monkeypatch.chdir(tmp_path)
    assert imported(Path("hs"), tmp_path / "out").metadata.data["imported"]["url"] == str(tmp_path / "hs")


@pytest.mark.parametrize("name", ["layer_ids", "context", "bos_token"])
def test_an_array_has_no_such_thing(name: str, tmp_path: Path):
    np.save(tmp_path / "x.npy", np.ones((3, 4, 8), np.float32))
    value = [1] if name == "layer_ids" else 1
    error = refused(lambda: import_cache(tmp_path / "x.npy", tmp_path / "out", **MODEL, **{name: value}))
    assert (error.where, error.message, error.remedy) == (name, "it says nothing about an array", "Leave it out.")


@pytest.mark.parametrize(
    ("context", "is_right"), [(1, True), (2**31 - 1, True), (2**31, False), (0, False), (True, False)]
)
def test_a_context_is_a_positive_integer(context: object, is_right: bool):
    if is_right:
        assert check_context(context) == context
    else:
        assert refused(lambda: check_context(context)).where == "context"


# -- files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "is_right"), [(-1, True), (0, True), (1, False)])
def test_a_header_has_so_many_bytes_at_most(more: int, is_right: bool):
    text = b'{"__metadata__": {}}'.ljust((1 << 20) + more)
    memory = MemoryTransport({"x": struct.pack("<Q", len(text)) + text})
    if is_right:
        tensors, raw = read_header(memory, "x", memory.size("x"))
        assert (tensors, raw) == ({}, text)
    else:
        error = refused(lambda: read_header(memory, "x", memory.size("x")))
        assert (
            error.message
            == "its header takes 1048577 bytes; files of hidden states and dictionaries have at most 1048576"
        )


@pytest.mark.parametrize("n", [4087, 4088, 4089])
def test_a_header_of_any_length_is_read_whole(n: int):
    """4096 bytes are read first, of which eight are the length."""
    text = json.dumps({"x": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(n)
    memory = MemoryTransport({"x": struct.pack("<Q", n) + text + bytes(4)})
    tensors, raw = read_header(memory, "x", memory.size("x"))
    assert (raw, tensors["x"].start, tensors["x"].end) == (text, 8 + n, 12 + n)
    assert (tensors["x"].dtype, tensors["x"].shape) == ("I32", (1,))


def header_of(**tensor: object) -> bytes:
    text = json.dumps({"x": tensor}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("names", "nbytes"),
    [("F64 I64 U64", 8), ("F32 I32 U32", 4), ("F16 BF16 I16 U16", 2), ("I8 U8 BOOL F8_E4M3 F8_E5M2", 1)],
)
def test_every_dtype_of_the_format_has_its_size(names: str, nbytes: int):
    for dtype in names.split():
        for n, is_right in ((3 * nbytes - 1, False), (3 * nbytes, True), (3 * nbytes + 1, False)):
            memory = MemoryTransport({"x": header_of(dtype=dtype, shape=[3], data_offsets=[0, n]) + bytes(n)})
            if is_right:
                read_header(memory, "x", memory.size("x"))
            else:
                error = refused(lambda memory=memory: read_header(memory, "x", memory.size("x")))
                assert (type(error), error.where) == (DocumentError, "memory://x")
                assert error.message == f"'x' is {dtype} of shape [3], but has {n} bytes in the file"


@pytest.mark.parametrize(("n", "is_right"), [(64, True), (65, False), (20_000, False)])
def test_a_tensor_has_so_many_axes_at_most(n: int, is_right: bool):
    """The product of 45,000 numbers, all of which fit into a header, took seconds, and the message had a megabyte."""
    memory = MemoryTransport({"x": header_of(dtype="I8", shape=[1] * n, data_offsets=[0, 1]) + bytes(1)})
    if is_right:
        assert read_header(memory, "x", memory.size("x"))[0]["x"].shape == (1,) * n
    else:
        error = refused(lambda: read_header(memory, "x", memory.size("x")))
        assert (type(error), error.message) == (DocumentError, f"'x' has {n:,} axes; at most 64 are read")


def test_files_of_requests_are_closed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each open file is a descriptor."""
    monkeypatch.setattr(hidden_states_module, "_MOST_OPEN", 4)
    folder = write(tmp_path / "hs", *(request(2) for _ in range(9)))
    transport = open_transport(folder, engine="pread")
    closed: list[int] = []
    close = type(transport).close
    monkeypatch.setattr(type(transport), "close", lambda self: (closed.append(1), close(self))[1])
    store = imported(folder, tmp_path / "out")
    assert len(closed) >= 6
    assert store.document(8, dtype="stored").token_arrays["token_ids"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda t: t.pop("token_ids"), DocumentError, "it has no tensor 'token_ids', but ['hidden_states']"),
        (lambda t: t.update(hidden_states_scales=np.ones(1, np.float32)), DocumentError, "its hidden states are scaled 8-bit numbers, which no store holds"),
        (lambda t: t.update(hidden_states=t["hidden_states"].astype(np.float64)), DocumentError, "in hs_0.safetensors it is F32 with [2, 4]"),
        (lambda t: t.update(hidden_states=t["hidden_states"].astype(np.int32)), DocumentError, "hidden_states is I32 of shape [5, 2, 4]; it must be F32, F16 or BF16"),
        (lambda t: t.update(token_ids=np.arange(4)), CorruptShardError, "hidden_states has 5 tokens, token_ids has 4"),
        (lambda t: t.update(token_ids=np.arange(5)[:, None]), DocumentError, "token_ids is I64 of shape [5, 1]; it must be I64 or I32 and (tokens)"),
        (lambda t: t.update(token_ids=np.arange(5, dtype=np.int16)), DocumentError, "token_ids is I16 of shape [5]; it must be I64 or I32 and (tokens)"),
        (lambda t: t.update(hidden_states=t["hidden_states"].astype(np.float16)), DocumentError, "hidden_states is F16 with [2, 4] numbers for each token; in hs_0.safetensors it is F32 with [2, 4]"),
    ],
)  # fmt: skip
def test_errors_of_requests(change: Callable[[dict], object], kind: type[Exception], message: str, tmp_path: Path):
    tensors = request()
    change(tensors)
    folder = write(tmp_path / "hs", request(), tensors)
    error = refused(lambda: imported(folder, tmp_path / "out"))
    assert (type(error), error.where) == (kind, f"{folder}/hs_1.safetensors")
    assert message in error.message


def test_hooks_of_several_shapes_are_no_cache(tmp_path: Path):
    pytest.importorskip("pyarrow")
    hook = {"_type": "Array2D", "shape": [4, 8], "dtype": "float32"}
    for other in ({**hook, "shape": [4, 9]}, {**hook, "shape": [5, 8]}, {**hook, "dtype": "float16"}):
        features = {"blocks.1.hook_a": hook, "blocks.2.hook_a": other, "token_ids": {}}
        (tmp_path / "dataset_info.json").write_text(json.dumps({"features": features}))
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
        error = refused(lambda: import_cache(tmp_path, tmp_path / "out", **MODEL))
        assert (type(error), error.where) == (DocumentError, f"{tmp_path}/dataset_info.json")
        assert error.message.startswith("its hooks have several shapes or dtypes: ")
    (tmp_path / "state.json").unlink()
    error = refused(lambda: import_cache(tmp_path, tmp_path / "out", **MODEL, format="saelens"))
    assert type(error) is not NotFoundError


def test_lists_that_end_behind_their_numbers_are_refused():
    """All have the right length, so that nothing but the look at every offset tells it."""
    pa = pytest.importorskip("pyarrow")
    sink = io.BytesIO()
    table = pa.table({"a": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32()))})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole, offsets = sink.getvalue(), struct.pack("<3i", 0, 2, 4)
    assert whole.count(offsets) == 1
    for wrong in ((100, 102, 104), (2, 4, 6), (-2, 0, 2)):
        memory = MemoryTransport({"x": whole.replace(offsets, struct.pack("<3i", *wrong))})
        error = refused(lambda memory=memory: list(read_rows(memory, "x", memory.size("x"), ["a"])))
        assert (type(error), error.where) == (CorruptShardError, "memory://x")


def test_lists_between_others_that_lie_behind_all_numbers_are_refused():
    """pyarrow ends the process where it takes the items of such lists apart, beside one that is null."""
    pa = pytest.importorskip("pyarrow")
    sink = io.BytesIO()
    table = pa.table({"a": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32()))})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole, offsets = sink.getvalue(), struct.pack("<4i", 0, 2, 4, 4)
    assert whole.count(offsets) == 1
    memory = MemoryTransport({"x": whole.replace(offsets, struct.pack("<4i", 0, 100, 102, 4))})
    error = refused(lambda: list(read_rows(memory, "x", memory.size("x"), ["a"])))
    assert (type(error), error.where) == (CorruptShardError, "memory://x")


def test_numbers_of_another_width_are_refused():
    pa = pytest.importorskip("pyarrow")
    sink = io.BytesIO()
    table = pa.table({"a": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32()))})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    memory = MemoryTransport({"x": sink.getvalue()})
    (rows,) = read_rows(memory, "x", memory.size("x"), ["a"])
    assert rows.numbers("a", (2,), "int32").tolist() == [[1, 2], [3, 4]]
    assert rows.part(1, 1).numbers("a", (2,), "int32").tolist() == [[3, 4]]
    assert len(rows) == 2
    for dtype in ("int64", "int16", "uint32"):
        assert (
            refused(lambda dtype=dtype: rows.numbers("a", (2,), dtype)).message == f"a has int32; it must have {dtype}"
        )
    assert refused(lambda: rows.numbers("a", (2, 1), "int32")).message == "a has int32; it must have lists"
    error = refused(lambda: list(read_rows(memory, "x", memory.size("x"), ["a", "c", "b"])))
    assert (error.message, error.where) == ("it has no column 'b'", "memory://x")


def test_arrays_of_any_version_of_the_format(tmp_path: Path):
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "x.npy", "wb") as file:
            np.lib.format.write_array(file, values, version)
        assert mapped(open_transport(tmp_path), "x.npy", None)[:, :].tolist() == values.tolist()
    np.save(tmp_path / "x.npy", values.astype(BF16))
    found = mapped(open_transport(tmp_path), "x.npy", "bfloat16")
    assert (found.dtype, found[:, :].tolist()) == (BF16, values.tolist())
    assert mapped(open_transport(tmp_path), "x.npy", None).dtype != BF16
    np.save(tmp_path / "x.npy", values.astype(np.float16))
    assert mapped(open_transport(tmp_path), "x.npy", "bfloat16").dtype == np.float16
    error = refused(lambda: mapped(MemoryTransport({"x.npy": b""}), "x.npy", None))
    assert (error.message, error.remedy) == ("a .npy file is mapped, so it has to be on this machine", "Copy it first.")


def test_arrays_of_as_many_axes_as_numpy_has(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.float32([1, 2]).reshape((1,) * 63 + (2,)))
    found = parse_npy_header((tmp_path / "x.npy").read_bytes())
    assert (found.shape, found.end) == ((1,) * 63 + (2,), (tmp_path / "x.npy").stat().st_size)


def test_an_address_that_cannot_be_listed():
    class Blind:
        url = "https://host/a"

    error = refused(lambda: entries_of(Blind()))
    assert (type(error), error.where) == (ArgumentError, "https://host/a")
    assert type(refused(lambda: entries_of(MemoryTransport(), "nothing"))) is NotFoundError


@pytest.mark.parametrize(("n_tokens", "n_examples"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_that_fill_no_example_make_one_more(n_tokens: int, n_examples: int, tmp_path: Path):
    store = imported(write(tmp_path / "hs", request(n_tokens)), tmp_path / "out", context=4)
    assert store.layout.n_examples == n_examples
    assert store.token_arrays["mask"].sum() == n_tokens
    ids = store.token_arrays["token_ids"].reshape(-1)
    assert ids.tolist() == [*range(n_tokens), *[-1] * (4 * n_examples - n_tokens)]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": "a.arrow"}, "_data_files must list the Arrow files"), ({"_data_files": []}, "_data_files must list the Arrow files"),
        ([1], "_data_files must list the Arrow files"), ({"_data_files": ["a.arrow"]}, "_data_files has None, which is no name of an Arrow file"),
        ({"_data_files": [{"filename": 3}]}, "_data_files has 3, which is no name of an Arrow file"),
        ({"_data_files": [{"filename": ".arrow"}]}, "_data_files has '.arrow', which is no name of an Arrow file"),
        ({"_data_files": [{"filename": "a.arrow.x"}]}, "_data_files has 'a.arrow.x', which is no name of an Arrow file"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow is missing, which state.json lists"),
    ],
)  # fmt: skip
def test_lists_of_arrow_files(state: object, message: str, tmp_path: Path):
    pytest.importorskip("pyarrow")
    hook = {"_type": "Array2D", "shape": [4, 8], "dtype": "float32"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {"blocks.1.hook_a": hook, "odd": 3}}))
    (tmp_path / "state.json").write_text(json.dumps(state))
    error = refused(lambda: import_cache(tmp_path, tmp_path / "out", **MODEL))
    assert error.message == message
    assert error.where == (str(tmp_path) if "missing" in message else f"{tmp_path}/state.json")


@pytest.mark.parametrize(
    ("shape", "is_right"),
    [([4, 8], True), ([1, 1], True), ([0, 8], False), ([4, 0], False), ([4, 2**31], False), ([True, 8], False), ([4.0, 8], False), ([4], False), ([4, 8, 1], False), (None, False)],
)  # fmt: skip
def test_shapes_of_hooks(shape: object, is_right: bool, tmp_path: Path):
    pytest.importorskip("pyarrow")
    features = {"blocks.1.hook_a": {"_type": "Array2D", "shape": shape, "dtype": "float32"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": features}))
    (tmp_path / "state.json").write_text("{}")
    error = refused(lambda: import_cache(tmp_path, tmp_path / "out", **MODEL))
    assert error.where == f"{tmp_path}/{'state' if is_right else 'dataset_info'}.json"
    if not is_right:
        assert error.message.startswith("blocks.1.hook_a has shape ")


@pytest.mark.parametrize("name", ["shard_count", "total_size", "d_model"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, 2**63])
def test_counts_of_a_layer_are_positive_integers(name: str, value: object, tmp_path: Path):
    folder = tmp_path / "layer_1"
    folder.mkdir()
    (folder / "shard_0.memmap").write_bytes(bytes(16))
    (folder / "shard_0.meta").write_text('{"shape": [1, 4], "dtype": "float32"}')
    config = {"shard_count": 1, "total_size": 1, "d_model": 4}
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    error = refused(lambda: import_cache(tmp_path, tmp_path / "out", **MODEL, format="memmap", layers=[1], context=1))
    assert (type(error), error.where) == (DocumentError, f"{folder}/config.json")
    assert error.message.startswith(f"{name} is ")
    assert error.message.endswith("; it must be a positive integer")


def memmap_layer(folder: Path, value: float, *dtypes: str, named: bool = True) -> None:
    """A layer of one token for each dtype, of which each is a shard."""
    folder.mkdir(parents=True)
    config = {"shard_count": len(dtypes), "total_size": len(dtypes), "d_model": 4}
    (folder / "config.json").write_text(json.dumps(config))
    for number, dtype in enumerate(dtypes):
        (folder / f"shard_{number}.memmap").write_bytes(np.full((1, 4), value, dtype).tobytes())
        meta = {"shape": [1, 4], **({"dtype": dtype} if named else {})}
        (folder / f"shard_{number}.meta").write_text(json.dumps(meta))


def test_folders_of_layers_are_in_the_order_of_their_numbers(tmp_path: Path):
    """One without a number comes first; a shard without a dtype is float32."""
    for name, value in (("layer_10_out", 10), ("layer_2_out", 2), ("embed_out", 0)):
        memmap_layer(tmp_path / "c" / name, value, "float32", named=False)
    store = imported(tmp_path / "c", tmp_path / "out", format="memmap", layers=[0, 2, 10], context=1)
    assert store.read(dtype="stored")[0, :, 0].tolist() == [[0] * 4, [2] * 4, [10] * 4]


def test_shards_of_a_layer_have_one_dtype(tmp_path: Path):
    memmap_layer(tmp_path / "c" / "layer_1", 1, "float32", "float16")
    error = refused(lambda: imported(tmp_path / "c", tmp_path / "out", format="memmap", layers=[1]))
    assert (type(error), error.where) == (DocumentError, f"{tmp_path}/c/layer_1/config.json")
    assert error.message == "total_size is 2; the shards have 2 tokens of ['float16', 'float32']"
