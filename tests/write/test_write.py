"""Writing: what comes out is the dense array, byte for byte, however it was handed over."""

from __future__ import annotations

import gc
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from written import LOCAL, a_case, append_missing, content, create, cut, files, finish

from saev_store import ShardStore, new_metadata
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import open_transport


@pytest.mark.parametrize("protocol", ["2.0", "3.0", "unlabelled"])
def test_append_in_batches_of_any_size_writes_the_dense_array(tmp_path, protocol):
    rng = np.random.default_rng(5)
    for n, per_shard, batch in [(1, 1, 1), (7, 3, 1), (7, 3, 7), (9, 3, 2), (12, 5, 4), (4, 9, 3), (6, 1, 6)]:
        options = {"labelled": False} if protocol == "unlabelled" else {"protocol": protocol}
        this = a_case(n, per_shard, seed=int(rng.integers(99)), **options)
        root = tmp_path / f"{n}-{per_shard}-{batch}"
        with create(root, this) as writer:
            append_missing(writer, this, batch)
        this.check(content(root / this.name))
        assert sorted(path.name for path in root.iterdir()) == [this.name]  # nothing else is left
        assert this.matches(ShardStore.open(root / this.name))


def test_append_to_a_bucket_writes_the_dense_array():
    for protocol in ("2.0", "3.0"):
        this = cut(a_case(protocol=protocol))
        root = open_transport(f"memory://write-{protocol}")
        finish(root, this)
        this.check(files(root, this.name))
        assert this.matches(ShardStore.open(root.at(this.name)))


def test_append_of_shards_longer_than_a_block_digests_each_block(tmp_path):
    # 5 MiB an example: blocks of 8 MiB begin and end within examples; 4 examples in a shard are 2.5 blocks.
    this = a_case(7, 4, layers=(1,), content=80, cls=False, d_model=1 << 14, labelled=False)
    finish(tmp_path, this, batch=3)
    this.check(content(tmp_path / this.name))
    # Token arrays too: 600 examples of 2,000 document ids are 9.6 MB.
    this = a_case(600, 300, layers=(1,), content=2000, cls=False, d_model=1, protocol="3.0")
    finish(tmp_path, this, batch=300)
    this.check(content(tmp_path / this.name))


def test_append_of_other_dtypes_and_strides_stores_the_same_numbers(tmp_path):
    this = a_case(labelled=False)
    acts = np.random.default_rng(1).standard_normal(this.acts.shape).astype(np.float16)
    this = replace(this, acts=acts.astype("<f4"))
    given = {
        "half": acts,
        "big-endian": acts.astype(">f4"),
        "strided": np.repeat(acts, 2, axis=3)[..., ::2],
        "transposed": np.asfortranarray(acts.astype(np.float32)),
    }
    for name, some in given.items():
        with create(tmp_path / name, this) as writer:
            writer.append(some)
        this.check(content(tmp_path / name / this.name))


def test_append_copies_what_it_is_given(tmp_path):
    this = a_case()
    acts, labels = this.acts.copy(), this.labels.copy()
    with create(tmp_path, this) as writer:
        writer.append(acts, labels)
        acts[:], labels[:] = 0, 0
    this.check(content(tmp_path / this.name))


def test_append_refused_takes_nothing(tmp_path):
    this = a_case(labelled=False)
    acts = np.zeros(this.acts.shape, "<f4")
    this = replace(this, acts=acts)
    bad = acts.copy()
    bad[5, 1, 2, 1] = np.nan
    labels = np.zeros((2, 2), np.uint8)
    with create(tmp_path, this, on_nonfinite="raise") as writer:
        writer.append(acts[:2])
        for where, given in [
            ("acts", (bad[2:],)),
            ("acts", (np.zeros((12, *acts.shape[1:]), "<f4"),)),
            ("acts", (acts[2:, :1],)),
            ("acts", (acts.astype(int)[2:],)),
            ("labels", (acts[2:4], labels)),
        ]:
            with pytest.raises(ArgumentError) as found:
                writer.append(*given)
            assert found.value.where == where
            assert writer.missing == [range(2, 11)]
        writer.append(acts[2:2])  # nothing, which is fine
        writer.append(acts[2:])
    this.check(content(tmp_path / this.name))


def test_append_of_labels_is_for_all_or_none(tmp_path):
    this = a_case()
    with pytest.raises(IncompleteStoreError), create(tmp_path, this) as writer:
        writer.append(*this.rows(0, 5))
        with pytest.raises(ArgumentError) as found:
            writer.append(this.acts[5:])
        assert found.value.where == "labels"
    with pytest.raises(IncompleteStoreError), create(tmp_path, this, resume=True) as writer:
        assert writer.missing == [range(3, 11)]
        with pytest.raises(ArgumentError):  # an earlier process has recorded them
            writer.append(this.acts[3:])
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_append_needs_the_declared_token_arrays_and_takes_no_others(tmp_path):
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[0], content_tokens_per_example=2, cls_token=True, d_model=4, n_examples=2,
        token_arrays={"token_ids": "int32", "labels": "uint8", "mask": "bool", "score": "float32"},
    )  # fmt: skip
    acts, ids = np.zeros((1, 1, 3, 4), np.float32), np.zeros((1, 2), np.int64)
    whole = {"token_ids": ids, "labels": ids, "mask": ids, "score": ids.astype(np.float64).astype(np.float32)}
    writer = ShardStore.create(tmp_path, metadata, progress=False)
    for where, value in [
        ("token_ids", None), ("document_ids", ids), ("token_ids", ids + 2**31), ("mask", ids + 2), ("labels", ids - 1),
        ("token_ids", ids.astype(float)), ("score", ids), ("labels", np.zeros((1, 3), int)),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError) as found:
            writer.append(acts, **{**whole, where: value})
        assert (found.value.where, writer.next_example) == (where, 0)
    for _ in range(2):
        writer.append(acts[0], **{name: values[0] for name, values in whole.items()})
    writer.close()
    assert writer.complete


def test_overflow_is_refused_warned_about_or_saturated_and_all_else_rounded_to_nearest_even(tmp_path):
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[0], content_tokens_per_example=1, cls_token=False, d_model=6, n_examples=2,
        dtype="float16",
    )  # fmt: skip
    acts = np.zeros((2, 1, 1, 6), np.float32)
    acts[0, 0, 0] = [1 + 2**-11, 1 + 3 * 2**-11, 65519.99, -65519.99, 0, 0]
    acts[1, 0, 0, :2] = [65520.0, -1e6]
    this = replace(a_case(), metadata=metadata)
    for policy, largest in (("raise", None), ("warn", np.inf), ("saturate", 65504.0)):
        writer = create(tmp_path / policy, this, on_overflow=policy)
        if policy == "raise":
            with pytest.raises(ArgumentError):
                writer.append(acts)
            writer.close()
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer.append(acts)
        writer.close()
        assert [some.category for some in caught] == [SaevStoreWarning] * (policy == "warn")
        found = ShardStore.open(tmp_path / policy / this.name)
        assert found[0, 0, 0].tolist() == [1.0, 1 + 2**-9, 65504.0, -65504.0, 0, 0]
        assert found[1, 0, 0, :2].tolist() == [largest, -largest]


def test_tensors_of_the_stored_dtype_are_written_bit_for_bit(tmp_path):
    torch = pytest.importorskip("torch")
    for dtype in ("bfloat16", "float16"):
        this = a_case(labelled=False)
        metadata = new_metadata(
            family="clip", ckpt="x", layers=[0, 3], content_tokens_per_example=4, cls_token=True, d_model=8, n_examples=7,
            dtype=dtype,
        )  # fmt: skip
        bits = torch.randint(-(2**15), 2**15, (7, 2, 5, 8), dtype=torch.int16)
        acts = (
            bits.view(getattr(torch, dtype)).permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
        )  # strides of its own
        with create(tmp_path, replace(this, metadata=metadata)) as writer:
            writer.append(acts[:5])
            writer.append(acts[5:].requires_grad_())
        stored = ShardStore.open(tmp_path / metadata.hash).read(dtype="stored")
        assert np.array_equal(stored.view(np.int16), bits.numpy())


# -- write -------------------------------------------------------------------------------------------------------------


def test_write_in_any_order_gives_the_same_store(tmp_path):
    for seed in range(6):
        this = a_case(seed=seed, protocol=("2.0", "3.0")[seed % 2])
        order = np.random.default_rng(seed).permutation(this.n)
        with create(tmp_path / str(seed), this) as writer:
            for example in order.tolist():
                recorded = {name: values[example] for name, values in this.recorded.items()}
                writer.write(example, this.acts[example], **recorded)
        this.check(content(tmp_path / str(seed) / this.name))


def test_write_refuses_what_is_not_missing_and_more_than_it_may_hold(tmp_path):
    this = a_case(labelled=False)
    with create(tmp_path, this) as writer:
        writer.write(0, this.acts[0])
        for example in (0, -1, 11, True, "3", 2.0):
            with pytest.raises(ArgumentError) as found:
                writer.write(example, this.acts[0])
            assert found.value.where == "example"
        with pytest.raises(ArgumentError):
            writer.write(1, this.acts[1:3])
        writer.max_reorder_bytes = 2 * this.metadata.layout.example_nbytes
        writer.write(5, this.acts[5])
        writer.write(2, this.acts[2])
        for example in (2, 7):  # once more; and one too many
            with pytest.raises(ArgumentError):
                writer.write(example, this.acts[example])
        with pytest.raises(ArgumentError):  # they wait for example 1
            writer.append(this.acts[1])
        writer.write(1, this.acts[1])
        for example in (3, 4, 6):
            writer.write(example, this.acts[example])
        writer.append(this.acts[7:])
        with pytest.raises(ArgumentError):
            writer.write(7, this.acts[7])
    this.check(content(tmp_path / this.name))


def test_write_that_waits_is_not_kept_at_the_end(tmp_path):
    this = a_case(labelled=False)
    with pytest.raises(IncompleteStoreError), create(tmp_path, this) as writer:
        for example in (0, 1, 2, 4, 5):
            writer.write(example, this.acts[example])
    with pytest.raises(IncompleteStoreError), create(tmp_path, this, resume=True) as writer:
        assert writer.missing == [range(3, 11)]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_leaving_early_keeps_whole_shards_and_publishes_nothing(tmp_path):
    this = a_case()
    with pytest.raises(IncompleteStoreError), create(tmp_path, this) as writer:
        append_missing(writer, this, most=7)
        assert (writer.missing, writer.complete) == ([range(7, 11)], False)
    with pytest.raises(SaevStoreError):
        ShardStore.open(tmp_path / this.name)
    with create(tmp_path, this, resume=True) as writer:
        assert writer.missing == [range(6, 11)]
        append_missing(writer, this)
    assert writer.complete
    this.check(content(tmp_path / this.name))


def test_leaving_by_an_error_keeps_whole_shards_and_never_publishes(tmp_path):
    this = a_case()
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), create(tmp_path / error.__name__, this) as writer:
            append_missing(writer, this)  # all of it
            raise error
        assert not (tmp_path / error.__name__ / this.name / "metadata.json").exists()
        with create(tmp_path / error.__name__, this, resume=True) as writer:
            assert writer.missing == []
        this.check(content(tmp_path / error.__name__ / this.name))


def test_close_twice_is_fine_and_a_closed_writer_takes_nothing(tmp_path):
    this = a_case()
    writer = create(tmp_path, this)
    append_missing(writer, this, most=4)
    for _ in range(2):
        writer.close()
    for call in (lambda: this.append(writer, 4, 5), lambda: writer.write(4, this.acts[4], this.labels[4])):
        with pytest.raises(ArgumentError):
            call()
    writer = create(tmp_path, this, resume=True)
    append_missing(writer, this)
    with writer:
        writer.close()
    for call in (lambda: this.append(writer, 0, 1), lambda: writer.write(0, this.acts[0], this.labels[0])):
        with pytest.raises(StoreExistsError):
            call()


def test_dropped_writer_lets_go_of_its_lock(tmp_path):
    this = a_case()
    writer = create(tmp_path, this)
    append_missing(writer, this, most=1)
    del writer
    gc.collect()
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_failed_block_is_raised_and_nothing_of_its_shard_counts(tmp_path, monkeypatch):
    this = a_case()
    fails = True

    def open_sink(self, path, **options):
        sink = real(self, path, **options)
        if path == "acts000001.bin" and fails:
            sink.commit = disk_full
        return sink

    def disk_full(*_):
        raise TransportError("the disk is full", where="acts000001.bin")

    real = LOCAL.open_sink
    monkeypatch.setattr(LOCAL, "open_sink", open_sink)
    with pytest.raises(TransportError), create(tmp_path, this) as writer:
        append_missing(writer, this)
    with pytest.raises(IncompleteStoreError), create(tmp_path, this, resume=True) as writer:
        assert writer.missing[0].start == 3  # those behind it may have been durable already
    fails = False
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_failed_block_within_a_shard_is_raised_and_the_shard_is_missing(tmp_path, monkeypatch):
    def open_sink(self, path, **options):
        sink = real(self, path, **options)
        write, begun = sink.write, []

        def disk_full(buffers):
            if len(begun) == 1:
                raise TransportError("the disk is full", where=path)
            begun.append(path)
            write(buffers)

        sink.write = disk_full
        return sink

    # 5 MiB an example, 5 in a shard: 4 blocks.
    this = a_case(5, 5, layers=(1,), content=80, cls=False, d_model=1 << 14, labelled=False)
    real = LOCAL.open_sink
    monkeypatch.setattr(LOCAL, "open_sink", open_sink)
    with pytest.raises(TransportError), create(tmp_path, this) as writer:
        append_missing(writer, this, 5)
    monkeypatch.undo()
    with pytest.raises(IncompleteStoreError), create(tmp_path, this, resume=True) as writer:
        assert writer.missing == [range(5)]
    finish(tmp_path, this, 5)
    this.check(content(tmp_path / this.name))


def test_documents_are_what_other_writers_write(tmp_path):
    """shards.json and digests.json have exactly the bytes of stores that were written before."""
    this = a_case(4, 3, labelled=False)
    finish(tmp_path, this)
    found = content(tmp_path / this.name)
    assert found["shards.json"].decode() == json.dumps(
        [{"name": "acts000000.bin", "n_ex": 3}, {"name": "acts000001.bin", "n_ex": 1}], indent=2
    )
    assert found["digests.json"] == this.files()["digests.json"]
    assert found["metadata.json"] == this.metadata.raw


def test_bar_counts_examples(tmp_path, capsys):
    this = a_case()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with create(tmp_path, this, progress=True) as writer:
            append_missing(writer, this)
    assert "11/11" in capsys.readouterr().err


def test_budget_by_default_gives_32_shards_of_at_most_a_gibibyte():
    geometry = {"family": "clip", "ckpt": "x", "layers": [2, 5], "cls_token": True, "d_model": 1024}
    for n_examples, content_tokens, dtype in [
        (1, 4, "float32"), (31, 4, "float32"), (33, 4, "bfloat16"), (1_000, 196, "float32"), (10**7, 196, "float16"),
        (100, 10**6, "float32"),
    ]:  # fmt: skip
        given = {**geometry, "n_examples": n_examples, "content_tokens_per_example": content_tokens, "dtype": dtype}
        layout = new_metadata(**given).layout
        assert layout.n_shards >= min(32, n_examples)
        assert layout.shard_nbytes <= max(1 << 30, layout.example_nbytes)
        assert layout.n_shards <= max(2 * 32, 2 * layout.nbytes // (1 << 30)) or layout.examples_per_shard == 1
    assert new_metadata(**given, max_tokens_per_shard=2 * (10**6 + 1)).max_tokens_per_shard == 2 * (10**6 + 1)
