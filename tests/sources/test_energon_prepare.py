"""Preparing folders of tars: complete, all or nothing; and which tars are refused."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import fsspec
import pytest
from energon_tars import FORMATS, odd_files, sample_files, tar_bytes, write_dataset
from servers import s3_bucket  # noqa: F401 - a fixture
from transports import CountingTransport
from waiting import HANG_S

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    WriterConflictError,
)
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon import prepare as prepare_module
from saev_store.sources.energon.prepare import prepare
from saev_store.transport import MemoryTransport, MmapTransport
from saev_store.transport.local.write import TEMP_PREFIX

FILES = {".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml"}


def check(dataset: EnergonDataset, truth: dict[str, dict[str, bytes]]):
    assert len(dataset) == len(truth)
    found = {sample.key: dict(sample.parts) for batch in dataset.batches(3) for sample in batch}
    assert found == truth
    for key, parts in truth.items():
        for part, data in parts.items():
            assert dataset.part(key, part) == data
    report = dataset.validate(deep=True, progress=False)
    assert report.ok, report


@pytest.mark.parametrize("num_workers", [None, 1, 2])
def test_complete_and_right(tmp_path, num_workers):
    truth = write_dataset(tmp_path)
    made = prepare(tmp_path, split="1,1,1", num_workers=num_workers, progress=False)
    assert {path.name for path in (tmp_path / ".nv-meta").iterdir()} == FILES
    assert sorted(path.name for path in (tmp_path / "shards").glob("*.idx")) == [
        f"shard_{i:03d}.tar.idx" for i in range(3)
    ]
    assert made.n_samples == len(truth)
    assert made.n_parts == sum(map(len, truth.values()))
    assert {name: len(shards) for name, shards in made.splits.items()} == {"train": 1, "val": 1, "test": 1}
    dataset = EnergonDataset(tmp_path)
    check(dataset, truth)
    assert dataset.sample_type == "CrudeWebdataset"
    assert sum(len(dataset.split(name)) for name in dataset.splits) == len(dataset)


def test_the_same_tars_have_the_same_uuid(tmp_path):
    for name in "ab":
        write_dataset(tmp_path / name)
        prepare(tmp_path / name, split="1,0,0", progress=False)
    a, b = ((tmp_path / name / ".nv-meta/index.uuid").read_text() for name in "ab")
    assert a == b
    assert len(a) == 36
    write_dataset(tmp_path / "c", n=5)
    prepare(tmp_path / "c", split="1,0,0", progress=False)
    assert (tmp_path / "c/.nv-meta/index.uuid").read_text() != a


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_header_formats(tmp_path, format, engine):
    files = sample_files(0, 3) if format == "ustar" else odd_files()
    (tmp_path / "a.tar").write_bytes(tar_bytes(files, format=format))
    prepare(tmp_path, split="1,0,0", engine=engine, progress=False)
    dataset = EnergonDataset(tmp_path, engine=engine)
    for name, data in files:
        if "." in name.rpartition("/")[2][1:] and not name.startswith("__"):
            assert dataset.file(name) == data
    names = [f"{dataset.key(i)}.{part.name}" for i in range(len(dataset)) for part in dataset.parts(i)]
    assert names == [name for name, _ in files if name not in {"__meta__/notes.json", "no_dot", ".hidden"}]


def test_in_memory():
    files = {f"x/{i}.tar": tar_bytes(sample_files(i * 10, 3)) for i in range(4)}
    transport = MemoryTransport(files)
    prepare("", transport=transport, split="2,1,1", progress=False)
    dataset = EnergonDataset("", transport=transport)
    assert [dataset.key(i) for i in (0, 11)] == ["s00000", "s00032"]
    assert [len(dataset.split(name)) for name in ("train", "val", "test")] == [6, 3, 3]
    assert not [name for name in transport.files if ".saev_store" in name]


def test_in_a_bucket(s3_bucket, tmp_path):
    s3fs = pytest.importorskip("s3fs")
    truth = write_dataset(tmp_path)
    s3fs.S3FileSystem(**s3_bucket.options).put(str(tmp_path), f"{s3_bucket.url}/data", recursive=True)
    prepare(f"{s3_bucket.url}/data", s3_bucket.options, split="1,1,1", progress=False)
    dataset = EnergonDataset(f"{s3_bucket.url}/data", s3_bucket.options)
    check(dataset, truth)
    assert dataset.describe(digest="full")["digest"] == dataset.describe(digest="full")["digest"]


def test_random_access_reads_little():
    """One part costs one request for its bytes and its header, whatever the tar's size."""
    big = [("a.bin", bytes(1_000_000)), ("b.bin", bytes(1_000_000)), ("b.txt", b"here"), ("c.bin", bytes(1_000_000))]
    transport = MemoryTransport({"x.tar": tar_bytes(big)})
    prepare("", transport=transport, split="1,0,0", progress=False)
    counting = CountingTransport(transport)
    dataset = EnergonDataset("", transport=counting)
    before = counting.counters
    assert dataset.part("b", "txt") == b"here"
    after = counting.counters
    assert after.requests - before.requests == 1
    assert after.bytes_read - before.bytes_read == 512 + 4


class TestInterrupted:
    def test_a_damaged_tar_changes_nothing(self, tmp_path):
        """Before a data set is there, and when one is prepared again: it stays as it was."""
        truth = write_dataset(tmp_path, n_shards=4, odd=False)
        shard = tmp_path / "shards/shard_002.tar"
        good = shard.read_bytes()
        shard.write_bytes(good[:700])
        with pytest.raises(CorruptShardError, match="1 of 4 tars cannot be indexed.*shard_002"):
            prepare(tmp_path, split="1,0,0", progress=False)
        assert not (tmp_path / ".nv-meta/.info.json").exists()
        shard.write_bytes(good)
        prepare(tmp_path, split="1,0,0", progress=False)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        shard.write_bytes(good[:700])
        with pytest.raises(CorruptShardError, match="shard_002"):
            prepare(tmp_path, split="0,1,0", overwrite=True, progress=False)
        shard.write_bytes(good)
        assert {path: path.read_bytes() for path in before} == before
        check(EnergonDataset(tmp_path), truth)

    def test_a_tar_that_changed_after_an_interruption_is_read_again(self, tmp_path, monkeypatch):
        """Same size, same first and last bytes, other keys in between: nothing of an interrupted call is believed."""
        files = [*sample_files(0, 300), *sample_files(500, 1), *sample_files(1000, 300)]
        other = [*sample_files(0, 300), *sample_files(600, 1), *sample_files(1000, 300)]
        (tmp_path / "a.tar").write_bytes(tar_bytes(files))
        (tmp_path / "b.tar").write_bytes(b"no tar" * 1000)
        with pytest.raises(CorruptShardError):
            prepare(tmp_path, split="1,0,0", progress=False)
        (tmp_path / "a.tar").write_bytes(tar_bytes(other))
        (tmp_path / "b.tar").unlink()
        prepare(tmp_path, split="1,0,0", progress=False)
        assert EnergonDataset(tmp_path).part("s00600", "txt") == b"text 600\n"

    @pytest.mark.parametrize("n_given", [0, 1, 2])
    def test_where_the_system_gives_no_more_processes(self, tmp_path, monkeypatch, n_given):
        """As with a container's pids limit: those that there are do the work, or this one."""
        truth, real, started = write_dataset(tmp_path, n_shards=5), subprocess.Popen, []

        def popen(*arguments, **options):
            if len(started) == n_given:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            started.append(real(*arguments, **options))
            return started[-1]

        monkeypatch.setattr(subprocess, "Popen", popen)
        prepare(tmp_path, split="1,0,0", num_workers=3, progress=False)
        assert len(started) == n_given
        dataset = EnergonDataset(tmp_path)
        assert {dataset.key(i) for i in range(len(dataset))} == truth.keys()
        assert dataset.validate(deep=True, progress=False).ok

    @pytest.mark.parametrize("place", ["", "file://", "memory://"])
    def test_a_tar_that_changes_while_it_is_indexed(self, tmp_path, monkeypatch, place):
        """Also into one of the same size, which is what a bucket tells of it before it is read."""
        write_dataset(tmp_path, n_shards=2, odd=False)
        address, changed = f"{place}{tmp_path}", "shards/shard_000.tar"
        files = fsspec.filesystem(place.partition(":")[0] or "file")
        if place == "memory://":
            files.put(str(tmp_path), str(tmp_path), recursive=True)
        engine = "fsspec" if place else "auto"
        replaced = tar_bytes(sample_files(700, 4), format="ustar")
        assert len(replaced) == (tmp_path / changed).stat().st_size

        def scan_all(transport, shards, **options):
            yield from real(transport, shards, **options)
            files.pipe_file(f"{tmp_path}/{changed}", replaced)

        real = prepare_module.scan_all
        monkeypatch.setattr(prepare_module, "scan_all", scan_all)
        with pytest.raises(CorruptShardError, match="shard_000.*changed while it was indexed"):
            prepare(address, split="1,0,0", engine=engine, progress=False)
        assert not files.exists(f"{tmp_path}/.nv-meta/.info.json")

    @pytest.mark.parametrize(
        "last", [".nv-meta/index.uuid", ".nv-meta/split.yaml", ".nv-meta/dataset.yaml", ".nv-meta/.info.json"]
    )
    def test_dying_while_publishing(self, tmp_path, last, monkeypatch):
        """Whatever was written last: there is no data set, or the new one; and repeating completes it."""
        truth = write_dataset(tmp_path)
        prepare(tmp_path, split="1,0,0", progress=False)
        real = MmapTransport.put

        def put(self, path, data):
            if path == last:
                raise KeyboardInterrupt
            real(self, path, data)

        monkeypatch.setattr(MmapTransport, "put", put)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, split="0,0,1", sample_type="CrudeWebdataset", overwrite=True, progress=False)
        monkeypatch.undo()
        with pytest.raises(NotFoundError, match="not prepared"):
            EnergonDataset(tmp_path)
        prepare(tmp_path, split="0,0,1", progress=False)
        check(EnergonDataset(tmp_path), truth)

    @pytest.mark.parametrize("name", ["fsync", "open", "stat"])
    def test_a_system_call_that_fails(self, tmp_path, name, monkeypatch):
        """Each call in the folder fails once: the error is one of ours, or the call is not needed."""
        (tmp_path / "0.tar").write_bytes(tar_bytes(sample_files(0, 3)))
        real, n_calls, n_done, failed = getattr(os, name), 0, 0, True

        def call(target, *arguments, **options):
            nonlocal n_calls, failed
            if isinstance(target, int) or str(target).startswith(str(tmp_path)):
                n_calls += 1
                if n_calls > n_done and not failed:
                    failed = True
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(target, *arguments, **options)

        while failed:
            n_calls, failed = 0, False
            with monkeypatch.context() as patch, contextlib.suppress(SaevStoreError):
                patch.setattr(os, name, call)
                prepare(tmp_path, split="1,0,0", num_workers=1, overwrite=True, progress=False)
            made = prepare(tmp_path, split="1,0,0", num_workers=1, overwrite=True, progress=False)
            assert made.n_samples == 3
            assert not list(tmp_path.rglob(f"{TEMP_PREFIX}*"))
            n_done += 1
        assert n_done > 10

    @pytest.mark.parametrize("amid_an_answer", [False, True])
    def test_a_worker_that_is_killed_costs_nothing(self, tmp_path, monkeypatch, amid_an_answer):
        truth = write_dataset(tmp_path, n_shards=6, odd=False)
        (tmp_path / "killer").mkdir()
        # In the workers alone: the process ends as if the system had killed it, one before it begins, or all of them.
        once = (
            "    try:\n"
            f"        os.mkdir({str(tmp_path / 'killer/done')!r})\n"
            "    except FileExistsError:\n"
            "        pass\n"
            "    else:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        amid = (
            "    class Cut:\n"
            "        def write(self, text):\n"
            f"            os.makedirs({str(tmp_path / 'killer/done')!r}, exist_ok=True)\n"
            "            os.write(1, text[:len(text) // 2].encode())\n"
            "            os.kill(os.getpid(), signal.SIGKILL)\n"
            "        def flush(self):\n"
            "            pass\n"
            "    sys.stdout = Cut()\n"
        )
        (tmp_path / "killer/sitecustomize.py").write_text(
            "import os, signal, sys\n"
            "if any('_scan_all' in argument for argument in sys.orig_argv):\n" + (amid if amid_an_answer else once)
        )
        monkeypatch.syspath_prepend(tmp_path / "killer")
        prepare(tmp_path, split="1,0,0", num_workers=2, progress=False)
        assert (tmp_path / "killer/done").exists()
        check(EnergonDataset(tmp_path), truth)

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
    def test_workers_end_quietly_with_their_parent(self, tmp_path, how):
        """No worker goes on, and none prints a traceback."""
        truth = write_dataset(tmp_path, n_shards=3, odd=False)
        for i in range(30):
            (tmp_path / f"{i:02d}.tar").write_bytes(tar_bytes(sample_files(1000 * (i + 1), 300)))
        code = "import sys; from saev_store.sources.energon.prepare import prepare as p; p(sys.argv[1], split='1,0,0', num_workers=2, progress=False)"
        command = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2], start_new_session=True
        ) as process:
            while not list(tmp_path.glob(f".nv-meta/{TEMP_PREFIX}*")):
                time.sleep(0.005)
            os.kill(process.pid, how) if how == signal.SIGKILL else os.killpg(process.pid, how)
            # Workers have our pipe too: it ends when the last of them does.
            said = process.communicate(timeout=HANG_S)[1].decode()
        assert said.count("Traceback") == said.count("KeyboardInterrupt") == (how == signal.SIGINT)
        assert not (tmp_path / ".nv-meta/.info.json").exists()
        made = prepare(tmp_path, split="1,0,0", progress=False)
        assert made.n_samples == 30 * 300 + len(truth)

    def test_killed_at_any_time(self, tmp_path):
        """The whole process is killed while it prepares; what is there afterwards is no data set, or a complete one."""
        truth = write_dataset(tmp_path, n_shards=6, odd=False)
        command = "from saev_store.sources.energon.prepare import prepare; import sys; sys.stdout.write('go'); sys.stdout.flush(); prepare(sys.argv[1], split='1,0,0', overwrite=True, num_workers=1, progress=False)"
        for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2):
            process = subprocess.Popen(
                [sys.executable, "-c", command, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
            )
            with process:
                process.stdout.read(2)
                time.sleep(delay_s)
                process.kill()
            if (tmp_path / ".nv-meta/.info.json").exists():
                check(EnergonDataset(tmp_path), truth)
        prepare(tmp_path, split="1,0,0", overwrite=True, progress=False)
        check(EnergonDataset(tmp_path), truth)
        assert {path.name for path in (tmp_path / ".nv-meta").iterdir()} >= FILES

    def test_two_at_once(self, tmp_path):
        write_dataset(tmp_path)
        with MmapTransport(tmp_path).lock(".nv-meta/.saev_store/lock"), pytest.raises(WriterConflictError):
            prepare(tmp_path, split="1,0,0", progress=False)

    def test_prepared_already(self, tmp_path):
        write_dataset(tmp_path)
        prepare(tmp_path, split="1,0,0", progress=False)
        with pytest.raises(StoreExistsError, match="overwrite=True"):
            prepare(tmp_path, split="1,0,0", progress=False)
        split = tmp_path / ".nv-meta/split.yaml"
        split.write_text(split.read_text() + "# edited\n")
        prepare(tmp_path, overwrite=True, progress=False)
        assert split.read_text().endswith("# edited\n")


class TestSplits:
    @pytest.fixture
    def folder(self, tmp_path):
        for i, name in enumerate(["train/00.tar", "train/01.tar", "val/00.tar", "other/00.tar"]):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(tar_bytes(sample_files(i * 10, 2)))
        return tmp_path

    def test_patterns(self, folder):
        made = prepare(folder, split_parts=["train:train/.*", "val:val/.*", "rare:nowhere"], progress=False)
        assert made.splits == {"train": ("train/00.tar", "train/01.tar"), "val": ("val/00.tar",), "rare": ()}
        assert [(problem.kind, problem.where) for problem in made.problems] == [
            ("in_no_split", "other/00.tar"), ("empty_split", ".nv-meta/split.yaml"),
        ]  # fmt: skip
        assert (folder / ".nv-meta/split.yaml").read_text() == (
            "split_parts:\n  train:\n  - train/{00..01}.tar\n  val:\n  - val/00.tar\n  rare: []\nexclude: []\n"
        )

    def test_ranges_in_patterns_and_regular_expressions(self, folder):
        made = prepare(folder, split_parts=["a:train/{00..01}.tar", r"b:(val|other)/\d{2}\.tar"], progress=False)
        assert [len(shards) for shards in made.splits.values()] == [2, 2]

    def test_exclude(self, folder):
        assert list(prepare(folder, split="1,0,0", exclude="other|01", progress=False).shards) == [
            "train/00.tar",
            "val/00.tar",
        ]

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({}, "not said how to split"),
            ({"split": "8,1"}, "need 3"),
            ({"split": "0,0,0"}, "gives no shard"),
            ({"split": "a,b,c"}, "no split"),
            ({"split": "1,0,0", "split_parts": ["a:b"]}, "both"),
            ({"split_parts": ["train"]}, "not written"),
            ({"split_parts": ["train:("]}, "no regular expression"),
            ({"split": "1,0,0", "exclude": "["}, "no regular expression"),
            ({"split": "1,0,0", "sample_type": "Nothing"}, "none of"),
            ({"split": "1,0,0", "sample_type": "CaptioningSample", "field_map": {"image": "jpg"}}, "needs 'caption'"),
            ({"split": "1,0,0", "sample_type": "TextSample", "field_map": {"text": "json["}}, "no path"),
            ({"split": "1,0,0", "field_map": {"text": "txt"}}, "needs a sample type"),
        ],
    )
    def test_wrong_arguments(self, folder, options, match):
        with pytest.raises(ArgumentError, match=match):
            prepare(folder, progress=False, **options)
        assert not (folder / ".nv-meta/.info.json").exists()

    @pytest.mark.parametrize("num_workers", [None, 2])
    def test_a_bar_goes_on_with_each_tar_up_to_the_end(self, folder, capfd, num_workers):
        prepare(folder, split="1,0,0", num_workers=num_workers, progress=True)
        shown = capfd.readouterr().err
        assert "indexing: 100%" in shown
        nbytes = sum(tar.stat().st_size for tar in folder.rglob("*.tar"))
        assert f"{nbytes / 1000:.1f}kB of {nbytes / 1000:.1f}kB" in shown

    def test_compressed_and_empty_ones(self, folder):
        (folder / "val/x.tgz").write_bytes(b"\x1f\x8b")
        (folder / "val/empty.tar").write_bytes(tar_bytes([]))
        made = prepare(folder, split="1,0,0", progress=False)
        assert {(problem.kind, problem.where) for problem in made.problems} == {
            ("compressed_tar", "val/x.tgz"), ("empty_shard", "val/empty.tar"),
        }  # fmt: skip
        assert made.shards["val/empty.tar"] == 0
        assert "val/empty.tar" not in made.splits["train"]
        assert EnergonDataset(folder).validate(deep=True, progress=False).ok


class TestBadTars:
    def refused(self, tmp_path, data: bytes, match: str, kind=CorruptShardError):
        (tmp_path / "a.tar").write_bytes(data)
        with pytest.raises(kind, match=match):
            prepare(tmp_path, split="1,0,0", progress=False)
        assert not (tmp_path / ".nv-meta/.info.json").exists()

    def test_cut_anywhere(self, tmp_path):
        """A tar that was cut is refused wherever the cut is, but between files, where nothing tells: then we say so."""
        files = [("a.txt", b"x" * 600), ("b.txt", b""), ("c" * 120 + ".txt", b"y" * 10)]
        whole = tar_bytes(files, close=False)
        ends = [1536, 2048, len(whole)]
        for n in [1, 100, 511, 512, 513, 1000, 1111, 1535, 1537, 2047, 2049, 2559, 2561, len(whole) - 1]:
            self.refused(tmp_path, whole[:n], "cut|damaged|end of data|no tar")
        for n in ends:
            (tmp_path / "a.tar").write_bytes(whole[:n])
            made = prepare(tmp_path, split="1,0,0", progress=False, overwrite=True)
            assert [problem.kind for problem in made.problems] == ["odd_tar"]
            assert "no end marker" in made.problems[0].message

    def test_damaged_header(self, tmp_path):
        data = bytearray(tar_bytes(sample_files(0, 3)))
        data[1024 + 150] ^= 1
        self.refused(tmp_path, bytes(data), "the header at 1,024 is damaged")

    def test_empty_file_and_junk(self, tmp_path):
        self.refused(tmp_path, b"", "empty")
        self.refused(tmp_path, b"junk" * 1000, "no tar|damaged")
        self.refused(tmp_path, b"\x1f\x8b" + bytes(1000), "compressed")

    def test_key_twice(self, tmp_path):
        data = tar_bytes([("a.txt", b"1"), ("b.txt", b"2"), ("a.json", b"3")])
        self.refused(tmp_path, data, "sample 2 of 'a.tar' has the key 'a', and so has sample 0", DocumentError)

    def test_key_in_two_tars(self, tmp_path):
        (tmp_path / "b.tar").write_bytes(tar_bytes([("x.txt", b""), ("a.txt", b"")]))
        self.refused(
            tmp_path,
            tar_bytes([("a.txt", b"1")]),
            "sample 1 of 'b.tar' has the key 'a', and so has sample 0 of shard 0",
            DocumentError,
        )

    def test_part_twice(self, tmp_path):
        self.refused(tmp_path, tar_bytes([("a.txt", b"1"), ("a.txt", b"2")]), "has the part 'txt' twice")

    @pytest.mark.parametrize("name", ["a\udcff.txt", "a.t\udcffxt"])
    def test_name_that_is_no_text(self, tmp_path, name):
        """The key, or a part of a sample whose first part is one."""
        members = [("a.jpg", b"0"), (name, b"1")]
        self.refused(tmp_path, tar_bytes(members, format="gnu"), "no UTF-8")

    def test_endless_extension_header(self, tmp_path):
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**40
        self.refused(tmp_path, info.tobuf(tarfile.GNU_FORMAT) + bytes(4096), "claims")

    def test_negative_size(self, tmp_path):
        """Old versions of `tarfile` go backwards on these, for ever."""
        info = tarfile.TarInfo("x.txt")
        info.size = -5000
        data = tar_bytes([("a.txt", b"1")], close=False) + info.tobuf(tarfile.GNU_FORMAT) + bytes(4096)
        self.refused(tmp_path, data, "negative|damaged|invalid")

    @pytest.mark.parametrize("size", [-512, -1024, -2048, -8192])
    def test_negative_size_behind_zeros(self, tmp_path, size):
        """It leads back into content that looks like an end marker."""
        info = tarfile.TarInfo("x.txt")
        info.size = size
        data = tar_bytes([("a.txt", bytes(8192))], close=False) + info.tobuf(tarfile.GNU_FORMAT) + bytes(4096)
        self.refused(tmp_path, data, "negative|damaged|invalid")

    def test_links_and_folders_are_left_out(self, tmp_path):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, kind in [
                ("d.x", tarfile.DIRTYPE),
                ("s.x", tarfile.SYMTYPE),
                ("h.x", tarfile.LNKTYPE),
                ("f.x", tarfile.FIFOTYPE),
            ]:
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "/etc/passwd"
                tar.addfile(info)
            tar.addfile(tarfile.TarInfo("a.txt"))
        (tmp_path / "a.tar").write_bytes(buffer.getvalue())
        prepare(tmp_path, split="1,0,0", progress=False)
        dataset = EnergonDataset(tmp_path)
        assert [dataset.key(i) for i in range(len(dataset))] == ["a"]

    def test_a_member_of_8_gib(self, tmp_path):
        """A size that needs base 256 or PAX, in a file that is a hole for the most part."""
        for format in ("gnu", "pax"):
            path = tmp_path / format / "a.tar"
            path.parent.mkdir()
            big = 9 << 30
            with path.open("wb") as file:
                info = tarfile.TarInfo("a.bin")
                info.size = big
                file.write(info.tobuf(FORMATS[format]))
                file.seek(big, os.SEEK_CUR)
                file.write(tar_bytes([("b.txt", b"behind it")]))
            prepare(path.parent, split="1,0,0", progress=False)
            dataset = EnergonDataset(path.parent)
            assert dataset.part("b", "txt") == b"behind it"
            assert dataset.parts("a")[0].nbytes == big
            assert dataset.validate(deep=True, progress=False).ok


def test_database_is_like_the_peers(tmp_path):
    write_dataset(tmp_path)
    prepare(tmp_path, split="1,0,0", progress=False)
    truth = json.loads((Path(__file__).parents[1] / "data/energon/crude_varying_parts/expected.json").read_text())
    db = sqlite3.connect(tmp_path / ".nv-meta/index.sqlite")
    found = db.execute("SELECT type, name, tbl_name FROM sqlite_master ORDER BY rowid").fetchall()
    assert sorted(found) == sorted((row["type"], row["name"], row["tbl_name"]) for row in truth["sqlite_schema"])
    for name, value in truth["sqlite_pragmas"].items():
        assert db.execute(f"PRAGMA {name}").fetchone() == (value,)
    db.close()


def test_nothing_there(tmp_path):
    with pytest.raises(NotFoundError, match="no tars"):
        prepare(tmp_path, split="1,0,0", progress=False)
    with pytest.raises(SaevStoreError):
        prepare(tmp_path / "missing", split="1,0,0", progress=False)


def test_what_killed_preparations_left_is_deleted_by_the_next_one(tmp_path):
    truth = write_dataset(tmp_path)
    left = tmp_path / ".nv-meta/.saev_store.tmp-1-00"
    left.mkdir(parents=True)
    (left / "lock").touch()
    (tmp_path / ".nv-meta/.saev_store.tmp-2-00").write_bytes(b"half an index")
    prepare(tmp_path, split="1,0,0", progress=False)
    assert {path.name for path in (tmp_path / ".nv-meta").iterdir()} == FILES
    check(EnergonDataset(tmp_path), truth)


def test_what_another_process_prepares_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    """To find the tars of many folders takes long."""
    write_dataset(tmp_path)
    plainly = prepare_module.find_tars

    def find(*args, **options):
        found = plainly(*args, **options)
        monkeypatch.setattr(prepare_module, "find_tars", plainly)
        prepare(tmp_path, split="1,0,0", num_workers=1, progress=False)
        return found

    monkeypatch.setattr(prepare_module, "find_tars", find)
    with pytest.raises(StoreExistsError):
        prepare(tmp_path, split="0,1,1", num_workers=1, progress=False)
    dataset = EnergonDataset(tmp_path)
    assert len(dataset.split("train")) == len(dataset)
