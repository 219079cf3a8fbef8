"""`import_cache`: what SAELens, vLLM and speculators have cached becomes stores, bit for bit.

The caches here are made from what their programs write: safetensors by hand, those of SAELens by pyarrow, as Hugging Face's library
does. The programs' own writers are in tests/peers/test_cache_peers.py.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

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
)
from saev_store.sources.caches import import_cache
from saev_store.transport import open_transport

BF16 = np.dtype(ml_dtypes.bfloat16)
MODEL = {"family": "llama", "ckpt": "tiny", "progress": False}
RNG = np.random.default_rng(0)
HOOK, ARROW = "blocks.3.hook_resid_post", "data-00000-of-00001.arrow"


def refusal(call, *arguments, **options) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call(*arguments, **options)
    return caught.value


# -- hidden states -----------------------------------------------------------------------------------------------------


def request(n_tokens: int, dtype: object = BF16) -> dict[str, np.ndarray]:
    return {
        "hidden_states": RNG.standard_normal((n_tokens, 2, 8)).astype(dtype),
        "token_ids": RNG.integers(0, 1000, n_tokens),
    }


def requests(folder: Path, made: dict[str, dict[str, np.ndarray]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in made.items():
        (folder / f"{name}.safetensors").write_bytes(safetensors(tensors))
    return folder


def imported(folder: object, out: object, **more: object) -> ShardStore:
    return import_cache(folder, out, **{**MODEL, "layers": [1, 2], "context": 4, **more})


def assert_is_stream(store: ShardStore, made: dict[int, dict[str, np.ndarray]]) -> None:
    """The requests lie end to end in examples, zeros at the end, each a document of its number."""
    acts = np.concatenate([tensors["hidden_states"] for tensors in made.values()])
    stored = store.read(dtype="stored").swapaxes(1, 2).reshape(-1, *acts.shape[1:])
    context = store.shape[2]
    assert (len(stored), stored.dtype) == (-(-len(acts) // context) * context, acts.dtype)
    assert stored[: len(acts)].tobytes() == acts.tobytes()
    assert not stored[len(acts) :].astype(np.float32).any()
    mask = store.token_arrays["mask"].reshape(-1)
    assert mask.tolist() == [True] * len(acts) + [False] * (len(mask) - len(acts))
    for number, tensors in made.items():
        document = store.document(number, dtype="stored")
        assert document.acts.tobytes() == tensors["hidden_states"].swapaxes(0, 1).tobytes()
        assert document.token_arrays["token_ids"].tolist() == tensors["token_ids"].tolist()
        assert document.token_arrays["positions"].tolist() == list(range(len(tensors["token_ids"])))
    assert store.validate(deep=True).ok


def test_import_hidden_states_gives_a_stream_of_the_requests(tmp_path):
    lengths = [5, 3, 9, 1, 2, 6, 4, 8, 2, 2, 7, 3]
    for name, context in (("bfloat16", 4), ("float16", 7), ("float32", 64)):
        made = {number: request(n, BF16 if name == "bfloat16" else name) for number, n in enumerate(lengths)}
        made[3]["token_ids"] = made[3]["token_ids"].astype(np.int32)  # either width
        folder = requests(tmp_path / name, {f"hs_{number}": tensors for number, tensors in made.items()})
        (folder / "hs_0.safetensors.lock").touch()
        (folder / "hs_1.safetensors").write_bytes(safetensors(made[1], pad=9001))  # a long header
        (folder / ".#hs_2.safetensors").symlink_to("user@host.1:2")  # of an editor
        store = imported(
            folder, tmp_path / "out", layers=None, layer_ids=[3, 18], context=context,
            max_tokens_per_shard=4 * context,
        )  # fmt: skip
        assert_is_stream(store, made)
        assert store.layers == (2, 17)  # what enters layer 3 has left layer 2
        assert store.metadata.text == {"layout": "stream", "bos": False}
        described = dict(store.metadata.data)["imported"]
        assert (described["format"], described["url"]) == ("hidden-states", str(folder))


def test_import_from_a_bucket_reads_it_where_it_is(tmp_path, monkeypatch):
    made = {number: request(n) for number, n in enumerate((5, 3, 9))}
    transport = open_transport("memory://caches/hs")
    for number, tensors in made.items():
        transport.put(f"hs_{number}.safetensors", safetensors(tensors))
    assert_is_stream(imported("memory://caches/hs", "memory://caches/out"), made)
    kind, listed = type(transport), type(transport).list
    monkeypatch.setattr(  # as servers of the web list
        kind, "list", lambda self, path="": [SimpleNamespace(path=e.path, name=e.name, is_dir=e.is_dir, size=None) for e in listed(self, path)]
    )  # fmt: skip
    assert_is_stream(imported("memory://caches/hs", tmp_path / "out"), made)


def test_import_numbers_documents_by_the_request_in_the_name(tmp_path):
    """vLLM's connector adds eight random hexadecimal digits; a request that is missing moves no other."""
    hexes = [f"{RNG.integers(2**28, 2**32):08x}" for _ in range(12)]
    for form in ("hs_{0}", "run2_hs_{0}", "{0}-{1}", "req-{0}-{1}"):
        numbers = [number for number in range(12) if number != 3]
        made = {number: request(number + 1) for number in numbers}
        names = {form.format(number, hexes[number]): made[number] for number in numbers}
        store = imported(requests(tmp_path / form.replace("{", "").replace("}", ""), names), tmp_path / "out")
        assert_is_stream(store, made)
        assert dict(store.metadata.data)["imported"]["files"] == [f"{name}.safetensors" for name in names]
        assert np.unique(store.token_arrays["document_ids"]).tolist() == ([-1] if len(store) * 4 > 74 else []) + numbers


def test_import_warns_if_names_do_not_number_the_requests(tmp_path):
    for case, names in enumerate((
        ["chatcmpl-abc", "chatcmpl-abd"], ["a-1", "b-1"], ["2-0a1b2c3d", "hs_1"], ["1-20240101", "2-20240102"], ["7-0a1b2c3d", "7-1a1b2c3d"],
    )):  # fmt: skip
        made = {number: request(3 + number) for number in range(2)}
        folder = requests(tmp_path / str(case), dict(zip(names, made.values(), strict=True)))
        with pytest.warns(SaevStoreWarning):
            store = imported(folder, tmp_path / "out")
        assert_is_stream(store, made)
        assert dict(store.metadata.data)["imported"]["files"] == [f"{name}.safetensors" for name in names]


def without(name: str) -> Callable[[dict], None]:
    return lambda header: header.pop(name)


def changed(name: str, **values: object) -> Callable[[dict], None]:
    return lambda header: header[name].update(values)


def test_import_hidden_states_that_break_a_rule_are_refused_by_file(tmp_path):
    header = [
        (without("hidden_states"), DocumentError),
        (without("token_ids"), CorruptShardError),
        (changed("hidden_states", dtype="F8_E4M3"), DocumentError),
        (changed("hidden_states", dtype="F4"), DocumentError),
        (changed("hidden_states", dtype=7), DocumentError),
        (changed("hidden_states", dtype="I16"), DocumentError),
        (changed("hidden_states", shape=[6, 16]), DocumentError),
        (changed("hidden_states", shape=[2**40, 2, 8]), DocumentError),
        (changed("hidden_states", shape=[2**62, 2**62, 8]), DocumentError),
        (changed("hidden_states", shape=[2**63, 2, 8]), DocumentError),
        (changed("hidden_states", shape=[1] * 20_000), DocumentError),
        (changed("hidden_states", shape=[-6, 2, -8]), DocumentError),
        (changed("hidden_states", shape=[True, 2, 8]), DocumentError),
        (changed("hidden_states", shape=[3, 4, 8]), CorruptShardError),
        (changed("hidden_states", shape=[6, 1, 16]), DocumentError),
        (changed("hidden_states", data_offsets=[10**15, 10**15 + 192]), CorruptShardError),
        (changed("hidden_states", data_offsets=[192, 0]), DocumentError),
        (changed("hidden_states", data_offsets=[0]), DocumentError),
        (changed("hidden_states", data_offsets="all"), DocumentError),
        (changed("token_ids", dtype="F64"), DocumentError),
        (lambda header: header.update(token_ids=7), DocumentError),
        (lambda header: header.update(hidden_states_scales=dict(header["token_ids"])), DocumentError),
    ]
    tensors = [
        ({"token_ids": np.arange(4)}, CorruptShardError),
        ({"token_ids": np.arange(6)[:, None]}, DocumentError),
        ({"token_ids": np.arange(6, dtype=np.int16)}, DocumentError),
        ({"hidden_states": RNG.standard_normal((6, 2, 8)).astype(np.float16)}, DocumentError),
        ({"hidden_states": RNG.standard_normal((6, 2, 8))}, DocumentError),
        ({"hidden_states": RNG.standard_normal((6, 2, 9)).astype(BF16)}, DocumentError),
        ({"hidden_states_scales": np.ones(1, np.float32)}, DocumentError),
    ]
    raw = [
        (b"", CorruptShardError),
        (b"abc", CorruptShardError),
        (struct.pack("<Q", 2**63), CorruptShardError),
        (struct.pack("<Q", 2**40) + b"{}", CorruptShardError),
        (struct.pack("<Q", 5) + b"{nope", DocumentError),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, DocumentError),
        (struct.pack("<Q", 2) + b"[]", DocumentError),
        (struct.pack("<Q", 2) + b"{}", DocumentError),
        (struct.pack("<Q", 2) + b"{}more", CorruptShardError),
        (struct.pack("<Q", (1 << 20) + 1) + b" " * ((1 << 20) + 1), DocumentError),
        (safetensors(request(5))[:-1], CorruptShardError),
    ]
    files = [(safetensors(request(6), edit), kind) for edit, kind in header]
    files += [(safetensors({**request(6), **some}), kind) for some, kind in tensors] + raw
    folder = requests(tmp_path / "hs", {"hs_0": request(3)})
    for content, kind in files:
        (folder / "hs_1.safetensors").write_bytes(content)
        error = refusal(imported, folder, tmp_path / "out")
        assert (type(error), error.where) == (kind, f"{folder}/hs_1.safetensors")
    (folder / "hs_1.safetensors").write_bytes(safetensors(request(6), pad=1 << 20))  # the longest header
    assert len(imported(folder, tmp_path / "long")) == 3
    (folder / "hs_1.safetensors").unlink()
    (folder / "hs_1.safetensors").symlink_to(tmp_path / "unmounted")
    assert isinstance(refusal(imported, folder, tmp_path / "out"), NotFoundError)
    (folder / "hs_1.safetensors").unlink()
    (folder / "hs_0.safetensors").write_bytes(safetensors(request(0)))
    assert type(refusal(imported, folder, tmp_path / "out")) is DocumentError  # no token
    made = {2: request(5), 4: request(6)}
    requests(folder, {"hs_2": made[2], "hs_3": request(0), "hs_4": made[4]})
    assert_is_stream(imported(folder, tmp_path / "out"), made)
    made[2]["token_ids"][2] = 2**40  # no store holds it
    assert type(refusal(imported, requests(folder, {"hs_2": made[2]}), tmp_path / "out")) is ArgumentError


def test_import_names_layers_in_either_numbering(tmp_path):
    folder = requests(tmp_path / "hs", {"hs_0": request(3)})

    def keys(**layers: object) -> object:
        return import_cache(folder, tmp_path / "out", **MODEL, context=3, **layers).layout.layer_keys

    assert keys(layer_ids=[0, 36]) == ((0, "resid_pre"), (35, "resid_post"))
    assert keys(layers=[(4, "mlp_out"), 4]) == ((4, "mlp_out"), (4, "resid_post"))
    for wrong, where in (
        ({}, "layers"), ({"layers": [1, 2], "layer_ids": [2, 3]}, "layers"), ({"layers": [1]}, "layers"), ({"layers": "12"}, "layers"),
        ({"layer_ids": ["3", 4]}, "layer_ids"), ({"layer_ids": 5}, "layer_ids"), ({"layers": [(1, "a", "b"), 2]}, "layers"), ({"layer_ids": [-1, 4]}, "layer_ids"),
    ):  # fmt: skip
        error = refusal(keys, **wrong)
        assert (type(error), error.where) == (ArgumentError, where)


# -- SAELens -----------------------------------------------------------------------------------------------------------


def cached(n: int = 11, name: str = "float32") -> dict[str, np.ndarray]:
    return {
        HOOK: RNG.standard_normal((n, 4, 8)).astype(name),
        "token_ids": RNG.integers(0, 1000, (n, 4)).astype(np.int32),
    }


def of_no_type(raw: bytes) -> bytes:
    """An Arrow file whose first message has no type, so that Arrow believes what is below it, and one wrong bit there."""
    changed = bytearray(raw)
    (table,) = struct.unpack_from("<I", raw, 8)
    vtable = 8 + table - struct.unpack_from("<i", raw, 8 + table)[0]
    header = 8 + table + struct.unpack_from("<H", raw, vtable + 8)[0]
    changed[vtable + 6 : vtable + 8] = bytes(2)
    changed[header + struct.unpack_from("<I", raw, header)[0] + 3] ^= 0x40
    return bytes(changed)


def arrow(
    folder: Path, columns: dict[str, np.ndarray], files: Sequence[int] = (11,), *, claim: dict | None = None
) -> Path:
    """What Hugging Face's library saves of such columns, in files of so many rows and batches of three."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True, exist_ok=True)
    at, names = 0, [f"data-{number:05d}-of-{len(files):05d}.arrow" for number in range(len(files))]
    for name, n in zip(names, files, strict=True):
        stream(folder / name, {key: [list(row) for row in values[at : at + n]] for key, values in columns.items()}, pa)
        at += n
    features = {
        name: {"_type": "Array2D", "shape": list(values.shape[1:]), "dtype": values.dtype.name}
        if values.ndim == 3
        else {"_type": "List", "length": values.shape[1]}
        for name, values in columns.items()
    }
    (folder / "dataset_info.json").write_text(json.dumps({"features": features | (claim or {})}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def stream(path: Path, rows: dict[str, list], pa, **options: object) -> None:
    table = pa.table({name: pa.array(values) for name, values in rows.items()})
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=written) as writer:
        writer.write_table(table, max_chunksize=3)


def test_import_of_saelens_gives_its_contexts(tmp_path):
    for name in ("float32", "float16"):
        columns = cached(name=name)
        columns["blocks.5.attn.hook_z"] = RNG.standard_normal((11, 4, 8)).astype(name)
        folder = arrow(tmp_path / name, columns, [6, 5])
        far = f"memory://arrow/{name}"
        for path in folder.iterdir():
            open_transport(far).put(path.name, path.read_bytes())
        for src in (folder, far):
            store = import_cache(src, tmp_path / "out", **MODEL, max_tokens_per_shard=16)
            assert store.layout.layer_keys == ((3, "resid_post"), (5, "attn.z"))
            expected = np.stack([columns[HOOK], columns["blocks.5.attn.hook_z"]], axis=1)
            assert store.read(dtype="stored").tobytes() == expected.tobytes()
            assert np.array_equal(store.token_arrays["token_ids"], columns["token_ids"])
            assert store.metadata.text == {"layout": "window", "bos": False}
    columns = {"blocks.3.hook_resid_post": cached(name="float64")[HOOK]}  # without token ids
    store = import_cache(arrow(tmp_path / "wide", columns), tmp_path / "out", **MODEL, dtype="float32")
    assert np.array_equal(store[...][:, 0], columns[HOOK].astype(np.float32))
    assert not store.token_arrays


def test_import_with_cls_token_compares_the_first_ids(tmp_path):
    columns = cached()
    folder = arrow(tmp_path / "c", columns, [6, 5])
    error = refusal(import_cache, folder, tmp_path / "out", **MODEL, cls_token=True)
    assert (type(error), error.where) == (ArgumentError, "cls_token")
    columns["token_ids"][:, 0] = 1
    store = import_cache(arrow(folder, columns, [6, 5]), tmp_path / "out", **MODEL, cls_token=True)
    assert store.shape == (11, 1, 4, 8)
    assert store[...].tobytes() == columns[HOOK].tobytes()
    assert np.array_equal(store.token_arrays["token_ids"], columns["token_ids"][:, 1:])
    columns["token_ids"][8, 0] = 2  # one, in the second file
    assert (
        refusal(import_cache, arrow(folder, columns, [6, 5]), tmp_path / "out", **MODEL, cls_token=True).where
        == "cls_token"
    )
    assert len(import_cache(folder, tmp_path / "out", **MODEL, cls_token=False)) == 11


def test_import_of_other_hooks_needs_layers_and_a_model(tmp_path):
    columns = {"model.layers.7": cached()[HOOK]}
    folder, options = arrow(tmp_path / "c", columns), {"family": "llama", "progress": False}
    assert refusal(import_cache, folder, tmp_path / "out", **options, ckpt="tiny").where == "layers"
    for config in ({"model_name": 3}, {"model_name": None}, {}, [], None):
        if config is not None:
            (folder / "cache_activations_runner_cfg.json").write_text(json.dumps(config))
        assert refusal(import_cache, folder, tmp_path / "out", **options, layers=[7]).where == "ckpt"
    (folder / "cache_activations_runner_cfg.json").write_text('{"model_name": "gpt2-small"}')
    for ckpt in (None, "finetuned"):
        store = import_cache(folder, tmp_path / "out", **options, layers=[7], ckpt=ckpt)
        assert (store.metadata.ckpt, store.layers) == (ckpt or "gpt2-small", (7,))
    columns["model.layers.12"] = columns["model.layers.7"] + 1
    folder = arrow(tmp_path / "d", columns)
    assert refusal(import_cache, folder, tmp_path / "out", **MODEL, layers=[12, 7]).where == "layers"  # another order
    store = import_cache(folder, tmp_path / "out", **MODEL, layers=[7, 12])
    assert np.array_equal(store[...][:, 1], columns["model.layers.12"])
    columns["final"] = columns["model.layers.7"]
    assert import_cache(arrow(tmp_path / "e", columns), tmp_path / "out", **MODEL, layers=[2, 1, 3]).layers == (2, 1, 3)


def test_import_of_saelens_that_breaks_a_rule_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    columns = cached()
    rows = {name: [list(row) for row in values] for name, values in columns.items()}

    def edited(column: str, change: Callable[[list], object]) -> Callable[[Path], None]:
        def damage(folder: Path) -> None:
            mine = {name: [list(row) for row in values] for name, values in rows.items()}
            change(mine[column])
            stream(folder / ARROW, mine, pa)

        return damage

    def info(**changes: object) -> Callable[[Path], None]:
        hook = {"_type": "Array2D", "shape": [4, 8], "dtype": "float32", **changes}
        return lambda folder: arrow(folder, columns, claim={HOOK: hook})

    def inflated(size: int) -> Callable[[Path], None]:
        """Compressed numbers of which one piece claims another size."""

        def damage(folder: Path) -> None:
            table = pa.table({name: pa.array(values) for name, values in rows.items()})
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
                writer.write_table(table)
            raw, numbers = sink.getvalue().to_pybytes(), struct.pack("<q", 11 * 4 * 8 * 4)
            assert raw.count(numbers) == 1
            (folder / ARROW).write_bytes(raw.replace(numbers, struct.pack("<q", size)))

        return damage

    def offsets(*wrong: int) -> Callable[[Path], None]:
        """Lists of the right lengths that lie elsewhere than their numbers."""

        def damage(folder: Path) -> None:
            stream(folder / ARROW, {**rows, "token_ids": rows["token_ids"]}, pa)
            raw, right = (folder / ARROW).read_bytes(), struct.pack("<4i", 0, 4, 8, 12)
            assert right in raw
            (folder / ARROW).write_bytes(raw.replace(right, struct.pack("<4i", *wrong)))

        return damage

    def state(text: str) -> Callable[[Path], object]:
        return lambda folder: (folder / "state.json").write_text(text)

    def data(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
        return lambda folder: (folder / ARROW).write_bytes(change((folder / ARROW).read_bytes()))

    def double(folder: Path) -> None:
        table = pa.Table.from_arrays(
            [pa.array(rows[name]) for name in (HOOK, HOOK, "token_ids")], names=[HOOK, HOOK, "token_ids"]
        )
        with pa.OSFile(str(folder / ARROW), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    def dictionary(folder: Path) -> None:
        table = pa.table({**rows, "extra": pa.array(["a"] * 11).dictionary_encode()})
        with pa.OSFile(str(folder / ARROW), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    folder = tmp_path / "c"
    for number, (damage, kind, name) in enumerate([
        (edited("token_ids", lambda rows: rows[7].pop()), CorruptShardError, ARROW),
        (edited(HOOK, lambda rows: rows[7].pop()), CorruptShardError, ARROW),
        (edited(HOOK, lambda rows: rows.__setitem__(5, None)), CorruptShardError, ARROW),
        (edited("token_ids", lambda rows: rows[5].__setitem__(0, None)), CorruptShardError, ARROW),
        (edited("token_ids", lambda rows: rows.__setitem__(slice(None), [1] * 11)), DocumentError, ARROW),
        (inflated(2**62), DocumentError, ARROW),
        (inflated(2**30), DocumentError, ARROW),
        (inflated(11 * 4 * 8 * 4), DocumentError, ARROW),
        (offsets(100, 104, 108, 112), CorruptShardError, ARROW),
        (offsets(-4, 0, 4, 8), CorruptShardError, ARROW),
        (double, DocumentError, ARROW),
        (dictionary, DocumentError, ARROW),
        (info(shape=[4, 9]), CorruptShardError, ARROW),
        (info(shape=[4, 2**30]), CorruptShardError, ARROW),
        (info(shape=[4, 2**40]), DocumentError, "dataset_info.json"),
        (info(shape=[0, 8]), DocumentError, "dataset_info.json"),
        (info(shape=[4, 8, 1]), DocumentError, "dataset_info.json"),
        (info(shape=[True, 8]), DocumentError, "dataset_info.json"),
        (info(shape="4x8"), DocumentError, "dataset_info.json"),
        (info(dtype="float16"), DocumentError, ARROW),
        (info(dtype="int8"), DocumentError, "dataset_info.json"),
        (info(dtype=["float32"]), DocumentError, "dataset_info.json"),
        (info(_type="Value"), DocumentError, "dataset_info.json"),
        (lambda folder: arrow(folder, {**columns, "blocks.4.hook_z": columns[HOOK][:, :3]}), DocumentError, "dataset_info.json"),
        (lambda folder: arrow(folder, {**columns, "blocks.4.hook_z": columns[HOOK].astype("f2")}), DocumentError, "dataset_info.json"),
        (lambda folder: (folder / "dataset_info.json").write_text("[]"), DocumentError, "dataset_info.json"),
        (lambda folder: (folder / ARROW).unlink(), CorruptShardError, ""),
        (data(lambda raw: b""), CorruptShardError, ARROW),
        (data(lambda raw: b"x" * 999), CorruptShardError, ARROW),
        (data(lambda raw: raw[:-700]), CorruptShardError, ARROW),
        (data(of_no_type), CorruptShardError, ARROW),
        (state("{}"), DocumentError, "state.json"),
        (state("["), DocumentError, "state.json"),
        (state("[" * 100_000), DocumentError, "state.json"),
        (state('{"_data_files": [7]}'), DocumentError, "state.json"),
        (state('{"_data_files": [{"filename": "../../etc/x.arrow"}]}'), DocumentError, "state.json"),
        (lambda folder: arrow(folder, {"token_ids": columns["token_ids"]}, claim={
            HOOK: {"_type": "Array2D", "shape": [4, 8], "dtype": "float32"}}), DocumentError, ARROW),
        (lambda folder: arrow(folder, {HOOK: columns[HOOK]}, claim={"token_ids": {"_type": "List"}}), DocumentError, ARROW),
        (lambda folder: arrow(folder, cached(0), [0]), DocumentError, ""),
    ]):  # fmt: skip
        damage(arrow(folder, columns))
        error = refusal(import_cache, folder, tmp_path / "out" / str(number), **MODEL)
        assert (type(error), error.where) == (kind, f"{folder}/{name}" if name else str(folder))
    assert not list((tmp_path / "out").glob("*/*/metadata.json"))


# -- both --------------------------------------------------------------------------------------------------------------


def test_import_of_damaged_caches_is_refused_or_complete(tmp_path):
    chance = random.Random(0)
    folders = [arrow(tmp_path / "a", cached()), requests(tmp_path / "b", {"hs_0": request(5), "hs_1": request(3)})]
    for number in range(150):
        folder = folders[number % 2]
        path = chance.choice(sorted(folder.iterdir()))
        kept = path.read_bytes()
        raw = bytearray(kept)
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        path.write_bytes(raw[: len(raw) - chance.choice([0, 0, 0, 1, 100])])
        more = {"layers": [1, 2], "context": 4} if number % 2 else {}
        try:
            store = import_cache(folder, tmp_path / f"out{number}", **MODEL, **more, on_nonfinite="allow")
        except SaevStoreError:
            assert not list(tmp_path.glob(f"out{number}/*/metadata.json"))
        else:
            assert store.validate(deep=True).ok
        path.write_bytes(kept)


def test_import_again_opens_the_store_and_of_a_changed_cache_makes_another(tmp_path):
    made = {f"hs_{number}": request(n) for number, n in enumerate((5, 3, 9, 7, 6))}
    folder = requests(tmp_path / "hs", made)
    whole = imported(folder, tmp_path / "a")
    assert imported(folder, tmp_path / "a").url == whole.url
    other = requests(tmp_path / "other", {**made, "hs_3": {**made["hs_3"], "token_ids": made["hs_3"]["token_ids"] + 1}})
    other.rename(tmp_path / "moved")
    assert imported(tmp_path / "moved", tmp_path / "a").url != whole.url


def test_import_of_something_else_is_refused(tmp_path):
    folder = requests(tmp_path / "hs", {"hs_0": request(3)})
    for wrong, where in (
        ({"context": None}, "context"), ({"context": 0}, "context"), ({"context": 2.5}, "context"), ({"context": True}, "context"),
        ({"cls_token": True}, "cls_token"), ({"ckpt": None}, "ckpt"), ({"family": 3}, "metadata"),
    ):  # fmt: skip
        error = refusal(imported, folder, tmp_path / "out", **wrong)
        assert (type(error), error.where) == (ArgumentError, where)
    error = refusal(import_cache, arrow(tmp_path / "a", cached()), tmp_path / "out", **MODEL, context=4)
    assert (type(error), error.where) == (ArgumentError, "context")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / ".tmp_shards").mkdir(parents=True)
    for name in ("empty", "begun", "nowhere"):
        error = refusal(import_cache, tmp_path / name, tmp_path / "out", **MODEL)
        assert (type(error), error.where) == (NotFoundError, f"{tmp_path}/{name}")
    assert not (tmp_path / "out").exists()
    value = request(3, np.float32)
    value["hidden_states"][1, 1, 3] = np.inf
    requests(folder, {"hs_0": value})
    assert isinstance(refusal(imported, folder, tmp_path / "out"), SaevStoreError)
    assert np.isinf(imported(folder, tmp_path / "out", on_nonfinite="allow")[...]).sum() == 1
