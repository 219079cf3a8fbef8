"""A proxy that breaks things before a bucket: the bytes are right, or an error of ours comes within the time allowed."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
from cloud_servers import Fault, Proxy
from servers import s3_bucket, s3_endpoint  # noqa: F401 (one is a fixture)

from saev_store.errors import NotFoundError, SaevStoreError, StoreExistsError
from saev_store.transport import RetryTransport
from saev_store.transport._fsspec import FsspecTransport
from saev_store.transport._obstore import ObstoreTransport

pytest.importorskip("obstore")

TRUTH = np.random.default_rng(0).bytes(200_000)
TIMEOUT_S = 1.5
#: What an operation may take beyond its time-out on a machine that is busy.
SLACK_S = 15

#: name -> (faults, whether every read has to succeed in spite of them)
READING = {
    "nothing": ([], True),
    "500 twice": ([Fault(status=500, times=2)], True),
    "502 now and then": ([Fault(status=502, times=-1, probability=0.1)], True),
    "503 slow down": ([Fault(status=503, code="SlowDown", times=-1, probability=0.1)], True),
    "504 twice": ([Fault(status=504, times=2)], True),
    "429 twice": ([Fault(status=429, code="TooManyRequests", times=2)], True),
    "400 request time-out": ([Fault(status=400, code="RequestTimeout", times=2)], False),
    "reset at once": ([Fault(reset_at=0, times=3)], True),
    "reset in mid-body": ([Fault(reset_at=100, times=3)], True),
    "reset at the last byte": ([Fault(reset_at=999, times=3)], True),
    "resets now and then": ([Fault(reset_at=500, times=-1, probability=0.1)], True),
    "cut at once": ([Fault(cut_at=0, times=3)], True),
    "cut in mid-body": ([Fault(cut_at=400, times=3)], True),
    "cuts now and then": ([Fault(cut_at=999, times=-1, probability=0.1)], True),
    "request lost": ([Fault(lose_request=True, times=3)], True),
    "requests lost now and then": ([Fault(lose_request=True, times=-1, probability=0.1)], True),
    "answer lost": ([Fault(lose_answer=True, times=3)], True),
    "slow first byte": ([Fault(delay_s=0.3, times=3)], True),
    "slow trickle": ([Fault(bytes_per_s=300, times=2)], False),
    "stall in mid-body": ([Fault(stall_at=10, times=2)], False),
    "no first byte": ([Fault(delay_s=60, times=2)], False),
    "range ignored": ([Fault(ignore_range=True, times=3)], False),
    "expired token": ([Fault(status=400, code="ExpiredToken", times=2)], False),
    "clock skew": ([Fault(status=403, code="RequestTimeTooSkewed", times=2)], False),
    "access denied": ([Fault(status=403, code="AccessDenied", times=2)], False),
    "moved": ([Fault(status=301, code="PermanentRedirect", times=2)], False),
    "gone for a while": ([Fault(status=404, code="NoSuchKey", times=2)], False),
    "always 500": ([Fault(status=500, times=-1)], False),
    "always reset": ([Fault(reset_at=10, times=-1)], False),
    "always denied": ([Fault(status=403, code="InvalidAccessKeyId", times=-1)], False),
    "errors and resets": (
        [Fault(status=503, times=-1, probability=0.07), Fault(reset_at=300, times=-1, probability=0.07)],
        True,
    ),
    "cuts and delays": ([Fault(cut_at=1, times=-1, probability=0.07), Fault(delay_s=0.1, times=-1, probability=0.1)], True),
    "everything": (
        [
            Fault(status=500, times=-1, probability=0.03),
            Fault(status=429, times=-1, probability=0.03),
            Fault(reset_at=1, times=-1, probability=0.03),
            Fault(cut_at=700, times=-1, probability=0.03),
            Fault(lose_answer=True, times=-1, probability=0.03),
            Fault(lose_request=True, times=-1, probability=0.03),
            Fault(delay_s=0.2, times=-1, probability=0.03),
            Fault(stall_at=5, times=1),
            Fault(ignore_range=True, times=1),
        ],
        False,
    ),
}  # fmt: skip


def open_through(proxy, bucket, engine):
    options = {**bucket.options, "endpoint_url": proxy.url}
    if engine == "fsspec":
        tuned = {"read_timeout": 1, "connect_timeout": 1}
        options |= {"config_kwargs": tuned, "skip_instance_cache": True}
        return FsspecTransport(bucket.url, options, timeout_s=TIMEOUT_S)
    return ObstoreTransport(bucket.url, options, timeout_s=TIMEOUT_S)


def outcome(call):
    """(result, error, seconds); any other exception than ours is a failure of the test."""
    start = time.monotonic()
    try:
        return call(), None, time.monotonic() - start
    except SaevStoreError as error:
        return None, error, time.monotonic() - start


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("kind", READING)
def test_right_bytes_or_a_named_error_in_time(s3_bucket, kind, engine):
    ObstoreTransport(s3_bucket.url, s3_bucket.options).put("acts.bin", TRUTH)
    faults, heals = READING[kind]
    faults = [Fault(**vars(fault)) for fault in faults]
    n_errors, wrong = [0], []
    with Proxy(s3_endpoint(), faults, seed=1) as proxy:
        always = kind.startswith("always")
        attempts = 1 if always else 4
        transport = RetryTransport(open_through(proxy, s3_bucket, engine), attempts=attempts, max_wait_s=0.1)

        def read(seed):
            rng = np.random.default_rng(seed)
            for _ in range(1 if always else 6):
                starts = rng.integers(0, 199_000, 2).tolist()
                ends = [start + 1000 for start in starts]
                found, error, took_s = outcome(partial(transport.get_ranges, "acts.bin", starts=starts, ends=ends))
                if took_s > 4 * (TIMEOUT_S + 0.1) + SLACK_S:
                    wrong.append(f"took {took_s} s")
                if error is not None:
                    n_errors[0] += 1
                    if "very-secret-key" in repr(error) + str(error):
                        wrong.append("a secret was told")
                elif [bytes(part) for part in found] != [TRUTH[a:b] for a, b in zip(starts, ends, strict=True)]:
                    wrong.append("wrong bytes")

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        if heals:
            assert n_errors == [0]
        if always:
            assert n_errors == [3]
        assert len(proxy.log) > 0


WRITING = {
    "500 twice": ([Fault(method="PUT", status=500, times=2)], True),
    "503 twice": ([Fault(method="PUT", status=503, code="SlowDown", times=2)], True),
    "request lost": ([Fault(method="PUT", lose_request=True, times=1)], True),
    "answer lost": ([Fault(method="PUT", lose_answer=True, times=1)], True),
    "denied": ([Fault(method="PUT", status=403, code="AccessDenied", times=-1)], False),
    "always 500": ([Fault(method="PUT", status=500, times=-1)], False),
    "mixture": (
        [Fault(method="PUT", status=503, times=1), Fault(method="PUT", lose_answer=True, times=1), Fault(method="PUT", lose_request=True, times=1)],
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("kind", WRITING)
def test_what_is_written_is_whole_or_not_there(s3_bucket, kind, engine):
    direct = ObstoreTransport(s3_bucket.url, s3_bucket.options)
    faults, heals = WRITING[kind]
    for operation in ("put", "create"):
        with Proxy(s3_endpoint(), [Fault(**vars(fault)) for fault in faults]) as proxy:
            transport = RetryTransport(
                open_through(proxy, s3_bucket, engine), attempts=1 if kind == "always 500" else 4, max_wait_s=0.1
            )
            _, error, took_s = outcome(partial(getattr(transport, operation), f"{operation}.json", TRUTH))
            assert took_s < 4 * (TIMEOUT_S + 0.3) + SLACK_S
            try:
                there = direct.read(f"{operation}.json")
            except NotFoundError:
                there = None
            assert there in {None, TRUTH}
            if error is None:
                assert there == TRUTH
            if heals and operation == "put":
                assert error is None
            # The service's own second attempt can meet what the first one made: then it says so, and reading decides.
            assert isinstance(error, (StoreExistsError, type(None))) or not heals


def uploads(bucket):
    import s3fs

    files = s3fs.S3FileSystem(**bucket.options)
    return files.call_s3("list_multipart_uploads", Bucket=bucket.url.removeprefix("s3://")).get("Uploads") or []


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("uploads", Fault(status=500, times=-1)),
        ("partNumber=2", Fault(status=403, code="AccessDenied", times=-1)),
        ("partNumber=1", Fault(status=500, times=-1)),
        ("", Fault(method="POST", path="uploadId", status=403, times=-1)),
    ],
)
def test_an_upload_that_fails_leaves_nothing_behind(s3_bucket, path, fault):
    fault = Fault(**{**vars(fault), "path": path or fault.path})
    with Proxy(s3_endpoint(), [fault]) as proxy:
        transport = open_through(proxy, s3_bucket, "obstore")
        sink = transport.open_sink("big.bin", used_nbytes=20 << 20, file_nbytes=20 << 20, resume=True)

        def upload():
            for start in range(0, 20 << 20, 4 << 20):
                sink.write(start, [memoryview(bytes(4 << 20))])
            sink.commit()

        _, error, _ = outcome(upload)
        assert error is not None
        sink.abort()
        with pytest.raises(NotFoundError):
            ObstoreTransport(s3_bucket.url, s3_bucket.options).size("big.bin")
        assert uploads(s3_bucket) == []


def test_a_slow_part_does_not_hold_an_upload_up_for_ever(s3_bucket):
    with Proxy(s3_endpoint(), [Fault(path="partNumber=1", delay_s=30, times=-1)]) as proxy:
        transport = open_through(proxy, s3_bucket, "obstore")
        sink = transport.open_sink("big.bin", used_nbytes=9 << 20, file_nbytes=9 << 20, resume=True)
        start = time.monotonic()
        with pytest.raises(SaevStoreError):
            sink.write(0, [memoryview(bytes(9 << 20))])
            sink.commit()
        assert time.monotonic() - start < 60


def test_nothing_is_left_open(s3_bucket):
    """Threads and connections do not grow with the number of failed reads."""
    ObstoreTransport(s3_bucket.url, s3_bucket.options).put("acts.bin", TRUTH)
    with Proxy(s3_endpoint(), [Fault(reset_at=10, times=-1, probability=0.3)]) as proxy:
        transport = open_through(proxy, s3_bucket, "obstore")
        seen = []
        for _ in range(3):
            for n in range(20):
                outcome(lambda n=n: transport.get_ranges("acts.bin", starts=[n], ends=[n + 100]))
            seen.append((threading.active_count(), proxy.open_now))
        assert seen[2][0] <= seen[0][0] + 2
        assert seen[2][1] <= 64
