"""`record` reads, computes and writes at the same time: memory, reports, and what is left after each kind of fault."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from system_faults import SystemFaults
from tiny_models import D_MODEL, VOCABULARY, tiny_language, tiny_vision
from waiting import soon

from saev_store import ShardStore
from saev_store.errors import ArgumentError, IncompleteStoreError, TransportError
from saev_store.record import ImageBatches, Images, Recorder, RecordingReport, Texts, _record, record
from saev_store.record._examples import Batch
from saev_store.record._host_copy import HostCopy
from saev_store.record._pipeline import N_ALIVE, N_WITH_VECTORS
from saev_store.writer import ShardWriter

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

N = 41
OPTIONS = {"layers": (2, 0), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": 17 * 2 * 8}
PIXELS = np.random.default_rng(3).standard_normal((N, 3, 32, 32), dtype=np.float32)
IDS = [np.random.default_rng(n).integers(3, VOCABULARY, n) for n in range(1, 30)]
SOURCES = {
    "images": lambda: Images(PIXELS, 2),
    "batches": lambda: ImageBatches((PIXELS[i : i + 2] for i in range(0, N, 2)), N),
    "window": lambda: Texts(IDS, context=16, bos=1, batch_size=2),
    "packed": lambda: Texts(IDS, context=16, pack=True, batch_size=1),
    "stream": lambda: Texts(IDS, context=16, layout="stream", batch_size=2, example_tokens=12),
}


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {"images": tiny_vision("ViTModel"), "texts": tiny_language("LlamaModel")}


@pytest.fixture(scope="module")
def whole(models: dict[str, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ShardStore]:
    """The store of a source that was recorded without interruption; made once."""
    made: dict[str, ShardStore] = {}

    def make(kind: str) -> ShardStore:
        if kind not in made:
            made[kind] = record(model_of(models, kind), SOURCES[kind](), tmp_path_factory.mktemp(kind), **OPTIONS)
        return made[kind]

    return make


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    names = ("saev-store-record", "saev-store-writer")
    assert soon(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith(names)])


def model_of(models: dict[str, torch.nn.Module], kind: str) -> torch.nn.Module:
    return models["images" if kind in {"images", "batches"} else "texts"]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Counted:
    """The largest number of objects of each kind that were alive at once."""

    def __init__(self) -> None:
        self._alive: dict[str, int] = {}
        self._lock = threading.RLock()
        self.most: dict[str, int] = {}

    def count(self, kind: str, thing: object) -> None:
        with self._lock:
            self._alive[kind] = self._alive.get(kind, 0) + 1
            self.most[kind] = max(self.most.get(kind, 0), self._alive[kind])
        weakref.finalize(thing, self._gone, kind)

    def n_alive(self, kind: str) -> int:
        return self._alive.get(kind, 0)

    def _gone(self, kind: str) -> None:
        with self._lock:
            self._alive[kind] -= 1


@pytest.mark.usefixtures("padding_is_known")
@pytest.mark.parametrize("kind", SOURCES)
def test_no_more_batches_are_alive_than_is_said(
    models: dict[str, torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The writing thread waits for a copy until as many are read as can be."""
    counted, n_copies = Counted(), 0
    source, result = SOURCES[kind](), HostCopy.result
    batches = source.batches

    def counting(start: int, end: int) -> Iterator[Batch]:
        def counted_batch(batch: Batch) -> Batch:
            counted.count("read", batch)
            return batch

        return map(counted_batch, batches(start, end))

    def counting_copy(copy: HostCopy, tensor: torch.Tensor, stream: object) -> None:
        copy._done, copy._tensor = None, tensor
        counted.count("computed", tensor)

    def slow(copy: HostCopy) -> torch.Tensor:
        nonlocal n_copies
        n_copies += 1
        if n_copies in {3, 6}:
            assert soon(lambda: counted.n_alive("read") >= N_ALIVE and counted.n_alive("computed") >= N_WITH_VECTORS)
            time.sleep(0.03)  # one more would come now
        return result(copy)

    monkeypatch.setattr(source, "batches", counting)
    monkeypatch.setattr(HostCopy, "__init__", counting_copy)
    monkeypatch.setattr(HostCopy, "result", slow)
    record(model_of(models, kind), source, tmp_path, **OPTIONS)
    assert counted.most == {"read": N_ALIVE, "computed": N_WITH_VECTORS}


# -- faults ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def raising_source(kind: str, error: BaseException, at: int) -> Iterator[Callable[[], object]]:
    """A source whose batch number `at` raises."""

    def make() -> object:
        source = SOURCES[kind]()
        batches = source.batches

        def failing(start: int, end: int) -> Iterator[Batch]:
            for number, batch in enumerate(batches(start, end)):
                if number == at:
                    raise error
                yield batch

        source.batches = failing
        return source

    yield make


@pytest.mark.parametrize("kind", ["images", "stream"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "the disk of the images"), KeyboardInterrupt()])
def test_a_source_that_raises(
    models: dict[str, torch.nn.Module],
    whole: Callable[[str], ShardStore],
    tmp_path: Path,
    kind: str,
    error: BaseException,
) -> None:
    model = model_of(models, kind)
    with raising_source(kind, error, 5) as make, pytest.raises(type(error)) as caught:
        record(model, make(), tmp_path, **OPTIONS)
    assert caught.value is error
    goes_on(model, kind, tmp_path, whole(kind))


@pytest.mark.parametrize("kind", ["images", "stream"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("of the GPU"), KeyboardInterrupt()])
def test_a_model_that_raises(
    models: dict[str, torch.nn.Module],
    whole: Callable[[str], ShardStore],
    tmp_path: Path,
    kind: str,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, n_calls = model_of(models, kind), 0
    forward = type(model).forward

    def fail(*args: object, **keywords: object) -> object:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 6:
            raise error
        return forward(*args, **keywords)

    monkeypatch.setattr(type(model), "forward", fail)
    with pytest.raises(type(error)) as caught:
        record(model, SOURCES[kind](), tmp_path, **OPTIONS)
    monkeypatch.undo()
    assert caught.value is error
    goes_on(model, kind, tmp_path, whole(kind))


@pytest.mark.parametrize("kind", ["images", "stream"])
@pytest.mark.parametrize("how", ["raises", "full", "interrupted"])
def test_a_writer_that_raises(
    models: dict[str, torch.nn.Module],
    whole: Callable[[str], ShardStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    how: str,
) -> None:
    model, append, n_calls = model_of(models, kind), ShardWriter.append, 0

    def fail(writer: ShardWriter, *args: object, **arrays: object) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 6 and how == "raises":
            raise ArgumentError("it does not like these", where="acts")
        if n_calls == 6 and how == "interrupted":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        append(writer, *args, **arrays)

    faults = SystemFaults(monkeypatch, tmp_path)
    expected = {"raises": ArgumentError, "full": TransportError, "interrupted": KeyboardInterrupt}[how]
    full = faults.failing("pwritev", 2, "ENOSPC", lasting=True) if how == "full" else contextlib.nullcontext()
    with monkeypatch.context() as patch, full, pytest.raises(expected) as caught:
        patch.setattr(ShardWriter, "append", fail)
        record(model, SOURCES[kind](), tmp_path, **OPTIONS)
    assert how != "full" or "No space left" in str(caught.value)
    goes_on(model, kind, tmp_path, whole(kind))


def goes_on(model: torch.nn.Module, kind: str, folder: Path, whole: ShardStore, **options: object) -> None:
    """Nothing is published, and the same call makes the same store."""
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(folder / whole.name)
    store = record(model, SOURCES[kind](), folder, resume=True, **OPTIONS, **options)
    assert content(Path(store.url)) == content(Path(whole.url))


def test_an_interrupt_does_not_wait_until_a_large_batch_is_written(
    models: dict[str, torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, n_calls = ShardWriter.append, 0

    def slow(writer: ShardWriter, *args: object, **arrays: object) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05 if n_calls >= 3 else 0)
        append(writer, *args, **arrays)

    monkeypatch.setattr(_record, "_PIECE_BYTES", 1)
    monkeypatch.setattr(ShardWriter, "append", slow)
    with pytest.raises(KeyboardInterrupt):
        record(models["images"], Images(PIXELS, N), tmp_path, **OPTIONS)
    assert 3 <= n_calls < N


# -- reports -----------------------------------------------------------------------------------------------------------


def test_reports_come_after_each_batch_and_at_the_end(models: dict[str, torch.nn.Module], tmp_path: Path) -> None:
    reports: list[RecordingReport] = []
    threads: set[int] = set()

    def keep(report: RecordingReport) -> None:
        reports.append(report)
        threads.add(threading.get_ident())

    store = record(models["images"], Images(PIXELS, 4), tmp_path, on_report=keep, **OPTIONS)
    assert len(reports) == 11 + 1
    assert threads == {threading.get_ident()}
    counts = [report.n_examples for report in reports]
    assert counts == sorted(counts)
    assert all(report.n_examples + report.n_left == N for report in reports)
    assert all(report.nbytes == report.n_examples * store.layout.example_nbytes for report in reports)
    last = reports[-1]
    assert (last.n_examples, last.n_left, last.left_s, last.nbytes) == (N, 0, 0.0, store.nbytes)
    times = [report.elapsed_s for report in reports]
    assert times == sorted(times)
    assert 0 <= last.source_wait + last.writer_wait <= 1
    assert last.examples_per_s == pytest.approx(N / last.elapsed_s)
    assert last.gb_per_s == pytest.approx(store.nbytes / last.elapsed_s / 1e9)


def test_reports_count_what_this_call_does(models: dict[str, torch.nn.Module], tmp_path: Path) -> None:
    reports: list[RecordingReport] = []
    model, options = models["images"], OPTIONS | {"on_report": reports.append}
    with raising_source("images", OSError("later"), 10) as make, pytest.raises(OSError, match="later"):
        record(model, make(), tmp_path, **options)
    first = reports[-1]
    reports.clear()
    record(model, SOURCES["images"](), tmp_path, **options)
    assert (reports[-1].n_examples, reports[-1].n_left) == (N - 16, 0)  # whole shards of eight are kept
    assert first.n_examples + first.n_left == N
    reports.clear()
    record(model, SOURCES["images"](), tmp_path, exist_ok=True, **options)
    (nothing,) = reports
    assert (nothing.n_examples, nothing.n_left, nothing.examples_per_s) == (0, 0, 0.0)
    assert str(nothing) == "recorded nothing: all examples were there"


def test_a_report_as_text_and_json() -> None:
    begun = RecordingReport(0, 10, 0, 0.0, 0.0, 0.0)
    assert (begun.left_s, begun.source_wait, begun.gb_per_s) == (None, 0.0, 0.0)
    report = RecordingReport(12_000, 3_000, 4 << 30, 312.0, 6.24, 3.12)
    assert str(report) == (
        "recorded 12,000 examples (4.3 GB) in 312 s, 38 examples/s; the model waited 2 % of the time for the source and 1 % for the writer"
    )
    assert report.to_dict() == {
        "n_examples": 12_000,
        "n_left": 3_000,
        "nbytes": 4 << 30,
        "elapsed_s": 312.0,
        "source_wait_s": 6.24,
        "writer_wait_s": 3.12,
        "examples_per_s": pytest.approx(38.4615, abs=1e-4),
        "gb_per_s": pytest.approx(0.013766, abs=1e-6),
        "source_wait": pytest.approx(0.02),
        "writer_wait": pytest.approx(0.01),
        "left_s": pytest.approx(78.0),
    }


def test_the_bar_says_for_whom_the_model_waits(
    models: dict[str, torch.nn.Module], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record(models["images"], Images(PIXELS, 4), tmp_path, **(OPTIONS | {"progress": True}))
    shown = capfd.readouterr().err
    assert "writing: 100%" in shown
    assert "examples/s, waited " in shown
    assert "% for source, " in shown


# -- GPU ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", SOURCES)
def test_on_a_gpu_vectors_are_those_of_its_hooks(models: dict[str, torch.nn.Module], tmp_path: Path, kind: str) -> None:
    """Copies over a side stream give what a plain hook sees, also while the next batches run in the same memory."""
    model = model_of(models, kind)
    try:
        store = record(model, SOURCES[kind](), tmp_path, device="cuda", **OPTIONS)
        source = SOURCES[kind]()
        with Recorder(model, (2, 0)) as recorder:
            geometry = source.geometry(recorder.adapter)
            plain = ((batch, recorder(*batch.inputs)) for batch in source.batches(0, geometry.n_examples))
            acts = torch.cat([found.acts.clone() for found in source.assemble(plain, 0)])
    finally:
        model.to("cpu")
    assert store.shape == (geometry.n_examples, 2, acts.shape[2], D_MODEL)
    assert store[:].tobytes() == acts.numpy().tobytes()
