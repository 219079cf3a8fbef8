"""Publishers and writers that race: one store, right in every byte, whoever was late and wherever it was."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sim_disk import Disk, State
from written import a_case, append_missing, content, create, cut, files, finalize_store, finish, holding

from saev_store.errors import SaevStoreError, TransportError
from saev_store.transport import open_transport

N_RACES = int(os.environ.get("SAEV_STORE_RACES", "25"))


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """The results, or errors of the package, of calls that begin together."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait()
        try:
            return call()
        except SaevStoreError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def test_publishers_that_race_on_a_disk_publish_once(tmp_path):
    for seed in range(N_RACES):
        this, root = a_case(seed=seed, protocol=("2.0", "3.0")[seed % 2]), tmp_path / str(seed)
        with create(root, this, part=(0, 1)) as writer:
            append_missing(writer, this, 11)
        found = at_once([lambda root=root, this=this: finalize_store(open_transport(root), this.metadata)] * 4)
        assert sorted(found) == [False, False, False, True]
        this.check(content(root / this.name))
        assert [path.name for path in root.iterdir()] == [this.name]


def test_publishers_that_race_in_a_bucket_leave_one_right_store():
    for seed in range(N_RACES):
        this, disk = cut(a_case(seed=seed, protocol=("2.0", "3.0")[seed % 2])), Disk(posix=False)
        with create(disk, this, part=(0, 1)) as writer:
            append_missing(writer, this, 11)
        found = at_once([lambda disk=disk, this=this: finalize_store(disk, this.metadata)] * 4)
        assert set(found) == {True, False}
        assert found.count(True) == 1
        this.check(files(disk, this.name))
        assert not [name for name in disk.state.files if ".saev_store" in name]


def test_writers_of_all_parts_and_publishers_at_once_end_in_a_right_store(tmp_path):
    for seed in range(N_RACES // 5):
        this, root = a_case(14, 2, seed=seed), tmp_path / str(seed)

        def rank(part, root=root, this=this):
            finish(root, this, part=part)
            return finalize_store(open_transport(root), this.metadata)

        while not (root / this.name / "metadata.json").exists():  # who comes before the last part is done has an error
            at_once([lambda part=(r, 4), rank=rank: rank(part) for r in range(4)])
        this.check(content(root / this.name))


def test_publisher_waits_for_the_one_that_holds_the_lock(tmp_path):
    this = a_case()
    with create(tmp_path, this, part=(0, 1)) as writer:
        append_missing(writer, this)
    with ThreadPoolExecutor(1) as threads:
        with holding(tmp_path, this, "publish"):
            waiting = threads.submit(finalize_store, open_transport(tmp_path), this.metadata)
            assert not (tmp_path / this.name / "metadata.json").exists()
        assert waiting.result() is True
    this.check(content(tmp_path / this.name))


class Meanwhile(State):
    """Lets another process do all of its work before a chosen step."""

    def __init__(self, at: int, other: Callable[[], object]) -> None:
        super().__init__(posix=False)
        self.at, self.other, self.after = at, other, None

    def step(self, what: str) -> None:
        if self.at == 0 and self.after is None:
            self.after = {}
            self.other()
            self.after = {name: file for name, file in self.files.items() if ".saev_store" not in name}
        self.at -= self.after is None
        super().step(what)


def test_late_publisher_in_a_bucket_finds_the_store_at_every_step():
    for protocol in ("2.0", "3.0"):
        this = cut(a_case(protocol=protocol))
        k = 0
        while True:
            state = Meanwhile(10**9, lambda: None)
            disk = Disk(state)
            with create(disk, this, part=(0, 1)) as writer:
                append_missing(writer, this)
            ours = list[bool]()
            state.at = k
            state.other = lambda disk=disk, this=this, ours=ours: ours.append(finalize_store(disk, this.metadata))
            ours.append(finalize_store(disk, this.metadata))
            this.check(files(disk, this.name))
            assert ours.count(True) == 1
            if state.after is None:
                break
            k += 1
        assert k > 4


def test_late_writer_in_a_bucket_never_spoils_a_published_store():
    """Another process finishes and publishes before any one of a writer's requests; only within one request is there a window."""
    this = cut(a_case(6, 3))
    k, n_refused = 0, 0
    while True:
        state = Meanwhile(10**9, lambda: None)
        disk = Disk(state)
        state.other = lambda disk=disk, this=this: finish(disk, this)
        state.at = k
        try:
            with create(disk, this, resume=True) as writer:
                append_missing(writer, this)
        except SaevStoreError:
            n_refused += 1
        this.check(files(disk, this.name))
        if state.after is None:
            break
        k += 1
    assert k > 8
    assert n_refused


def test_late_publisher_in_a_bucket_deletes_no_file_of_the_store():
    this, disk = cut(a_case(protocol="3.0")), Disk(posix=False)
    with create(disk, this, part=(0, 1)) as writer:
        append_missing(writer, this)
    finalize_store(disk, this.metadata)
    deleted = [step for step in disk.state.log if step.startswith("delete") and ".saev_store" not in step]
    assert not deleted


def test_creation_whose_answer_was_lost_is_ours():
    this = cut(a_case())
    for lost in ("metadata.json", "work"):
        disk = Disk(posix=False)
        real = Disk.create

        def create_and_lose(self, path, data, real=real, lost=lost, seen=[]):  # noqa: B006  # one list for each round
            real(self, path, data)
            if (".saev_store" in self.prefix) == (lost == "work") and lost not in seen:
                seen.append(lost)
                raise TransportError("the answer was lost", transient=True)

        Disk.create = create_and_lose
        try:
            finish(disk, this)
        finally:
            Disk.create = real
        this.check(files(disk, this.name))
