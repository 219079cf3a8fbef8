"""What fsspec's file systems are told beyond the caller's options, and what of the options travels."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from servers import s3_bucket  # noqa: F401 (a fixture)
from waiting import HANG_S

from saev_store.transport import open_transport
from saev_store.transport.credentials import StorageOptions
from saev_store.transport.fsspec._options import tuned


def test_s3_gets_as_many_connections_as_requests():
    found = tuned("s3", {"anon": True, "config_kwargs": {"read_timeout": 99, "s3": {"addressing_style": "path"}}})
    assert found["config_kwargs"]["max_pool_connections"] == 64
    assert found["config_kwargs"]["read_timeout"] == 99
    assert found["config_kwargs"]["s3"] == {"addressing_style": "path"}
    assert (found["use_listings_cache"], found["anon"]) == (False, True)
    assert tuned("s3", {"use_listings_cache": True})["use_listings_cache"]


def test_gcs_is_given_time_outs(monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", raising=False)
    assert tuned("gs", {})["requests_timeout"].sock_read == 10
    assert tuned("gcs", {"requests_timeout": 5})["requests_timeout"] == 5


def test_others_are_left_alone():
    assert tuned("sftp", {"host": "h"}) == {"host": "h"}
    assert tuned("zip", {}) == {}


@pytest.mark.parametrize(
    ("options", "travels"),
    [
        ({}, True),
        ({"anon": True, "endpoint_url": "http://h:1", "client_kwargs": {"region_name": "eu"}}, True),
        ({"token": "anon", "project": "lab"}, True),  # a word that gcsfs knows
        ({"token": "hush-hush"}, False),
        ({"secret": "hush-hush"}, False),
        ({"anything": "hush-hush"}, False),
        ({"client_kwargs": {"aws_secret_access_key": "hush-hush"}}, False),
        ({"s3": {"secret": "hush-hush"}}, False),
        ({"endpoint_url": "http://me:hush-hush@h"}, False),
        ({"endpoint_url": "http://h?sig=hush-hush"}, False),
        ({"tokens": ["hush-hush"]}, False),
    ],
)
def test_only_what_cannot_be_a_secret_travels(options, travels):
    data = pickle.dumps(StorageOptions(options))
    assert b"hush-hush" not in data
    assert "hush-hush" not in repr(StorageOptions(options))
    assert pickle.loads(data).all == options  # in this process
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).all)"
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=HANG_S, check=False)
    assert (done.returncode == 0) == travels
    if not travels:
        assert b"AccessError" in done.stderr


def test_every_request_is_counted(s3_bucket):
    transport = open_transport(s3_bucket.url, s3_bucket.options, engine="fsspec")
    transport.put("a/b.bin", b"0123456789")
    transport.get_ranges("a/b.bin", starts=[0, 5, 5], ends=[2, 5, 9])
    transport.read("a/b.bin", max_bytes=100)
    transport.size("a/b.bin")
    transport.list("a")
    counters = transport.at("a").counters
    assert counters.operations == {"put": 1, "get_ranges": 2, "read": 1, "size": 1, "list": 1}
    assert (counters.requests, counters.bytes_read, counters.bytes_written) == (6, 16, 10)


def test_what_is_no_secret_is_shown():
    options = StorageOptions({"token": "anon", "project": "shards", "key": "hush-hush"})
    assert options.redact("gs://lab/canonical/shards: hush-hush") == "gs://lab/canonical/shards: ***"
