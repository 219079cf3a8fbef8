"""Ceph's radosgw on this machine, from Debian's packages: for the longer run of `.ci/long` only."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import pytest
from cloud_servers import free_port
from servers import Bucket

KEY, SECRET = "lab-access-key", "lab-secret-key"
_CONFIG = """
[global]
fsid = {fsid}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
mon_host = [v1:127.0.0.1:{mon}/0]
public_network = 127.0.0.0/8
run_dir = {root}
admin_socket = {root}/$name.asok
pid_file = {root}/$name.pid
log_file = {root}/$name.log
keyring = {root}/keyring
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
ms_bind_ipv6 = false
[mon]
mon_data = {root}/mon
mon_data_avail_crit = 1
[osd]
osd_data = {root}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_max_object_name_len = 256
osd_max_object_namespace_len = 64
[client.rgw]
rgw_data = {root}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{rgw}
rgw_multipart_min_part_size = 1
rgw_enable_usage_log = false
debug_rgw = 0
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 3
rgw_gc_processor_max_time = 3
"""


@functools.cache
def ceph_endpoint() -> str:
    """One monitor, one store in memory and one gateway, started for this process; they end with it."""
    if not os.environ.get("SAEV_STORE_LONG"):
        pytest.skip("Ceph is part of the longer run: bash .ci/long")
    if not shutil.which("radosgw"):
        pytest.fail("radosgw is missing: apt-get install radosgw ceph-mon ceph-osd ceph-common")
    root = Path(tempfile.mkdtemp(prefix="saev-store-ceph-"))
    for name in ("mon", "osd", "rgw"):
        (root / name).mkdir()
    port, fsid, config = free_port(), str(uuid.uuid4()), root / "ceph.conf"
    config.write_text(_CONFIG.format(fsid=fsid, root=root, mon=free_port(), rgw=port))
    processes: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(root, ignore_errors=True)

    atexit.register(stop)

    def run(*command: str, check: bool = True) -> None:
        with (root / "setup.log").open("ab") as log:
            subprocess.run(
                [command[0], "-c", str(config), *command[1:]], stdout=log, stderr=log, check=check, timeout=60
            )

    def start(*command: str) -> None:
        with (root / "daemons.log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    [command[0], "-c", str(config), *command[1:], "-f"], stdout=log, stderr=log, start_new_session=True
                )
            )

    monitor = config.read_text().partition("mon_host = ")[2].split()[0]
    monmap = str(root / "monmap")
    with (root / "setup.log").open("ab") as log:
        subprocess.run(
            ["monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", monitor, monmap],
            stdout=log,
            stderr=log,
            check=True,
        )
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
    start("ceph-mon", "-i", "a")
    osd = str(uuid.uuid4())
    run("ceph", "osd", "create", osd)
    run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
    run("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=lab", "root=default", check=False)
    start("ceph-osd", "-i", "0")
    for _ in range(60):
        stat = subprocess.run(["ceph", "-c", str(config), "osd", "stat"], capture_output=True, text=True, check=False)
        if "1 up" in stat.stdout:
            break
        time.sleep(1)
    else:
        pytest.fail((root / "osd.0.log").read_text()[-2000:])
    start("radosgw", "-n", "client.rgw")
    user = ("user", "create", "--uid=lab", "--display-name=lab", f"--access-key={KEY}", f"--secret-key={SECRET}")
    for _ in range(60):
        with contextlib.suppress(subprocess.SubprocessError):
            run("radosgw-admin", *user)
            break
        time.sleep(1)
    else:
        pytest.fail((root / "setup.log").read_text()[-2000:])
    endpoint = f"http://127.0.0.1:{port}"
    for _ in range(120):
        with contextlib.suppress(OSError):
            try:
                urllib.request.urlopen(endpoint, timeout=2).close()
            except urllib.error.HTTPError:
                return endpoint
            return endpoint
        time.sleep(0.5)
    pytest.fail((root / "daemons.log").read_text()[-2000:])


@pytest.fixture
def ceph_bucket() -> Bucket:
    """A fresh bucket on Ceph."""
    s3fs = pytest.importorskip("s3fs")
    options = {"key": KEY, "secret": SECRET, "endpoint_url": ceph_endpoint()}
    name = f"lab-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(**options).mkdir(name)
    return Bucket(f"s3://{name}", options)
