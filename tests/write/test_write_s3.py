"""The same against an S3 server: parts, races of publishers, resume, repair, copies; through obstore and through fsspec."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from servers import Bucket, s3_bucket  # noqa: F401  # fixtures
from test_publish_races import at_once
from written import a_case, append_missing, content, copy_whole, create, cut, files, finalize_store, finish, repair

from saev_store import ShardStore
from saev_store.errors import IncompleteStoreError
from saev_store.transport import open_transport
from saev_store.writer import clean

ENGINES = ("obstore", "fsspec")
N_RACES = int(os.environ.get("SAEV_STORE_RACES", "3"))


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_races_repair_and_copies_in_a_bucket_are_right(s3_bucket: Bucket, tmp_path, engine):
    def root(name: str):
        return open_transport(f"{s3_bucket.url}/{name}", s3_bucket.options, engine=engine)

    for number in range(N_RACES):
        this = cut(a_case(seed=number, protocol=("2.0", "3.0")[number % 2]))
        name = f"{engine}-{number}"
        with pytest.raises(IncompleteStoreError), create(root(name), this) as writer:
            append_missing(writer, this, most=7)
        for rank in range(2):
            finish(root(name), this, part=(rank, 2))
        found = at_once([lambda name=name, this=this: finalize_store(root(name), this.metadata) for _ in range(4)])
        assert set(found) <= {True, False}
        this.check(files(root(name), this.name))
    store = root(name).at(this.name)
    store.delete("acts000001.bin")
    with repair(root(name), this, lost=()) as writer:
        assert writer.missing == [range(3, 6)]
        append_missing(writer, this)
    assert writer.repaired[0].identical
    for to in (root(f"{name}-copy"), open_transport(tmp_path)):
        with ShardStore.open(root(name).at(this.name)) as source:
            copy_whole(source, to)
    this.check(files(root(f"{name}-copy"), this.name))
    assert this.matches(ShardStore.open(tmp_path / this.name))
    assert sorted(content(tmp_path)) == sorted(f"{this.name}/{name}" for name in this.files())
    assert clean(root(name), older_than_s=0) == []


KILLED = """
import os, sys
sys.path[:0] = [{tests!r}, {root!r}]
from written import a_case, append_missing, create, cut
from saev_store.transport import open_transport
this = cut(a_case())
writer = create(open_transport({url!r}, {options!r}), this, resume=True)
append_missing(writer, this, most={most})
for future in writer._pending:
    future.result()
os.kill(os.getpid(), 9)
"""


def test_killed_writers_to_a_bucket_are_continued(s3_bucket: Bucket):
    this, url = cut(a_case()), f"{s3_bucket.url}/killed"
    tests = os.path.join(os.path.dirname(os.path.dirname(__file__)), "helpers")
    for most in (4, 7):
        code = KILLED.format(
            tests=tests, root=os.path.dirname(os.path.dirname(tests)), url=url, options=s3_bucket.options, most=most
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == -9, done.stderr[-2000:]
    root = open_transport(url, s3_bucket.options)
    with create(root, this, resume=True) as writer:
        assert writer.missing == [range(9, 11)]
        append_missing(writer, this)
    this.check(files(root, this.name))
