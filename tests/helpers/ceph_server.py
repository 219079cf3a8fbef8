"""Ceph's radosgw on this machine, from Debian's packages: for the longer run of `.ci/long` only."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import Bucket
from waiting import HANG_S

KEY, SECRET = "lab-access-key", "lab-secret-key"
#: What a first start may meet (a port that somebody took meanwhile, a machine that stands still) a second one seldom does.
N_STARTS = 3
#: Who asks the monitor before he has heard the cluster's id from it, as happens on a busy machine, is refused: EPERM, "wrong
#: fsid". All of our commands may be given twice.
_N_TRIES = 40
_PREFIX = "saev-store-ceph-"
_PAUSE_S = 0.25
#: The system kills what we start when we have been killed, so that it outlives no run of the tests.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
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
# The store reads only as long as it holds a lease, of 0.8 times this many seconds, from itself. Where it has stood still for
# longer, some placement groups never got another one: every request to them waited for ever ("waiting for readable").
osd_heartbeat_grace = 86400
[mon]
mon_data = {root}/mon
mon_data_avail_crit = 1
mon_cluster_log_file = {root}/cluster.log
[osd]
osd_data = {root}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_max_object_name_len = 256
osd_max_object_namespace_len = 64
# It would tell the monitor its place, may be refused like any other command, and would then end; it is told below.
osd_class_update_on_start = false
osd_crush_update_on_start = false
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


class StartError(Exception):
    """A daemon has ended, or a command has failed, while the cluster was started."""


class Cluster:
    """One monitor, one store in memory and one gateway. They end with `stop`, and with this process however it ends."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.config = self.root / "ceph.conf"
        self._maker = os.getpid()
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> str:
        """The gateway's address.

        Raises:
            StartError: it did not come up.
        """
        for name in ("mon", "osd", "rgw"):
            (self.root / name).mkdir()
        monitor, gateway, fsid = _free_port(), _free_port(), str(uuid.uuid4())
        self.config.write_text(_CONFIG.format(fsid=fsid, root=self.root, mon=monitor, rgw=gateway))
        monmap, osd = str(self.root / "monmap"), str(uuid.uuid4())
        address = f"[v1:127.0.0.1:{monitor}/0]"
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", address, monmap, config=False)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._daemon("ceph-mon", "-i", "a")
        self._run("ceph", "osd", "create", osd)
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=lab", "root=default")
        self._daemon("ceph-osd", "-i", "0")
        self._until("the store is up", lambda: "1 up" in self._run("ceph", "osd", "stat"))
        self._daemon("radosgw", "-n", "client.rgw")
        endpoint = f"http://127.0.0.1:{gateway}"
        self._until("the gateway answers", lambda: _answers(endpoint))
        self._run(
            "radosgw-admin", "user", "create", "--uid=lab", "--display-name=lab",
            f"--access-key={KEY}", f"--secret-key={SECRET}",
        )  # fmt: skip
        return endpoint

    def stop(self) -> None:
        """Kill what was started, and remove its files."""
        if os.getpid() != self._maker:  # a fork that runs its parent's exit handlers
            return
        for daemon in reversed(self.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def _run(self, command: str, *arguments: str, config: bool = True) -> str:
        given = ["-c", str(self.config)] if config else []
        shown = f"{command} {' '.join(arguments[:3])}"
        for _ in range(_N_TRIES):
            try:
                done = subprocess.run(
                    [*_ENDS_WITH_US, command, *given, *arguments],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=HANG_S,
                )
            except subprocess.TimeoutExpired as error:
                raise StartError(f"{shown} does not end") from error
            if done.returncode == 0:
                return done.stdout
            if "EPERM" not in done.stderr:
                break
            time.sleep(_PAUSE_S)
        raise StartError(f"{shown}: {done.stdout}{done.stderr}")

    def _daemon(self, command: str, *arguments: str) -> None:
        with (self.root / f"{command}.out").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [*_ENDS_WITH_US, command, "-c", str(self.config), *arguments, "-f"],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + HANG_S
        while not condition():
            for daemon in self.daemons:
                if daemon.poll() is not None:
                    raise StartError(
                        f"{daemon.args[len(_ENDS_WITH_US)]} ended with {daemon.returncode}: {self._told()}"
                    )
            if time.monotonic() > ends_at:
                raise StartError(f"{what}: not within {HANG_S} s: {self._told()}")
            time.sleep(_PAUSE_S)

    def _told(self) -> str:
        """The end of what each daemon has logged."""
        logs = sorted([*self.root.glob("*.out"), *self.root.glob("*.log")])
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1000:]}" for log in logs)


def _free_port() -> int:
    """A port that nobody is given by the system for a connection of his own before the daemon takes it."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return probe.getsockname()[1]


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def remove_leftovers() -> None:
    """Remove the files of runs that were killed before they could."""
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = root.name.removeprefix(_PREFIX).partition("-")[0]
        if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
            shutil.rmtree(root, ignore_errors=True)


@functools.cache
def ceph_endpoint() -> str:
    """One cluster for this process."""
    if not os.environ.get("SAEV_STORE_LONG"):
        pytest.skip("Ceph is part of the longer run: bash .ci/long")
    if not shutil.which("radosgw"):
        pytest.fail("radosgw is missing: apt-get install radosgw ceph-mon ceph-osd ceph-common")
    remove_leftovers()
    failures: list[str] = []
    while len(failures) < N_STARTS:
        cluster = Cluster()
        atexit.register(cluster.stop)
        try:
            return cluster.start()
        except StartError as error:
            failures.append(str(error))
        except BaseException:
            cluster.stop()
            raise
        cluster.stop()
        atexit.unregister(cluster.stop)
    pytest.fail("\n".join(failures))


@pytest.fixture
def ceph_bucket() -> Bucket:
    """A fresh bucket on Ceph."""
    s3fs = pytest.importorskip("s3fs")
    options = {"key": KEY, "secret": SECRET, "endpoint_url": ceph_endpoint()}
    name = f"lab-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(**options).mkdir(name)
    return Bucket(f"s3://{name}", options)
