"""Exports are read by other libraries in a process that cannot import this package, and judged by dense NumPy there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store
from servers import s3_bucket  # noqa: F401  # a fixture
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    ForkError,
    SaevStoreWarning,
    StoreExistsError,
    WriterConflictError,
)
from saev_store.export import _references, icechunk, kerchunk
from saev_store.transport.durable import TEMP_PREFIX

FORMATS = ["kerchunk", "kerchunk-parquet", "icechunk", "tensorstore"]
NEEDS = {"kerchunk-parquet": ["fastparquet"], "icechunk": ["icechunk", "virtualizarr"], "tensorstore": ["tensorstore"]}

#: name -> (layout, how the last shard ends, an empty shard listed after it, labels)
STORES = {
    "padded": (Layout(7, (2, 5, 11), 4, True, 8, 3), "padded", False, True),
    "cut": (Layout(7, (2, 5, 11), 4, True, 8, 3), "cut", False, True),
    "cut in the middle of a chunk": (Layout(10, (2, 5), 3, True, 8, 6), "cut", False, True),
    "empty tail shard": (Layout(6, (11, 2), 4, False, 8, 3), "padded", True, False),
    "one short shard": (Layout(2, (-2,), 4, False, 8, 5), "cut", False, True),
    "one vector": (Layout(1, (0,), 1, False, 1, 1), "cut", False, False),
}
#: As many examples in a chunk as may be, so that the last one is short.
LARGEST = {"padded": 3, "cut": 3, "cut in the middle of a chunk": 3, "empty tail shard": 3, "one short shard": 2}


@pytest.fixture(autouse=True)
def _libraries(request: pytest.FixtureRequest):
    callspec = getattr(request.node, "callspec", None)
    for library in NEEDS.get(callspec.params.get("format", "") if callspec else "", []):
        pytest.importorskip(library)


def write_truth(plain: PlainStore, path: Path) -> str:
    layout = plain.layout
    truth = {
        "activations": plain.dense,
        "layer": np.array(layout.layers, np.int64),
        "token": np.arange(-layout.n_special_tokens, layout.content_tokens_per_example, dtype=np.int64),
    }
    if plain.labels is not None:
        truth |= {"labels": plain.labels, "content_token": np.arange(layout.content_tokens_per_example)}
    np.savez(path, **truth)
    return str(path)


def read_elsewhere(jobs: list[dict], cwd: Path, **environment: str) -> list[list[str]]:
    script = Path(__file__).parents[1] / "helpers/export_reader.py"
    ran = subprocess.run(
        [sys.executable, str(script), json.dumps(jobs)],
        cwd=cwd, capture_output=True, text=True, timeout=110, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def make_export(store: ShardStore, format: str, out: Path, *, chunks="auto", base=None) -> None:
    match format:
        case "kerchunk" | "kerchunk-parquet":
            store.to_kerchunk(out, format="parquet" if "-" in format else "json", chunks=chunks, base=base)
        case "icechunk":
            store.to_icechunk(out, chunks=chunks, base=base)
        case "tensorstore":
            names = ["activations", "layer", "token"]
            names += ["labels", "content_token"] if store.labels is not None else []
            out.write_text(json.dumps({name: store.to_tensorstore_spec(name, base=base) for name in names}))


def test_the_reader_really_cannot_import_the_package(tmp_path: Path):
    code = f"import runpy; runpy.run_path({str(Path(__file__).parents[1] / 'helpers/export_reader.py')!r}); import saev_store"
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert "saev_store is blocked" in ran.stderr


@pytest.mark.parametrize("format", ["kerchunk", "kerchunk-parquet", "tensorstore"])  # Icechunk refuses such a path
def test_a_path_that_looks_like_a_template_is_a_path(format: str, tmp_path: Path):
    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), labelled=True)
    store = ShardStore.open(plain.write(tmp_path / "{{u}} {{ 1 }} %s {0} {{"))
    suffix = {"kerchunk": ".json", "tensorstore": ".json", "kerchunk-parquet": ".parq"}.get(format, "")
    out = tmp_path / f"export{suffix}"
    make_export(store, format, out)
    job = {"format": format, "out": str(out), "truth": write_truth(plain, tmp_path / "truth.npz")}
    assert read_elsewhere([job], tmp_path) == [[]]


@pytest.mark.parametrize("format", FORMATS)
def test_exports_open_without_us_with_right_values(format: str, tmp_path: Path):
    jobs, names = [], []
    for number, (name, (layout, tail, trailer, labelled)) in enumerate(STORES.items()):
        plain = plain_store(layout, seed=number, tail=tail, empty_trailer=trailer, labelled=labelled)
        store = ShardStore.open(plain.write(tmp_path))
        truth = write_truth(plain, tmp_path / f"{number}.npz")
        for chunks in ("auto", (1, 1, *layout.shape[2:]), (LARGEST.get(name, 1), *layout.shape[1:])):
            if format == "tensorstore" and chunks != "auto":
                continue
            suffix = {"kerchunk": ".json", "tensorstore": ".json", "kerchunk-parquet": ".parq"}.get(format, "")
            out = tmp_path / f"export{len(jobs)}{suffix}"
            make_export(store, format, out, chunks=chunks)
            jobs.append({"format": format, "out": str(out), "truth": truth})
            names.append((name, chunks))
    found = dict(zip(names, read_elsewhere(jobs, tmp_path), strict=True))
    assert found == {name: [] for name in names}


@pytest.mark.parametrize("sample", ["v1_0_0_exact_multiple_empty_tail_shard", "v2_1_head_labels_cls"])
def test_stores_that_others_wrote(sample: str, tmp_path: Path):
    folder = Path(__file__).parents[1] / "data/saev" / sample
    (path,) = folder.glob("store/**/metadata.json")
    store = ShardStore.open(path.parent)
    dense = np.load(folder / "acts.npy")
    labels = np.load(folder / "labels.npy") if (folder / "labels.npy").exists() else None
    truth = write_truth(PlainStore({}, "", dense, labels, store.layout), tmp_path / "truth.npz")
    store.to_kerchunk(tmp_path / "r.json")
    assert read_elsewhere([{"format": "kerchunk", "out": str(tmp_path / "r.json"), "truth": truth}], tmp_path) == [[]]


# -- moving ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def moved(tmp_path: Path):
    """A store that is exported, and then moved: (plain, store before, where it will be, truth)."""
    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), tail="cut", labelled=True)
    old = plain.write(tmp_path / "old")
    new = tmp_path / "new" / plain.name
    new.parent.mkdir()
    return ShardStore.open(old), new, write_truth(plain, tmp_path / "truth.npz")


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_for_the_place_a_store_will_have(format: str, moved, tmp_path: Path):
    store, new, truth = moved
    out = tmp_path / "export.json" if format in {"kerchunk", "tensorstore"} else tmp_path / "export"
    make_export(store, format, out, base=f"file://{new}")
    shutil.move(store.url, new)
    assert read_elsewhere([{"format": format, "out": str(out), "truth": truth}], tmp_path) == [[]]


def test_a_kerchunk_document_is_relocated_by_its_template(moved, tmp_path: Path):
    store, new, truth = moved
    store.to_kerchunk(tmp_path / "r.json")
    shutil.move(store.url, new)
    job = {"format": "kerchunk", "out": str(tmp_path / "r.json"), "truth": truth}
    assert all("ReferenceNotReachable" in problem for problem in read_elsewhere([job], tmp_path)[0])
    overridden = {**job, "reference": {"template_overrides": {"u": f"file://{new}"}}}
    (tmp_path / "edited.json").write_text(
        (tmp_path / "r.json").read_text().replace(str(tmp_path / "old"), str(new.parent))
    )
    edited = {**job, "out": str(tmp_path / "edited.json")}
    assert read_elsewhere([overridden, edited], tmp_path) == [[], []]
    text = (tmp_path / "r.json").read_text()
    assert '"gen"' not in text
    assert text.count(store.url) == 3  # the template, and the attribute `url` with its twin in .zmetadata


@pytest.mark.parametrize("format", ["kerchunk", "tensorstore", "icechunk"])
def test_a_bucket(format: str, s3_bucket, tmp_path: Path):
    import s3fs

    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), tail="cut", labelled=True)
    address, options = f"{s3_bucket.url}/{plain.name}", s3_bucket.options
    s3fs.S3FileSystem(**options).put(str(plain.write(tmp_path)), address, recursive=True)
    store = ShardStore.open(address, options)
    out = tmp_path / ("repository" if format == "icechunk" else "r.json")
    job = {}
    if format == "kerchunk":
        make_export(store, format, out)
        job = {"reference": {"remote_protocol": "s3", "remote_options": {**options, "asynchronous": True}}}
    elif format == "tensorstore":
        # TensorStore's own name of the folder: the end point is not in the address.
        base = {"driver": "s3", "bucket": s3_bucket.url[5:], "path": plain.name, "aws_region": "us-east-1"}
        make_export(store, format, out, base={**base, "endpoint": options["endpoint_url"]})
    else:
        import icechunk

        reader = icechunk.s3_store(
            region="us-east-1", endpoint_url=options["endpoint_url"], allow_http=True, s3_compatible=True,
            force_path_style=True,
        )  # fmt: skip
        store.to_icechunk(out, container=icechunk.VirtualChunkContainer(f"{address}/", reader))
        job = {"credentials": {"access_key_id": options["key"], "secret_access_key": options["secret"]}}
    truth = write_truth(plain, tmp_path / "truth.npz")
    environment = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    assert read_elsewhere([{"format": format, "out": str(out), "truth": truth, **job}], tmp_path, **environment) == [[]]
    written = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    assert not any(options["secret"].encode() in path.read_bytes() for path in written)


def test_parquet_that_names_only_the_shards(moved, tmp_path: Path):
    pytest.importorskip("fastparquet")
    import fsspec

    store, new, _ = moved
    expected = store[0, 0].tobytes()
    store.to_kerchunk(tmp_path / "r.parq", format="parquet", base="")
    shutil.move(store.url, new)
    here = fsspec.filesystem("dir", path=str(new), fs=fsspec.filesystem("file"))
    warnings.filterwarnings("ignore", "The 'fastparquet' engine is deprecated")  # pandas, about fsspec's reader
    references = fsspec.filesystem("reference", fo=str(tmp_path / "r.parq"), fs=here)
    found = references.cat_file("activations/0.0.0.0")
    assert found[:160] == expected


# -- what is refused, what is said -------------------------------------------------------------------------------------


def small_store(tmp_path: Path, **options) -> ShardStore:
    return ShardStore.open(plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), **options).write(tmp_path))


def test_damage_is_refused_because_others_would_read_fill_values(tmp_path: Path):
    store = small_store(tmp_path)
    (Path(store.url) / "acts000001.bin").unlink()
    damaged = ShardStore.open(store.url, damaged_ok=True)
    for attempt in (
        lambda: damaged.to_kerchunk(tmp_path / "r.json"),
        damaged.to_tensorstore_spec,
    ):
        with pytest.raises(CorruptShardError, match="acts000001.bin"):
            attempt()
    assert not (tmp_path / "r.json").exists()


def test_a_shard_that_goes_missing_later_is_an_error_elsewhere_too(tmp_path: Path):
    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), labelled=False)
    store = ShardStore.open(plain.write(tmp_path))
    store.to_kerchunk(tmp_path / "r.json")
    truth = write_truth(plain, tmp_path / "truth.npz")
    (Path(store.url) / "acts000001.bin").unlink()
    (problems,) = read_elsewhere([{"format": "kerchunk", "out": str(tmp_path / "r.json"), "truth": truth}], tmp_path)
    assert len(problems) == 2
    assert all("ReferenceNotReachable" in problem for problem in problems)


@pytest.mark.parametrize("url", ["s3://lab/{{x}}/store", "memory://lab/store", "simplecache::s3://lab/store"])
def test_an_address_that_others_cannot_use_has_to_be_given(tmp_path: Path, url: str):
    store = small_store(tmp_path)
    store.url = url
    with pytest.raises(ArgumentError, match="no meaning for other processes"):
        _references.usable_base(store, None)
    assert _references.usable_base(store, "s3://lab/store/") == "s3://lab/store"


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path):
    pytest.importorskip("fastparquet")
    store = small_store(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all I have")
    with pytest.raises(StoreExistsError, match="not an export"):
        store.to_kerchunk(mine, format="parquet")
    assert (mine / "thesis.txt").read_text() == "all I have"
    store.to_kerchunk(tmp_path / "r.parq", format="parquet")
    store.to_kerchunk(tmp_path / "r.parq", format="parquet")


def test_an_export_that_replaces_another_is_none_until_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader that comes meanwhile, or after a crash, finds no export instead of parts of two."""
    pytest.importorskip("fastparquet")
    store = small_store(tmp_path)
    root = tmp_path / "r.parq" / ".zmetadata"
    store.to_kerchunk(root.parent, format="parquet", chunks=(3, 3, 5, 8))
    assert root.exists()
    records = kerchunk._record
    made: list[bool] = []

    def record(*arguments):
        made.append(root.exists())
        if len(made) == 2:
            raise OSError("the disk is full")
        return records(*arguments)

    monkeypatch.setattr(kerchunk, "_RECORD_SIZE", 4)
    monkeypatch.setattr(kerchunk, "_record", record)
    with pytest.raises(OSError, match="full"):
        store.to_kerchunk(root.parent, format="parquet", chunks=(1, 3, 5, 8))
    assert made == [False, False]
    assert not root.exists()
    monkeypatch.undo()
    store.to_kerchunk(root.parent, format="parquet", chunks=(1, 3, 5, 8))
    assert root.exists()


@pytest.mark.parametrize("format", ["kerchunk-parquet", "icechunk"])
def test_an_export_that_failed_can_be_repeated(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), tail="cut", labelled=True)
    store, out = ShardStore.open(plain.write(tmp_path)), tmp_path / "export.parq"
    failing = (kerchunk, "_record") if format == "kerchunk-parquet" else (icechunk, "_write")

    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as changed:
        changed.setattr(*failing, fails)
        for _ in range(2):
            with pytest.raises(OSError, match="full"):
                make_export(store, format, out)
    make_export(store, format, out)
    assert not list(out.glob(".saev*"))
    job = {"format": format, "out": str(out), "truth": write_truth(plain, tmp_path / "truth.npz")}
    assert read_elsewhere([job], tmp_path) == [[]]
    if format == "icechunk":
        with pytest.raises(StoreExistsError):
            make_export(store, format, out)


def test_of_two_writers_of_a_repository_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    store, real = small_store(tmp_path), icechunk._write

    def slow(*arguments: object) -> None:
        real(*arguments)
        with monkeypatch.context() as changed:
            changed.setattr(icechunk, "_write", real)
            store.to_icechunk(tmp_path / "repository")

    monkeypatch.setattr(icechunk, "_write", slow)
    with pytest.raises(WriterConflictError, match="another process has written to the repository meanwhile"):
        store.to_icechunk(tmp_path / "repository")


def test_an_icechunk_repository_is_not_overwritten(tmp_path: Path):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    store = small_store(tmp_path)
    store.to_icechunk(tmp_path / "repository")
    before = {path: path.read_bytes() for path in (tmp_path / "repository").rglob("*") if path.is_file()}
    with pytest.raises(StoreExistsError, match="already exists"):
        store.to_icechunk(tmp_path / "repository")
    assert {path: path.read_bytes() for path in (tmp_path / "repository").rglob("*") if path.is_file()} == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("append", [False, True])
def test_icechunk_in_a_forked_child_is_refused(tmp_path: Path, append: bool):
    """It hung there."""
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    store = small_store(tmp_path)
    store.to_icechunk(tmp_path / "repository", chunks=(1, 1, 5, 8))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would not run there
        signal.alarm(20)
        code = 1
        try:
            store.to_icechunk(tmp_path / ("repository" if append else "child"), append=append)
        except ForkError as error:
            code = 0 if error.remedy and "spawn" in error.remedy else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (tmp_path / "child").exists()


def test_many_references_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = small_store(tmp_path)
    monkeypatch.setattr(_references, "MANY_REFERENCES", 7)
    with pytest.warns(SaevStoreWarning, match="larger chunks make fewer"):
        store.to_kerchunk(tmp_path / "r.json", chunks=(1, 3, 5, 8))
    monkeypatch.setattr(_references, "MANY_REFERENCES", 8)
    store.to_kerchunk(tmp_path / "r.json", chunks=(1, 3, 5, 8))


def test_a_large_short_chunk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = small_store(tmp_path, tail="cut")
    nbytes = 3 * store.layout.example_nbytes
    monkeypatch.setattr(_references, "_INLINE_MAX_BYTES", nbytes)
    store.to_kerchunk(tmp_path / "r.json", chunks=(3, 3, 5, 8))
    monkeypatch.setattr(_references, "_INLINE_MAX_BYTES", nbytes - 1)
    with pytest.raises(ArgumentError, match="contain the whole chunk"):
        store.to_kerchunk(tmp_path / "r.json", chunks=(3, 3, 5, 8))
    store.to_kerchunk(tmp_path / "r.json", chunks=(1, 3, 5, 8))


def test_parquet_in_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fastparquet")
    plain = plain_store(Layout(25, (2, 5), 3, True, 4, 6), tail="cut", labelled=True)
    store = ShardStore.open(plain.write(tmp_path))
    monkeypatch.setattr(kerchunk, "_RECORD_SIZE", 4)
    monkeypatch.setattr(kerchunk, "_STEP", 3)
    truth, jobs = write_truth(plain, tmp_path / "truth.npz"), []
    for format, chunks in (
        ("kerchunk", (1, 1, 4, 4)),
        ("kerchunk-parquet", (1, 1, 4, 4)),
        ("kerchunk-parquet", (3, 2, 4, 4)),
    ):
        out = tmp_path / f"export{len(jobs)}{'.json' if format == 'kerchunk' else '.parq'}"
        make_export(store, format, out, chunks=chunks)
        jobs.append({"format": format, "out": str(out), "truth": truth})
    assert read_elsewhere(jobs, tmp_path) == [[], [], []]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_the_command(format: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), labelled=True)
    folder = plain.write(tmp_path)
    new = tmp_path / "elsewhere" / plain.name
    out = tmp_path / ("out.json" if format in {"kerchunk", "tensorstore"} else "out")
    assert main(["export", str(folder), str(out), "--format", format, "--template", f"file://{new}", "--json"]) == 0
    said = capfd.readouterr()  # also what libraries write past Python
    assert json.loads(said.out) == {"out": str(out), "format": format}
    assert said.err == ""
    assert main(["export", str(folder), str(tmp_path), "--format", format, "--json"]) != 0
    said = capfd.readouterr()
    assert (said.out, "error" in json.loads(said.err)) == ("", True)
    new.parent.mkdir()
    shutil.move(folder, new)
    truth = write_truth(plain, tmp_path / "truth.npz")
    assert read_elsewhere([{"format": format, "out": str(out), "truth": truth}], tmp_path) == [[]]


def test_wrong_usage_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = small_store(tmp_path)
    for arguments, said in (
        (["--format", "netcdf"], "netcdf"),
        (["--chunks", "1,x"], "not a list of integers"),
        (["--format", "tensorstore", "--chunks", "1,3,5,8"], "whole shards"),
    ):
        assert main(["export", store.url, str(tmp_path / "r.json"), *arguments]) == 2
        assert said in capsys.readouterr().err


def test_exports_into_one_folder_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """References of two stores would be mixed, and open."""
    pytest.importorskip("fastparquet")
    layout, record = Layout(7, (2, 5), 3, True, 4, 3), kerchunk._record
    one, two = (
        ShardStore.open(plain_store(layout, seed=seed).write(tmp_path / name)) for seed, name in ((1, "a"), (2, "b"))
    )
    out, refused = str(tmp_path / "out"), []

    def meanwhile(*args):
        if not refused:
            refused.append(True)
            with pytest.raises(WriterConflictError):
                two.to_kerchunk(out, format="parquet")
        return record(*args)

    monkeypatch.setattr(kerchunk, "_record", meanwhile)
    one.to_kerchunk(out, format="parquet")
    assert refused
    assert not [name for name in os.listdir(out) if name.startswith(TEMP_PREFIX)]


@pytest.mark.parametrize(("name", "export"), [
    ("a{b}", lambda store, folder: store.to_kerchunk(f"{folder}/out", format="parquet")),
    ("a\\b", lambda store, folder: ShardStore.open(folder / store.name).to_tensorstore_spec()),
])  # fmt: skip
def test_names_that_readers_take_for_something_else_are_refused(tmp_path: Path, name: str, export):
    """They would read another folder, or fill values."""
    pytest.importorskip("fastparquet")
    plain = plain_store(Layout(7, (2, 5), 3, True, 4, 3), seed=1)
    store = ShardStore.open(plain.write(tmp_path / name))
    with pytest.raises(ArgumentError, match="braces|backslash"):
        export(store, tmp_path / name)


@pytest.mark.parametrize("array", ["activations", "labels"])
@pytest.mark.parametrize("tail", ["cut", "padded"])
def test_nothing_is_written_through_a_spec(tmp_path, array, tail):
    """TensorStore opens for writing too where nothing is said."""
    ts = pytest.importorskip("tensorstore")
    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), labelled=True, tail=tail)
    folder = plain.write(tmp_path)
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    spec = ShardStore.open(folder).to_tensorstore_spec(array)
    with pytest.raises(ValueError, match=r"writing|only reading"):
        ts.open(spec).result()[0].write(1).result()
    with pytest.raises(ValueError, match=r"writing|only reading"):
        ts.open(spec, read=True, write=True).result()[0].write(1).result()
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before
    assert ts.open(spec, read=True).result().shape == ((7, 3, 5, 8) if array == "activations" else (7, 4))
