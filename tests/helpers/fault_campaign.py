"""Thousands of reads and writes through a proxy that breaks things, in front of a server: the whole, behind one command.

    SAEV_STORE_SWIFT_VENV=… python tests/helpers/fault_campaign.py [--server gcs] [--operations 60] [--kind WORD]

Every kind of fault is met by every client, in reads of ranges, in small writes and in whole stores. What has to hold: the
bytes are right, or an error of ours comes within the time allowed; a store is published whole or not at all; no upload,
thread or connection is left. `tests/cloud/test_cloud_faults.py` takes a few operations of each kind.
"""

# ruff: noqa: T201 (a command prints)
from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import os
import socket
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from cloud_servers import (
    Fault,
    Proxy,
    endpoint_option,
    new_gcs_json_bucket,
    new_gcs_xml_bucket,
    new_swift_bucket,
    s3_options,
    unfinished_uploads,
)
from kill_harness_oracle import case
from retrying import Retrying
from servers import Bucket, new_moto_bucket

from saev_store import ShardStore
from saev_store.errors import (
    DeadlineError,
    IncompleteStoreError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
)
from saev_store.transport import Transport
from saev_store.writer import create_store

TRUTH = np.random.default_rng(0).bytes(200_000)
#: What lies where something is written, before it is.
OLD = np.random.default_rng(1).bytes(200_000)
ENGINES = ["obstore", "fsspec"]
TIMEOUT_S, ATTEMPTS = 1.5, 4
#: Where everything has to succeed, a busy machine may add time-outs of its own.
ATTEMPTS_TO_HEAL = 8
#: What an operation may take beyond its time-outs on a machine that is busy.
SLACK_S = 15


@dataclass(frozen=True)
class Kind:
    """Faults that come in a batch of operations.

    Attributes:
        faults: Armed anew for each batch.
        heals: Every operation has to succeed in spite of them.
        always: Nothing can succeed.
        endpoint: Not the proxy, but a place where nobody listens, or speaks TLS, or that has no address.
    """

    faults: tuple[Fault, ...] = ()
    heals: bool = False
    always: bool = False
    endpoint: str = ""


def kind(*faults: Fault, **options: object) -> Kind:
    return Kind(faults, **options)


def often(chance: float = 0.1, **fault: object) -> Fault:
    return Fault(times=-1, probability=chance, **fault)


def ever(**fault: object) -> Fault:
    return Fault(times=-1, **fault)


READING = {
    "nothing": kind(heals=True),
    # -- the server says no
    "500 twice": kind(Fault(status=500, times=2), heals=True),
    "502 now and then": kind(often(status=502), heals=True),
    "503 slow down": kind(often(status=503, code="SlowDown"), heals=True),
    "504 twice": kind(Fault(status=504, times=2), heals=True),
    "429 twice": kind(Fault(status=429, code="TooManyRequests", times=2), heals=True),
    "400 request time-out": kind(Fault(status=400, code="RequestTimeout", times=2)),
    "408 twice": kind(Fault(status=408, code="RequestTimeout", times=2)),
    "501": kind(Fault(status=501, code="NotImplemented", times=2)),
    "507": kind(Fault(status=507, code="InsufficientStorage", times=2)),
    "a status nobody knows": kind(Fault(status=999, times=2)),
    "304 for no reason": kind(Fault(status=304, times=2)),
    "412 for no reason": kind(Fault(status=412, code="PreconditionFailed", times=2)),
    "416 for a good range": kind(Fault(status=416, code="InvalidRange", times=2)),
    "expired token": kind(Fault(status=400, code="ExpiredToken", times=2)),
    "clock skew": kind(Fault(status=403, code="RequestTimeTooSkewed", times=2)),
    "access denied": kind(Fault(status=403, code="AccessDenied", times=2)),
    "wrong signature": kind(Fault(status=403, code="SignatureDoesNotMatch", times=2)),
    "moved": kind(Fault(status=301, code="PermanentRedirect", times=2)),
    "redirected to nowhere": kind(Fault(status=307, location="http://127.0.0.1:9/", times=2)),
    "redirected in a circle": kind(ever(status=307, location="/"), always=True),
    "gone for a while": kind(Fault(status=404, code="NoSuchKey", times=2)),
    "bucket gone for a while": kind(Fault(status=404, code="NoSuchBucket", times=2)),
    "success that is an error": kind(Fault(error_in_200=True, times=2)),
    # -- the connection breaks
    "reset at once": kind(Fault(reset_at=0, times=3), heals=True),
    "reset in mid-body": kind(Fault(reset_at=100, times=3), heals=True),
    "reset at the last byte": kind(Fault(reset_at=999, times=3), heals=True),
    "resets now and then": kind(often(reset_at=500), heals=True),
    "cut at once": kind(Fault(cut_at=0, times=3), heals=True),
    "cut in mid-body": kind(Fault(cut_at=400, times=3), heals=True),
    "cuts now and then": kind(often(cut_at=999), heals=True),
    "half closed in mid-body": kind(Fault(half_close_at=300, times=2)),
    "request lost": kind(Fault(lose_request=True, times=3), heals=True),
    "requests lost now and then": kind(often(lose_request=True), heals=True),
    "answer lost": kind(Fault(lose_answer=True, times=3), heals=True),
    "closed after each answer": kind(ever(close_after=True), heals=True),
    "nobody listens": kind(endpoint="closed", always=True),
    "no TLS there": kind(endpoint="tls", always=True),
    "no such host": kind(endpoint="nowhere", always=True),
    # -- the answer is late
    "slow first byte": kind(Fault(delay_s=0.3, times=3), heals=True),
    "slow headers": kind(Fault(slow_headers_s=0.002, times=2), heals=True),
    "slow trickle": kind(Fault(bytes_per_s=300, times=2)),
    "stall in mid-body": kind(Fault(stall_at=10, times=2)),
    "no first byte": kind(Fault(delay_s=60, times=2)),
    # -- the answer is wrong
    "range ignored": kind(Fault(ignore_range=True, times=3)),
    "another range by its own account": kind(Fault(shift_range=7, times=2)),
    "longer than announced": kind(Fault(wrong_length=5, times=2)),
    "shorter than announced": kind(Fault(wrong_length=-5, times=2)),
    "garbage instead of HTTP": kind(Fault(garbage=True, times=2)),
    "another object each time": kind(ever(new_etag=True)),
    # -- for ever
    "always 500": kind(ever(status=500), always=True),
    "always 503": kind(ever(status=503, code="SlowDown"), always=True),
    "always reset": kind(ever(reset_at=10), always=True),
    "always denied": kind(ever(status=403, code="InvalidAccessKeyId"), always=True),
    "always garbage": kind(ever(garbage=True), always=True),
    # -- mixtures
    "errors and resets": kind(often(0.07, status=503), often(0.07, reset_at=300), heals=True),
    "cuts and delays": kind(often(0.07, cut_at=1), often(delay_s=0.1), heals=True),
    "closed, slow and throttled": kind(
        often(close_after=True), often(0.05, slow_headers_s=0.001), often(status=429), heals=True
    ),
    "denied once, then resets": kind(Fault(status=403, code="AccessDenied"), often(reset_at=5)),
    "stalls and lost answers": kind(Fault(stall_at=7), often(lose_answer=True)),
    "replaced and cut": kind(often(new_etag=True), often(cut_at=100)),
    "everything": kind(
        *(often(0.03, **fault) for fault in (
            {"status": 500}, {"status": 429}, {"reset_at": 1}, {"cut_at": 700}, {"lose_answer": True},
            {"lose_request": True}, {"delay_s": 0.2}, {"close_after": True}, {"garbage": True}, {"shift_range": 1},
            {"error_in_200": True}, {"wrong_length": 3},
        )),
        Fault(stall_at=5),
        Fault(ignore_range=True),
    ),
}  # fmt: skip

WRITING = {
    "nothing": kind(heals=True),
    "500 twice": kind(Fault(method="PUT", status=500, times=2), heals=True),
    "503 twice": kind(Fault(method="PUT", status=503, code="SlowDown", times=2), heals=True),
    "request lost": kind(Fault(method="PUT", lose_request=True), heals=True),
    "answer lost": kind(Fault(method="PUT", lose_answer=True), heals=True),
    "closed after each answer": kind(ever(close_after=True), heals=True),
    "slow answer": kind(Fault(method="PUT", delay_s=0.3, times=2), heals=True),
    "no answer": kind(Fault(method="PUT", delay_s=60)),
    "garbage": kind(Fault(method="PUT", garbage=True)),
    "moved": kind(Fault(method="PUT", status=301, code="PermanentRedirect")),
    "expired token": kind(Fault(method="PUT", status=400, code="ExpiredToken")),
    "clock skew": kind(Fault(method="PUT", status=403, code="RequestTimeTooSkewed")),
    "bad digest": kind(Fault(method="PUT", status=400, code="BadDigest")),
    "denied": kind(ever(method="PUT", status=403, code="AccessDenied"), always=True),
    "always 500": kind(ever(method="PUT", status=500), always=True),
    "always lost": kind(ever(method="PUT", lose_request=True), always=True),
    "somebody else was first": kind(Fault(method="PUT", status=412, code="PreconditionFailed")),
    "a conflict": kind(Fault(method="PUT", status=409, code="ConditionalRequestConflict")),
    "mixture": kind(
        Fault(method="PUT", status=503),
        Fault(method="PUT", lose_answer=True),
        Fault(method="PUT", lose_request=True),
        heals=True,
    ),
    "everything": kind(
        often(0.05, status=500), often(0.05, lose_answer=True), often(0.05, lose_request=True), often(0.05, reset_at=0),
        often(0.05, status=429), often(0.05, garbage=True),
    ),
}  # fmt: skip


class StoodStill:
    """When this whole process did not run, because the machine did not let it: nobody's time-out can know of that."""

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        self._last = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        never = threading.Event()  # tests look at who calls `time.sleep`
        while not never.wait(0.1):
            now = time.monotonic()
            if now - self._last > 1:
                self._pauses.append((self._last, now))
            self._last = now

    def since(self, start: float) -> float:
        """Seconds of all pauses that ended after `start`, one that has just ended included."""
        last, now = self._last, time.monotonic()
        pauses = [*self._pauses, (last, now)] if now - last > 1 else self._pauses
        return sum(end - max(begin, start) for begin, end in pauses if end > start)


STOOD_STILL = StoodStill()


@dataclass
class Outcome:
    """What became of the operations of one kind.

    Attributes:
        right: How many did what they should.
        errors: How many raised which error of ours.
        longest_s: The longest one.
        problems: What may never be.
        excused: Whether the last operation was out of time after the machine had stood still: that proves nothing.
        n_excused: How many were.
    """

    right: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    longest_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    excused: bool = False
    n_excused: int = 0

    @property
    def operations(self) -> int:
        """How many there were."""
        return self.right + self.errors.total() + self.n_excused

    def attempt(self, call: Callable[[], object], *, allowed_s: float, secrets: tuple[str, ...]) -> object:
        """What a call gives, or its error; anything but a result and an error of ours is a problem."""
        start = time.monotonic()
        found: object = None
        self.excused = False
        try:
            found = call()
        except SaevStoreError as error:
            found = error
            self.excused = isinstance(error, DeadlineError) and STOOD_STILL.since(start) > 1
            if self.excused:
                self.n_excused += 1
            else:
                self.errors[type(error).__name__] += 1
            if any(secret in repr(error) + str(error) for secret in secrets):
                self.problems.append("a secret was told")
            if not error.kind or not str(error):
                self.problems.append(f"{error!r} has no name")
        except BaseException as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        took_s = time.monotonic() - start - STOOD_STILL.since(start)
        self.longest_s = max(self.longest_s, took_s)
        if took_s > allowed_s:
            self.problems.append(f"took {took_s:.1f} s of {allowed_s:.1f}")
        return found


@contextmanager
def through(upstream: str, bucket: Bucket, engine: str, what: Kind, seed: int) -> Iterator[tuple[Proxy, Transport]]:
    """The proxy of a kind, and a transport that goes through it."""
    with Proxy(upstream, seed=seed) as proxy, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = {
            "": proxy.url,
            "closed": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "tls": proxy.url.replace("http:", "https:"),
            "nowhere": "http://nowhere.invalid",
        }[what.endpoint]
        options = {**bucket.options, endpoint_option(bucket): endpoint}
        if engine == "fsspec":
            from saev_store.transport.fsspec import FsspecTransport

            options |= {"skip_instance_cache": True}
            if bucket.url.startswith("s3"):
                options |= {"config_kwargs": {"read_timeout": 1, "connect_timeout": 1}}
            yield proxy, FsspecTransport(bucket.url, options, timeout_s=TIMEOUT_S)
        else:
            from saev_store.transport.obstore import ObstoreTransport

            transport = ObstoreTransport(bucket.url, options, timeout_s=TIMEOUT_S)
            try:
                yield proxy, transport
            finally:
                transport.close()


def patient(transport: Transport, what: Kind) -> tuple[Transport, float]:
    """The transport with retries, and the longest that an operation may take."""
    attempts = 1 if what.always else ATTEMPTS_TO_HEAL if what.heals else ATTEMPTS
    allowed_s = attempts * (2 * TIMEOUT_S + 1.1) + SLACK_S
    return Retrying(transport, attempts=attempts, max_wait_s=0.1), allowed_s


def arm(proxy: Proxy, what: Kind, bucket: Bucket | None = None) -> None:
    """Put faults before a server; Google's interfaces write slashes otherwise, and one of them writes with POST."""
    posts = bucket is not None and is_json(bucket)
    proxy.faults[:] = [
        dataclasses.replace(
            fault,
            path=fault.path.replace("/", "(/|%2F)"),
            method="POST" if posts and fault.method == "PUT" else fault.method,
        )
        for fault in what.faults
    ]


def read_through(
    upstream: str, bucket: Bucket, engine: str, name: str, *, operations: int = 18, n_threads: int = 3, seed: int = 1
) -> Outcome:
    """Reads of two ranges each, by several threads at once, in batches that meet the faults anew."""
    what, outcome, lock = READING[name], Outcome(), threading.Lock()
    secrets = secrets_of(bucket)
    direct(bucket).put("acts.bin", TRUTH)
    operations = min(operations, n_threads) if what.always else operations
    per_batch = 6 * n_threads
    with through(upstream, bucket, engine, what, seed) as (proxy, plain):
        transport, allowed_s = patient(plain, what)

        def read(rng: np.random.Generator, n: int) -> None:
            mine = Outcome()
            for _ in range(n):
                starts = rng.integers(0, 199_000, 2).tolist()
                ends = [start + 1000 for start in starts]
                found = mine.attempt(
                    partial(transport.get_ranges, "acts.bin", starts=starts, ends=ends),
                    allowed_s=allowed_s,
                    secrets=secrets,
                )
                if isinstance(found, StoreExistsError):
                    mine.problems.append("a read says that something exists")
                if isinstance(found, SaevStoreError) or found is None:
                    continue
                if [bytes(part) for part in found] == [TRUTH[a:b] for a, b in zip(starts, ends, strict=True)]:
                    mine.right += 1
                else:
                    mine.problems.append("wrong bytes")
            with lock:
                outcome.right += mine.right
                outcome.errors += mine.errors
                outcome.n_excused += mine.n_excused
                outcome.longest_s = max(outcome.longest_s, mine.longest_s)
                outcome.problems += mine.problems

        for first in range(0, operations, per_batch):
            arm(proxy, what, bucket)
            plain.close()  # a file that was replaced may be read again by the next batch
            share = -(-min(per_batch, operations - first) // n_threads)
            rngs = [np.random.default_rng((seed, first, number)) for number in range(n_threads)]
            threads = [threading.Thread(target=read, args=(rng, share), daemon=True) for rng in rngs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(share * allowed_s)
            if any(thread.is_alive() for thread in threads):
                outcome.problems.append("a read hangs")
                break
        if proxy.open_now > 64 * 2:
            outcome.problems.append(f"{proxy.open_now} connections are open")
    return judged(outcome, what)


def judged(outcome: Outcome, what: Kind) -> Outcome:
    if what.heals and outcome.errors:
        outcome.problems.append(f"did not heal: {dict(outcome.errors)}")
    if what.always and outcome.right:
        outcome.problems.append("succeeded where nothing can")
    return outcome


def write_through(
    upstream: str, bucket: Bucket, engine: str, name: str, *, operations: int = 2, seed: int = 1
) -> Outcome:
    """Small writes: replacing and exclusive ones in turn. What lies there afterwards is whole, or nothing does."""
    what, outcome, look = WRITING[name], Outcome(), direct(bucket)
    with through(upstream, bucket, engine, what, seed) as (proxy, plain):
        transport, allowed_s = patient(plain, what)
        for number in range(2 if what.always else operations):
            arm(proxy, what, bucket)
            operation = ("put", "create")[number % 2]
            path = f"{name}-{engine}-{seed}-{number}.json"
            before = OLD if operation == "put" else None
            if before is not None:
                look.put(path, before)
            found = outcome.attempt(
                partial(getattr(transport, operation), path, TRUTH),
                allowed_s=allowed_s,
                secrets=secrets_of(bucket),
            )
            try:
                there = look.read(path)
            except NotFoundError:
                there = None
            if there not in {before, TRUTH}:
                outcome.problems.append(f"{operation} left half a file")
            failed = isinstance(found, SaevStoreError)
            if outcome.excused:
                continue
            if not failed:
                outcome.right += 1
                if there != TRUTH:
                    outcome.problems.append(f"{operation} says it is done, and it is not")
            # The service's own second attempt can meet what the first one made: then it says so, and reading decides.
            made = operation == "create" and isinstance(found, StoreExistsError) and there == TRUTH
            if failed and what.heals and not made:
                outcome.problems.append(f"{operation} did not heal: {found}")
    if what.always and outcome.right:
        outcome.problems.append("succeeded where nothing can")
    return outcome


STORES = {
    "nothing": kind(heals=True),
    "throttled": kind(often(0.1, status=503, code="SlowDown")),
    "resets": kind(often(0.1, reset_at=0), often(0.1, lose_request=True)),
    "lost answers": kind(often(0.1, lose_answer=True)),
    "denied half-way": kind(Fault(method="PUT", path="acts000002", status=403, code="AccessDenied", times=-1), always=True),
    "the last document is denied": kind(ever(method="PUT", path="/metadata", status=403, code="AccessDenied"), always=True),
    "the last answer is lost": kind(Fault(method="PUT", path="/metadata", lose_answer=True)),
    "everything": kind(
        often(0.04, status=500), often(0.04, lose_answer=True), often(0.04, lose_request=True), often(0.04, garbage=True),
        often(0.04, close_after=True), often(0.04, cut_at=1), often(0.04, status=429), often(0.02, status=403),
    ),
}  # fmt: skip


def store_through(
    upstream: str, bucket: Bucket, engine: str, name: str, *, operations: int = 1, seed: int = 1,
    protocols: Sequence[str] = ("2.0", "3.0"),
) -> Outcome:  # fmt: skip
    """Whole stores, of these protocols in turn: after any failure no reader takes the store for whole, and a writer without
    faults completes it."""
    what, outcome = STORES[name], Outcome()
    for number in range(operations):
        this = case(
            n=23, layers=(3, 7), content=4, d_model=64, per_shard=5, labelled=False,
            seed=zlib.crc32(f"{name}/{engine}/{seed}/{number}".encode()), protocol=protocols[number % len(protocols)],
        )  # fmt: skip

        def write(transport: Transport, resume: object = False) -> None:
            options = {"on_nonfinite": "allow", "progress": False}
            with create_store(transport, this.metadata, resume=resume, **options) as writer:  # noqa: B023 - called at once
                for some in writer.missing:
                    this.append(writer, some.start, some.stop)  # noqa: B023 - called at once

        def is_whole(store: ShardStore) -> bool:
            return this.matches(store) and store.validate(deep=True, progress=False).ok  # noqa: B023 - called at once

        with through(upstream, bucket, engine, what, seed + number) as (proxy, plain):
            transport, allowed_s = patient(plain, what)
            arm(proxy, what, bucket)
            failed = outcome.attempt(
                partial(write, transport.at("root")), allowed_s=40 * allowed_s, secrets=secrets_of(bucket)
            )
        look = direct(bucket, engine).at("root")
        try:
            store = ShardStore.open(look.at(this.name))
            outcome.right += 1
            if not is_whole(store):
                outcome.problems.append("published, and not whole")
            if what.always:
                outcome.problems.append("published where nothing can be")
        except (NotFoundError, IncompleteStoreError):
            if failed is None:
                outcome.problems.append("says it is done, and no store is there")
            write(look, resume=True)
            if not is_whole(ShardStore.open(look.at(this.name))):
                outcome.problems.append("resumed, and not whole")
        if left := uploads(bucket):
            outcome.problems.append(f"{left} uploads are left")
        if what.heals and failed is not None and not outcome.excused:
            outcome.problems.append(f"did not heal: {failed}")
    return outcome


def is_json(bucket: Bucket) -> bool:
    """Whether it speaks the interface of Google's that gcsfs speaks, where names of objects stand in bodies, too."""
    return bucket.url.startswith("gs") and s3_options(bucket) is None


def secrets_of(bucket: Bucket) -> tuple[str, ...]:
    return tuple(bucket.options[name] for name in ("secret", "bearer_token") if name in bucket.options)


def direct(bucket: Bucket, engine: str = "obstore") -> Transport:
    """Past the proxy; a machine that stands still for a minute is nobody's fault."""
    from saev_store.transport import open_transport

    engine = "fsspec" if is_json(bucket) else engine
    return Retrying(open_transport(bucket.url, bucket.options, engine=engine))


def uploads(bucket: Bucket) -> int:
    """Unfinished uploads."""
    return len(unfinished_uploads(bucket))


#: Servers, and how a bucket for each client comes about there.
PLACES = {
    "swift": dict.fromkeys(ENGINES, new_swift_bucket),
    "moto": dict.fromkeys(ENGINES, new_moto_bucket),
    "gcs": {"obstore": new_gcs_xml_bucket, "fsspec": new_gcs_json_bucket},
}
ROUNDS = {"read": (READING, read_through), "write": (WRITING, write_through), "store": (STORES, store_through)}


def awake(run: Callable[..., Outcome], seed: int) -> Outcome:
    """What a round finds; one in which something failed while the machine stood still tells nothing, and is made again."""
    for attempt in range(4):
        start = time.monotonic()
        found = run(seed=seed + 1000 * attempt)
        stood_s = STOOD_STILL.since(start)
        if not (found.problems or found.n_excused) or stood_s < 1:
            break
        print(f"once more, for the machine stood still for {stood_s:.1f} s: {'; '.join(sorted(set(found.problems)))}")
    return found


def n_sockets() -> int:
    """Descriptors of this process that are sockets."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=PLACES, action="append")
    parser.add_argument("--operations", type=int, default=60, help="of each kind and client; a tenth as many stores")
    parser.add_argument("--kind", default="", help="only kinds with this word")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    bad, total, wrong = [], collections.Counter(), 0
    for server in options.server or PLACES:
        buckets = {engine: make() for engine, make in PLACES[server].items()}
        threads, sockets = [], []
        for what, (kinds, run) in ROUNDS.items():
            operations = max(1, options.operations // 10) if what == "store" else options.operations
            for name in kinds:
                if options.kind not in name:
                    continue
                for engine in ENGINES:
                    bucket = buckets[engine]
                    if is_json(bucket) and any(fault.path for fault in kinds[name].faults):
                        continue
                    start, endpoint = time.monotonic(), bucket.options[endpoint_option(bucket)]
                    found = awake(partial(run, endpoint, bucket, engine, name, operations=operations), options.seed)
                    errors = ", ".join(f"{n} {error}" for error, n in sorted(found.errors.items()))
                    print(
                        f"{server:6}{engine:8} {what:6}{name:34} {found.right:5} right  longest {found.longest_s:5.1f} s"
                        f"  {time.monotonic() - start:5.1f} s  {errors}  {'; '.join(sorted(set(found.problems)))}",
                        flush=True,
                    )
                    total["right"] += found.right
                    total["errors"] += sum(found.errors.values())
                    wrong += len(found.problems)
                    bad += [f"{server} {engine} {what} {name}: {problem}" for problem in sorted(set(found.problems))]
                gc.collect()
                threads.append(threading.active_count())
                sockets.append(n_sockets())
        print(f"{server}: threads {threads[0]} at first, {max(threads)} at most, {threads[-1]} at the end; "
              f"sockets {sockets[0]}, {max(sockets)}, {sockets[-1]}")  # fmt: skip
    print(f"the machine stood still for {STOOD_STILL.since(0):.1f} s")
    print(f"{total['right']:,} operations right, {total['errors']:,} errors with a name, {wrong} problems")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
