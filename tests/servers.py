"""Servers on this machine for tests of remote stores."""

from __future__ import annotations

import functools
import importlib
import uuid
from typing import NamedTuple

import pytest


class Bucket(NamedTuple):
    url: str
    options: dict


@functools.cache
def s3_endpoint() -> str:
    """An S3 server in this process; it ends with it."""
    server_module = pytest.importorskip("moto.server")
    models = importlib.import_module("moto.s3.models")
    models.S3_UPLOAD_PART_MIN_SIZE = 1  # uploads of many parts that are quick
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


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
