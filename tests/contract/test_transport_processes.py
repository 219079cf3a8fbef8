"""Transports in other processes, in event loops, and in processes that end."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from cloud_servers import Fault, Proxy
from contract_places import FILES, READS, SERVED, WRITES, Place, filled
from waiting import HANG_S

from saev_store.errors import ForkError, SaevStoreError, StoreExistsError, WriterConflictError
from saev_store.transport import Transport, open_transport

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    # In this process threads are running when it forks: that is the very thing to be tested.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
TRUTH = FILES["acts000000.bin"][3:7]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(filled(name, tmp_path_factory.mktemp(name))) for name in [*WRITES, "http"]}


def part_of(transport: Transport) -> bytes:
    return bytes(transport.get_ranges("acts000000.bin", starts=[3], ends=[7])[0])


def answers_of(transports: dict[str, Transport]) -> dict[str, object]:
    """What each call gives in a process, or its error with the seconds that it took."""
    found: dict[str, object] = {}
    for name, transport in transports.items():
        calls: dict[str, Callable[[], object]] = {
            "get_ranges": functools.partial(part_of, transport),
            "read": lambda transport=transport: transport.read("acts000000.bin")[3:7],
        }
        for call, work in calls.items():
            began_s = time.monotonic()
            try:
                found[f"{name} {call}"] = work()
            except SaevStoreError as error:
                found[f"{name} {call}"] = error, time.monotonic() - began_s
    return found


def _answer(transports: dict[str, Transport], work: Callable, answers: multiprocessing.SimpleQueue) -> None:
    answers.put(work(transports))


def in_process(method: str, transports: dict[str, Transport], work: Callable = answers_of) -> dict[str, object]:
    """What another process gives; a failure, never a hang."""
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=_answer, args=(transports, work, answers))
    process.start()
    try:
        process.join(60)
        assert process.exitcode == 0, f"still running, or failed: {process.exitcode}"
        return answers.get()
    finally:
        process.kill()
        process.join()
        answers.close()


def test_a_spawned_process_reads_the_same(places: dict[str, Place]) -> None:
    """With the credentials of its parent."""
    transports = {name: place.open() for name, place in places.items() if name != "memory"}
    assert {part_of(transport) for transport in transports.values()} == {TRUTH}
    found = in_process("spawn", transports)
    assert found == dict.fromkeys(found, TRUTH) and len(found) == 2 * len(transports)


def test_a_forked_process_reads_files_and_nothing_through_a_client_of_its_parent(places: dict[str, Place]) -> None:
    transports = {name: place.open() for name, place in places.items()}
    assert {part_of(transport) for transport in transports.values()} == {TRUTH}
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            part_of(transports["mmap"])
            part_of(transports["pread"])

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        found = in_process("fork", transports)
    finally:
        stop.set()
    for thread in threads:
        thread.join(HANG_S)
    for call, answer in found.items():
        name = call.partition(" ")[0]
        if places[name].engine not in {"mmap", "pread"}:
            error, took_s = answer if isinstance(answer, tuple) else (answer, 0)
            assert type(error) is ForkError and took_s < 5, (call, error)
            assert 'multiprocessing_context="spawn"' in f"{error.remedy}"
        else:
            assert answer == TRUTH, call
    assert {part_of(transport) for transport in transports.values()} == {TRUTH}


def test_a_forked_process_writes_to_no_bucket_that_its_parent_has_used(places: dict[str, Place]) -> None:
    transports = {name: place.open("forked") for name, place in places.items() if place.is_bucket}
    for transport in transports.values():
        transport.put("here.bin", b"0123")
    found = in_process("fork", transports, write)
    assert {type(error) for error in found.values()} == {ForkError}
    for transport in transports.values():
        assert [entry.path for entry in transport.list()] == ["here.bin"]
        assert transport.read("here.bin") == b"0123"


def write(transports: dict[str, Transport]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, transport in transports.items():
        for n, call in enumerate((
            lambda to: to.put("here.bin", b"changed"),
            lambda to: to.create("new.bin", b"new"),
            lambda to: to.delete("here.bin"),
            lambda to: to.open_sink("new.bin", used_nbytes=3, file_nbytes=3),
        )):  # fmt: skip
            try:
                found[f"{name} {n}"] = call(transport)
            except SaevStoreError as error:
                found[f"{name} {n}"] = error
    return found


def create(transports: dict[str, Transport]) -> bool:
    try:
        transports["local"].create("race.json", b"%d" % os.getpid())
    except StoreExistsError:
        return False
    return True


def test_of_processes_that_create_a_file_one_wins(tmp_path) -> None:
    transport, context = open_transport(tmp_path), multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_answer, args=({"local": transport}, create, answers)) for _ in range(8)]
    for process in processes:
        process.start()
    assert sorted(answers.get() for _ in processes) == [False] * 7 + [True]
    for process in processes:
        process.join(HANG_S)
    answers.close()


_LOCKS = """
import os, sys, time
from saev_store.transport import open_transport
with open_transport(sys.argv[1]).lock("a.lock"):
    if os.fork() == 0:  # a child of the holder, which outlives it
        os.close(0), os.close(1), os.close(2)
        time.sleep(60)
        os._exit(0)
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_lock_ends_with_its_process_even_if_a_child_lives_on(tmp_path) -> None:
    transport = open_transport(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", _LOCKS, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(WriterConflictError), transport.lock("a.lock"):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(HANG_S)
        with transport.lock("a.lock"):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()


#: A blocking call in each loop that runs in a process ends: with the bytes, or with an error.
_IN_LOOPS = """
import asyncio, gc, os, pickle, sys, threading
from saev_store.errors import SaevStoreError
from saev_store.transport import open_transport
threading.Timer(30, os._exit, [3]).start()
url, options, engine = pickle.load(sys.stdin.buffer)
transport = open_transport(url, options, engine=engine)
read = lambda: bytes(transport.get_ranges("acts000000.bin", starts=[3], ends=[7])[0])
truth = read()
async def called():
    try:
        return read()
    except SaevStoreError as error:
        return error
assert asyncio.run(called()) == truth  # as in a notebook
assert truth == read()
loops = [loop for loop in gc.get_objects() if isinstance(loop, asyncio.BaseEventLoop) and loop.is_running()]
for loop in loops:
    found = asyncio.run_coroutine_threadsafe(called(), loop).result(20)
    assert found == truth or isinstance(found, SaevStoreError), found
    assert read() == truth
print(len(loops))
os._exit(0)
"""


@pytest.mark.parametrize("name", [*SERVED, "pread"])
def test_a_blocking_call_on_the_loop_of_a_transport_is_an_error_and_no_hang(
    name: str, places: dict[str, Place]
) -> None:
    place = places[name]
    given = pickle.dumps((place.url, place.options, place.engine))
    done = subprocess.run([sys.executable, "-c", _IN_LOOPS], input=given, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr.decode()


_ENDS = """
import pickle, sys, threading
from saev_store.transport import open_transport
url, options, engine = pickle.load(sys.stdin.buffer)
transport = open_transport(url, options, engine=engine)
transport.get_ranges("acts000000.bin", starts=[0], ends=[4])
for n in range(8):
    threading.Thread(target=transport.read, args=["metadata.json"], daemon=True).start()
sink = transport.open_sink("new.bin", used_nbytes=20 << 20, file_nbytes=20 << 20)
sink.write([memoryview(bytes(9 << 20))])
"""


@pytest.mark.parametrize("name", [name for name in ("obstore-s3", "s3fs") if name in READS])
def test_a_program_ends_while_requests_are_under_way(name: str, places: dict[str, Place]) -> None:
    place = places[name]
    with Proxy(place.server) as proxy:
        proxy.faults.append(Fault(path="metadata", times=-1, hold=lambda: False))
        options = {**place.options, "endpoint_url": proxy.url}
        given = pickle.dumps((place.url, options, place.engine))
        done = subprocess.run([sys.executable, "-c", _ENDS], input=given, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr.decode()
