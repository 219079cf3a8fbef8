"""Servers on this machine for tests of remote stores."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest


class Bucket(NamedTuple):
    url: str
    options: dict


#: In a process of its own, so that it neither competes with clients for one interpreter nor fills this one's memory.
_MOTO = """
import functools, sys, threading
import moto.s3.models, moto.s3.responses
from moto.server import ThreadedMotoServer
from werkzeug.serving import BaseWSGIServer
moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1  # uploads of many parts that are quick
one, put_object = threading.Lock(), moto.s3.responses.S3Response.put_object
@functools.wraps(put_object)
def in_turn(self):  # S3 decides a conditional write in one step; moto looks first and writes later
    with one:
        return put_object(self)
moto.s3.responses.S3Response.put_object = in_turn
BaseWSGIServer.request_queue_size = 1024  # every request is a connection, and many come at once
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@functools.cache
def s3_endpoint() -> str:
    """An S3 server; it ends with this process."""
    for needed in ("moto", "flask", "s3fs"):
        pytest.importorskip(needed)
    return started_in_python(_MOTO)


def started_in_python(code: str, *arguments: str) -> str:
    """The address that some code tells when it serves, in a process that ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parent,
    )  # fmt: skip

    maker = os.getpid()

    def stop() -> None:
        if os.getpid() == maker:
            server.kill()
            server.communicate()

    atexit.register(stop)
    endpoint = server.stdout.readline().strip() if server.stdout else ""
    assert endpoint, "the server did not start"
    return endpoint


def new_bucket(options: dict) -> Bucket:
    """A fresh bucket of an S3 server."""
    s3fs = pytest.importorskip("s3fs")
    name = f"lab-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(**options).mkdir(name)
    return Bucket(f"s3://{name}", options)


def new_moto_bucket() -> Bucket:
    """A fresh bucket of the server in this process."""
    return new_bucket({"key": "AKIDTESTKEY", "secret": "very-secret-key", "endpoint_url": s3_endpoint()})


@pytest.fixture
def s3_bucket():
    """A fresh bucket."""
    return new_moto_bucket()
