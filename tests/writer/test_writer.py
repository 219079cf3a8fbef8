"""What a user of the writer meets: good input of every kind, bad input, wrong order, other writers."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case
from transports import CountingTransport

from saev_store.errors import (
    ArgumentError,
    ForkError,
    IncompleteStoreError,
    ResumeError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.store import ShardStore
from saev_store.transport import Transport, open_transport
from saev_store.writer import ShardWriter, create_store, discard_unfinished, load_digests, unfinished


def begin(transport: Transport, this: Case, **options: object) -> ShardWriter:
    settings = {"pad": this.pad, "block_bytes": this.block_bytes, "checkpoint_bytes": 128, "on_nonfinite": "allow"}
    return create_store(transport, this.metadata, **{**settings, **options})


def written(transport: Transport, this: Case, sizes: list[int], **options: object) -> None:
    with begin(transport, this, **options) as writer:
        for k in sizes:
            this.append(writer, writer.next_example, writer.next_example + k)
        while writer.next_example < this.n:
            this.append(writer, writer.next_example, writer.next_example + 1)


def folder_content(root: Path, this: Case) -> dict[str, bytes]:
    folder = root / this.name
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- good input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
@pytest.mark.parametrize("protocol", ["1.0.0", "2.0", "2.1", "3.0"])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_store_on_disk_is_what_it_must_be(tmp_path: Path, engine, protocol, labelled) -> None:
    this = case(protocol=protocol, labelled=labelled, pad=engine != "fsspec")
    transport = open_transport(tmp_path, engine=engine)
    with begin(transport, this, pad=None) as writer:
        this.append(writer, 0, 5)
        this.append(writer, 5, 7)
    assert writer.complete
    assert writer.url.endswith(this.name)
    this.check(folder_content(tmp_path, this))
    store = ShardStore.open(tmp_path / this.name)
    assert this.matches(store)
    assert (store.labels is None) == (this.labels is None)


@given(
    sizes=st.lists(st.integers(0, 9), max_size=6),
    n=st.integers(1, 20),
    per_shard=st.integers(1, 7),
    block_bytes=st.sampled_from([4, 24, 64, 1000]),
    checkpoint_bytes=st.sampled_from([4, 100, 100_000]),
    pad=st.booleans(),
)
def test_batch_sizes_never_show(sizes, n, per_shard, block_bytes, checkpoint_bytes, pad) -> None:
    this = case(n=n, per_shard=per_shard, block_bytes=block_bytes, pad=pad)
    kept, left = [], n
    for k in sizes:
        kept.append(min(k, left))
        left -= kept[-1]
    memory = MemoryTransport()
    written(memory, this, kept, checkpoint_bytes=checkpoint_bytes)
    this.check(memory.at(this.name).files)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.astype(">f4"),
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
        lambda a: a[::-1].copy()[::-1],
        lambda a: np.moveaxis(np.moveaxis(a, 0, -1).copy(), -1, 0),
        lambda a: np.frombuffer(a.tobytes(), "<f4").reshape(a.shape),  # read-only
    ],
    ids=["big-endian", "fortran", "strided", "reversed", "transposed", "read-only"],
)
def test_any_strides_and_byte_order(change) -> None:
    this = case(n=9, block_bytes=16)
    memory = MemoryTransport()
    with begin(memory, this) as writer:
        writer.append(change(this.acts[:5]), this.labels[:5])
        for i in range(5, 9):  # one example at a time, without the first axis
            writer.append(change(this.acts[i : i + 1])[0], this.labels[i])
    this.check(memory.at(this.name).files)


def test_half_precision_is_widened_exactly() -> None:
    this = case(n=3)
    half = np.random.default_rng(0).normal(size=this.acts.shape).astype(np.float16)
    memory = MemoryTransport()
    with begin(memory, this) as writer:
        writer.append(half, this.labels)
    assert memory.read(f"{this.name}/acts000000.bin")[: half.size * 4] == half.astype("<f4").tobytes()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    this = case(n=7)
    rng = np.random.default_rng(0)
    acts = torch.from_numpy(rng.normal(size=this.acts.shape).astype(np.float32)).to(torch.bfloat16)
    memory = MemoryTransport()
    with begin(memory, this) as writer:
        writer.append(acts[:2], torch.from_numpy(this.labels[:2]))
        writer.append(acts[2:5].float().requires_grad_(), torch.from_numpy(this.labels[2:5]).long())
        writer.append(acts[5:].float().transpose(1, 2).contiguous().transpose(1, 2), this.labels[5:])
        with pytest.raises(ArgumentError, match="does not become a NumPy array"):
            writer.append(acts[:1].to_sparse())
    found = np.frombuffer(b"".join(memory.read(f"{this.name}/acts{i:06d}.bin") for i in range(3)), "<f4")
    assert (found[: this.acts.size].reshape(this.acts.shape) == acts.float().numpy()).all()


def test_the_callers_memory_may_be_reused_at_once(tmp_path: Path) -> None:
    this = case(n=30, per_shard=10, d_model=50, block_bytes=4096)
    buffer = np.empty((3, *this.acts.shape[1:]), np.float32)
    with begin(open_transport(tmp_path), this) as writer:
        for i in range(0, 30, 3):
            buffer[:] = this.acts[i : i + 3]
            writer.append(buffer, this.labels[i : i + 3])
            buffer[:] = -1
    this.check(folder_content(tmp_path, this))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acts", "message"),
    [
        (np.zeros((1, 2, 3, 3), np.float32), r"\(1, 2, 3, 3\); it must be \(k, 2, 3, 2\)"),
        (np.zeros((2, 3), np.float32), "it must be"),
        (np.zeros((1, 3, 2, 2), np.float32), "it must be"),
        (np.zeros((1, 2, 3, 2)), r"float64.*astype\(np.float32\)"),
        (np.zeros((1, 2, 3, 2), np.int32), "int32"),
        (np.zeros((1, 2, 3, 2), np.complex64), "complex64"),
        (np.ma.masked_array(np.zeros((1, 2, 3, 2), np.float32), mask=True), "masked"),
        ([[1.0], [1.0, 2.0]], "does not become a NumPy array"),
        ("activations", "it must be"),
        (None, "it must be"),
    ],
)
def test_bad_activations_are_refused_and_nothing_is_taken(acts, message) -> None:
    this = case()
    memory = MemoryTransport()
    with begin(memory, this) as writer:
        this.append(writer, 0, 2)
        with pytest.raises(ArgumentError, match=message) as caught:
            writer.append(acts, this.labels[2:3])
        assert caught.value.where == "acts"
        assert writer.next_example == 2
        this.append(writer, 2, 7)
    this.check(memory.at(this.name).files)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros((1, 3), np.uint8), "none for CLS"),
        (np.zeros((2, 2), np.uint8), r"\(1, 2\)"),
        (np.full((1, 2), 256), "from 256 to 256"),
        (np.full((1, 2), -1), "from -1"),
        (np.zeros((1, 2)), "float64"),
        (None, "earlier ones have them"),
    ],
)
def test_bad_labels_are_refused(labels, message) -> None:
    this = case()
    with begin(MemoryTransport(), this) as writer:
        this.append(writer, 0, 2)
        with pytest.raises(ArgumentError, match=message):
            writer.append(this.acts[2:3], labels)
        writer.append(this.acts[2:], this.labels[2:].astype(np.int64))


def test_labels_for_some_only_are_refused_also_after_a_resume() -> None:
    this, disk = case(labelled=False), Disk()
    with pytest.raises(IncompleteStoreError), begin(disk, this) as writer:
        writer.append(this.acts[:4])
    with pytest.raises(ArgumentError, match="earlier ones have none"), begin(disk, this, resume=True) as writer:
        writer.append(this.acts[4:], np.zeros((3, 2), np.uint8))


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    this = case(n=4)
    acts = np.zeros(this.acts.shape, np.float32)
    acts[2, 1, 0, 1] = np.nan
    with pytest.raises(ArgumentError, match=r"example 2 holds 1 .* nan at \[layer position 1, token 0, d_model 1\]"):
        written(MemoryTransport(), Case(this.metadata, acts, None, True, 64), [4], on_nonfinite="raise")
    memory = MemoryTransport()
    with pytest.warns(SaevStoreWarning, match="example 2 holds 1"):
        written(memory, Case(this.metadata, acts, None, True, 64), [4], on_nonfinite="warn")
    with begin(MemoryTransport(), this, on_nonfinite="raise") as writer:
        writer.append(np.zeros_like(acts[:1]), None)
        with pytest.raises(ArgumentError, match="example 3 holds 1"):
            writer.append(acts[:3], None)
        with pytest.raises(ArgumentError, match="example 1 holds 1"):
            writer.append(acts[2], None)
        writer.append(np.zeros_like(acts[1:]), None)
    # Finite values whose sum overflows are fine.
    big = np.full(this.acts.shape, np.finfo(np.float32).max, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(MemoryTransport(), Case(this.metadata, big, None, True, 64), [4], on_nonfinite="raise")
    cancelling = np.zeros(this.acts.shape, np.float32)
    cancelling[0, 0, 0] = [np.inf, -np.inf]
    with pytest.raises(ArgumentError, match="example 0 holds 2"):
        written(MemoryTransport(), Case(this.metadata, cancelling, None, True, 64), [4], on_nonfinite="raise")


def test_more_examples_than_promised() -> None:
    this = case()
    with begin(MemoryTransport(), this) as writer:
        this.append(writer, 0, 5)
        with pytest.raises(ArgumentError, match="3 examples were appended at example 5, but the store ends at 7"):
            writer.append(this.acts[:3], this.labels[:3])
        this.append(writer, 5, 7)
        with pytest.raises(ArgumentError, match="ends at 7"):
            this.append(writer, 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"part": (2, 2)},
        {"part": (-1, 2)},
        {"part": 3},
        {"part": ("a", 2)},
        {"resume": "yes"},
        {"on_nonfinite": "ignore"},
        {"block_bytes": 0},
        {"block_bytes": 6},
        {"block_bytes": 1 << 40},
        {"block_bytes": True},
        {"checkpoint_bytes": -4},
        {"verify": "no"},
    ],
    ids=str,
)
def test_bad_options(options) -> None:
    with pytest.raises(ArgumentError) as caught:
        begin(MemoryTransport(), case(), **options)
    assert caught.value.where in options


# -- wrong order -------------------------------------------------------------------------------------------------------


def test_leaving_early_tells_how_far_and_how_to_go_on(tmp_path: Path) -> None:
    this = case()
    transport = open_transport(tmp_path)
    with (
        pytest.raises(IncompleteStoreError, match=r"4 of 7 examples.*resume=True, and append the rest"),
        begin(transport, this) as writer,
    ):
        this.append(writer, 0, 4)
    with pytest.raises(IncompleteStoreError, match="never published"):
        ShardStore.open(tmp_path / this.name)
    assert [found.name for found in unfinished(transport)] == [this.name]
    with pytest.raises(IncompleteStoreError, match="with 4 of 7 examples.*resume=True"):
        begin(transport, this)
    with begin(transport, this, resume=True) as writer:
        assert (writer.next_example, writer.n_written, writer.example_range) == (4, 4, (0, 7))
        this.append(writer, 4, 7)
    this.check(folder_content(tmp_path, this))
    assert unfinished(transport) == ()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_block_keeps_what_was_appended(error) -> None:
    this, disk = case(), Disk()
    with pytest.raises(error), begin(disk, this) as writer:
        this.append(writer, 0, 4)
        raise error
    with begin(disk, this, resume=True) as writer:
        assert writer.next_example == 4
        this.append(writer, 4, 7)
    this.check(disk.content(this.name))


def test_an_exception_after_the_last_example_does_not_publish() -> None:
    this, disk = case(), Disk()
    with pytest.raises(RuntimeError), begin(disk, this) as writer:
        this.append(writer, 0, 7)
        raise RuntimeError
    assert "metadata.json" not in disk.content(this.name)
    with begin(disk, this, resume=True) as writer:
        assert writer.next_example == 7
    this.check(disk.content(this.name))


def test_a_complete_store_is_never_written_again(tmp_path: Path) -> None:
    this = case()
    transport = open_transport(tmp_path)
    written(transport, this, [7])
    for resume in (False, True, "auto"):
        with pytest.raises(StoreExistsError, match="complete.*exist_ok=True"):
            begin(transport, this, resume=resume)
    with begin(transport, this, exist_ok=True) as writer:
        assert writer.complete
        assert writer.next_example == 7
        with pytest.raises(StoreExistsError, match="nothing left to do"):
            this.append(writer, 0, 1)
    with pytest.raises(StoreExistsError):
        discard_unfinished(transport, this.metadata)
    this.check(folder_content(tmp_path, this))


def test_what_a_crash_after_publishing_leaves_is_tidied_up(tmp_path: Path) -> None:
    this = case()
    transport = open_transport(tmp_path)
    written(transport, this, [7])
    (tmp_path / this.name / ".saev_store/receipts").mkdir(parents=True)
    (tmp_path / this.name / ".saev_store/receipts/acts000000.json").write_text("{}")
    (tmp_path / this.name / ".saev_store.tmp-1-2").write_text("half")
    assert begin(transport, this, exist_ok=True).complete
    this.check(folder_content(tmp_path, this))


def test_a_foreign_folder_is_never_touched(tmp_path: Path) -> None:
    this = case()
    folder = tmp_path / this.name
    folder.mkdir()
    (folder / "acts000000.bin").write_bytes(b"somebody's")
    transport = open_transport(tmp_path)
    for resume in (False, True, "auto"):
        with pytest.raises(IncompleteStoreError, match=r"acts000000\.bin.*never overwritten"):
            begin(transport, this, resume=resume)
    with pytest.raises(IncompleteStoreError):
        discard_unfinished(transport, this.metadata)
    (folder / "metadata.json").write_bytes(this.metadata.raw)
    with pytest.raises(StoreExistsError, match=r"shards\.json is not"):
        begin(transport, this, exist_ok=True)
    (folder / "metadata.json").write_bytes(b"{}")
    with pytest.raises(StoreExistsError, match="other metadata"):
        begin(transport, this, exist_ok=True)
    assert (folder / "acts000000.bin").read_bytes() == b"somebody's"


def test_resuming_with_other_options_names_each() -> None:
    this, disk = case(), Disk()
    with pytest.raises(IncompleteStoreError), begin(disk, this) as writer:
        this.append(writer, 0, 4)
    with pytest.raises(ResumeError, match=r"pad is True there, False .*; block_bytes is 64 there, 128"):
        begin(disk, this, resume=True, pad=False, block_bytes=128)
    with pytest.raises(ResumeError, match="world is 1 there, 2 in this call"):
        begin(disk, this, resume=True, part=(0, 2))


def test_resuming_with_other_metadata_names_the_sibling() -> None:
    this, other, disk = case(), case(n=8), Disk()
    with pytest.raises(IncompleteStoreError), begin(disk, this) as writer:
        this.append(writer, 0, 4)
    with pytest.raises(ResumeError, match=f"{this.name}: n_ex is 7 there, 8 in this call.*auto"):
        begin(disk, other, resume=True)
    with begin(disk, other, resume="auto") as writer:
        writer.append(*other.rows(0, 8))
    other.check(disk.content(other.name))


def test_resume_of_nothing_begins() -> None:
    this, disk = case(), Disk()
    written(disk, this, [7], resume=True)
    this.check(disk.content(this.name))


def test_a_damaged_claim_is_told(tmp_path: Path) -> None:
    this = case()
    transport = open_transport(tmp_path)
    begin(transport, this).close()
    claim = tmp_path / this.name / ".saev_store/claim.json"
    for raw in (b"[]", b'{"version": 9}', b"[" * 100_000, json.dumps({"version": 1, "options": 3}).encode()):
        claim.write_bytes(raw)
        with pytest.raises(IncompleteStoreError, match="cannot be understood"):
            begin(transport, this, resume=True)


def test_discarding(tmp_path: Path) -> None:
    this = case()
    transport = open_transport(tmp_path)
    discard_unfinished(transport, this.metadata)
    writer = begin(transport, this)
    this.append(writer, 0, 4)
    with pytest.raises(WriterConflictError):
        discard_unfinished(transport, this.metadata)
    writer.close()
    discard_unfinished(transport, this.metadata)
    assert list(tmp_path.iterdir()) == []
    written(transport, this, [7])


# -- other writers, threads, processes ---------------------------------------------------------------------------------


def test_a_second_writer_hears_of_the_first(tmp_path: Path) -> None:
    this = case()
    transport = open_transport(tmp_path)
    with begin(transport, this) as writer:
        for resume in (True, "auto"):
            with pytest.raises(WriterConflictError, match="process"):
                begin(transport, this, resume=resume)
        this.append(writer, 0, 7)
    this.check(folder_content(tmp_path, this))


def test_where_there_are_no_locks_the_older_writer_notices() -> None:
    this, bucket = case(), Disk(posix=False)
    old = begin(bucket, this)
    this.append(old, 0, 2)
    new = begin(bucket, this, resume=True)
    with pytest.raises(WriterConflictError, match="has taken over"):
        this.append(old, 2, 6)
        old.checkpoint()
    with pytest.raises(SaevStoreError):
        this.append(old, 6, 7)
    old.close() if old._background.error is None else None
    with new:
        this.append(new, 0, 7)
    this.check(bucket.content(this.name))


def test_a_writer_whose_store_was_discarded_is_told() -> None:
    """Where there are no locks; it is not called a take-over."""
    this, bucket = case(), Disk(posix=False)
    old = begin(bucket, this)
    this.append(old, 0, 2)
    discard_unfinished(bucket, this.metadata)
    with pytest.raises(WriterConflictError, match="published or discarded while this writer was at work"):
        this.append(old, 2, 6)
        old.checkpoint()
    old.close() if old._background.error is None else None


def test_a_writer_says_how_far_it_is(tmp_path: Path) -> None:
    this = case()
    transport = open_transport(tmp_path)
    writer = begin(transport, this)
    this.append(writer, 0, 2)
    assert repr(writer) == f"<ShardWriter {tmp_path}/{this.name}: 2 of 7 examples, open>"
    writer.close()
    assert repr(writer) == f"<ShardWriter {tmp_path}/{this.name}: 2 of 7 examples, closed>"
    with begin(transport, this, resume=True) as writer:
        this.append(writer, 2, 7)
    assert repr(writer) == f"<ShardWriter {tmp_path}/{this.name}: 7 of 7 examples, complete>"


def test_no_thread_outlives_its_writer(tmp_path: Path) -> None:
    this = case()

    before = set(threading.enumerate())  # frames that other tests' tracebacks hold may keep a writer alive

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("saev-store")} - before

    transport = open_transport(tmp_path)
    writer = begin(transport, this)
    this.append(writer, 0, 4)
    assert threads()
    del writer
    assert not threads()
    with pytest.raises(ZeroDivisionError), begin(transport, this, resume=True) as writer:
        this.append(writer, writer.next_example, 5)
        1 / 0  # noqa: B018  # raises
    assert not threads()


def test_a_forked_child_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    this = case()
    writer = begin(MemoryTransport(), this)
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: -1)
        with pytest.raises(ForkError, match="forked child"):
            this.append(writer, 0, 7)
    writer.close()


def test_a_closed_writer_refuses() -> None:
    this = case()
    writer = begin(MemoryTransport(), this)
    writer.close()
    writer.close()
    with pytest.raises(ArgumentError, match="closed"):
        this.append(writer, 0, 1)
    with pytest.raises(ArgumentError, match="closed"):
        writer.checkpoint()


def test_an_interrupt_within_append_is_not_guessed_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an append was cut short, the caller cannot know what was taken: only a resume tells."""
    this, disk = case(n=12, per_shard=5), Disk()
    writer = begin(disk, this)
    this.append(writer, 0, 3)
    real, calls = writer._send, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args, **kwargs)

    monkeypatch.setattr(writer, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt), writer:
        try:
            this.append(writer, 3, 9)
        finally:
            with pytest.raises(ArgumentError, match="cut short by an error"):
                this.append(writer, 3, 9)
    with pytest.raises(ArgumentError, match="closed"):
        this.append(writer, 3, 9)
    with begin(disk, this, resume=True) as writer:
        assert 2 <= writer.next_example <= 9
        this.append(writer, writer.next_example, 12)
    this.check(disk.content(this.name))


def test_digests_and_receipts_cost_no_request_per_block(tmp_path: Path) -> None:
    this = case(n=64, per_shard=16, d_model=16, block_bytes=64, labelled=False)
    transport = CountingTransport(open_transport(tmp_path))
    written(transport, this, [64], checkpoint_bytes=1 << 20)
    counted = transport.counters.operations
    n_blocks = this.acts.nbytes // 64
    assert n_blocks > 300
    assert sum(n for name, n in counted.items() if not name.startswith("sink.")) < 60


def test_digests_are_loaded_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = case()
    written(open_transport(tmp_path), this, [7])
    transport = open_transport(tmp_path / this.name)
    digests = load_digests(transport)
    assert digests.block_bytes == 64
    assert set(digests.files) == {"acts000000.bin", "acts000001.bin", "acts000002.bin", "labels.bin"}
    path = tmp_path / this.name / "digests.json"
    assert digests.to_bytes() == path.read_bytes()
    good = json.loads(path.read_bytes())
    for change in (
        {"version": 2},
        {"algorithm": "md5"},
        {"block_bytes": 0},
        {"block_bytes": True},
        {"files": []},
        {"files": {"a": {"nbytes": -1, "digests": []}}},
        {"files": {"a": {"nbytes": 1, "digests": []}}},
        {"files": {"a": {"nbytes": 1, "digests": ["x"]}}},
        {"files": {"a": 3}},
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(SaevStoreError, match="Delete it"):
            load_digests(transport)
    path.write_bytes(json.dumps(good).encode())
    assert load_digests(transport) == digests
    with monkeypatch.context() as patch:  # what is longer than any of ours is not read
        patch.setattr("saev_store.writer._digests.MAX_DOCUMENT_BYTES", path.stat().st_size - 1)
        with pytest.raises(TransportError, match="at most"):
            load_digests(transport)
    path.write_text("{")
    with pytest.raises(SaevStoreError, match="no JSON"):
        load_digests(transport)
    path.unlink()
    assert load_digests(transport) is None
