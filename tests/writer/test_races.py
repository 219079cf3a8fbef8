"""Writers that race for one store, and writers that are killed, on real servers and through both clients.

A few rounds run everywhere. `SAEV_STORE_LONG=1` makes it many more, and adds Ceph; `bash .ci/nightly races` is the command for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ceph_server import ceph_bucket  # noqa: F401 (a fixture)
from cloud_servers import gcs_json_bucket, gcs_xml_bucket, s3_options, swift_bucket  # noqa: F401 (three are fixtures)
from kill_harness_oracle import case
from servers import s3_bucket  # noqa: F401 (a fixture)

from saev_store.errors import IncompleteStoreError, SaevStoreError, StoreExistsError, WriterConflictError
from saev_store.transport import open_transport
from saev_store.writer import create_store, finalize_store

pytest.importorskip("obstore")
pytest.importorskip("s3fs")

LONG = bool(os.environ.get("SAEV_STORE_LONG"))
#: Rounds of each race, and writers that are killed, through each client.
QUICK_ROUNDS = {"moto": 3, "swift": 5, "ceph": 0, "gcs": 3}
QUICK_KILLS = {"moto": 4, "swift": 5, "ceph": 0, "gcs": 5}
#: What a loser is told.
TOLD = (WriterConflictError, StoreExistsError, IncompleteStoreError)
FIXTURES = {"moto": "s3_bucket", "swift": "swift_bucket", "ceph": "ceph_bucket"}
ENGINES = ("obstore", "fsspec")
#: Through obstore `gs://` is moto, which decides as Google says it does; fake-gcs-server answers to fsspec.
GCS = {"obstore": "gcs_xml_bucket", "fsspec": "gcs_json_bucket"}
OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow"}
#: Of the stores of a race, in turn: 3.0 has bfloat16 and token arrays.
PROTOCOLS = ("2.0", "3.0")


def together(works):
    """What each of some calls gives or raises, begun at the same time."""
    outcomes, barrier = [None] * len(works), threading.Barrier(len(works))

    def run(i, work):
        barrier.wait()
        try:
            outcomes[i] = work()
        except SaevStoreError as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def all_told(server, outcomes):
    """Whether nobody has won, which only Swift may decide, and everybody was told so."""
    if server != "swift" or True in outcomes:
        return False
    assert all(isinstance(outcome, TOLD) for outcome in outcomes), outcomes
    return True


def check_outcomes(outcomes, *, atomic):
    """Exactly one has won and every other one was told; where the server does not decide, at least somebody has won."""
    winners = outcomes.count(True)
    assert winners == 1 if atomic else winners >= 1, outcomes
    assert all(outcome in (True, False) or isinstance(outcome, TOLD) for outcome in outcomes), outcomes
    return winners


def check_store(url, options, engine, this):
    folder = open_transport(url, options, engine=engine).at(this.name)
    this.check({entry.path: folder.read(entry.path) for entry in folder.list() if not entry.is_dir})


def write(transport, this):
    """The whole life of a store; True if this call has published it."""
    with create_store(transport, this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, this.n)
    return True


def bucket_of(request, server, engine):
    return request.getfixturevalue(GCS[engine] if server == "gcs" else FIXTURES[server])


def rounds(server):
    return 100 if LONG else QUICK_ROUNDS[server]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("server", [*FIXTURES, "gcs"])
def test_two_writers_of_one_store(request, server, engine):
    """Both write all of it and publish."""
    bucket, double = bucket_of(request, server, engine), 0
    for seed in range(rounds(server)):
        this = case(n=3, per_shard=3, pad=False, seed=seed, protocol=PROTOCOLS[seed % 2])
        transports = [open_transport(bucket.url, bucket.options, engine=engine) for _ in range(2)]
        outcomes = together([partial(write, transport, this) for transport in transports])
        if all_told(server, outcomes):  # each may see the other's hold on a part
            with create_store(transports[0], this.metadata, resume=True, **OPTIONS) as writer:
                this.append(writer, writer.next_example, this.n)
        else:
            double += check_outcomes(outcomes, atomic=server != "swift") - 1
        check_store(bucket.url, bucket.options, engine, this)
    print(f"{server} through {engine}: {double} double winners")  # noqa: T201 (`.ci/nightly` shows it)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("server", [*FIXTURES, "gcs"])
def test_two_publishers_of_one_store(request, server, engine):
    """Two parts are written; two processes finalize at the same time."""
    bucket, double = bucket_of(request, server, engine), 0
    for seed in range(rounds(server)):
        this = case(n=4, per_shard=2, pad=False, seed=1000 + seed, protocol=PROTOCOLS[seed % 2])
        transports = [open_transport(bucket.url, bucket.options, engine=engine) for _ in range(2)]
        for rank, transport in enumerate(transports):
            with create_store(transport, this.metadata, part=(rank, 2), **OPTIONS) as writer:
                this.append(writer, *writer.example_range)
        outcomes = together([partial(finalize_store, transport, this.metadata) for transport in transports])
        if all_told(server, outcomes):  # each may see that the other has taken over
            finalize_store(transports[0], this.metadata, takeover=True)
        else:
            double += check_outcomes(outcomes, atomic=server != "swift") - 1
        check_store(bucket.url, bucket.options, engine, this)
    print(f"{server} through {engine}: {double} double winners")  # noqa: T201 (`.ci/nightly` shows it)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("server", [*FIXTURES, "gcs"])
@pytest.mark.timeout(1600)  # 26 starts of Python with s3fs take a minute, and five beside other work
def test_writers_that_are_killed(request, server, engine):
    """SIGKILL at random instants: bit-identical in the end, never half published, and no upload left over."""
    if server == "gcs":  # obstore alone does not tell what is left over
        pytest.importorskip("gcsfs")
    bucket = bucket_of(request, server, engine)
    n_kills = 50 if LONG else QUICK_KILLS[server]
    seed = int(np.random.SeedSequence().entropy % 1000) if LONG else 0
    found = subprocess.run(
        [sys.executable, (Path(__file__).parents[1] / "helpers/kill_uploads.py"), bucket.url, json.dumps(bucket.options), engine,
         "--behind", json.dumps(s3_options(bucket)), "--kills", str(n_kills), "--seed", str(seed)],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert found.returncode == 0, f"seed {seed}: {found.stderr[-4000:]}"
    assert json.loads(found.stdout.splitlines()[-1])["kills"] >= n_kills
    print(server, engine, found.stdout.splitlines()[-1])  # noqa: T201 (`.ci/nightly` shows it)
