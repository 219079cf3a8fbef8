"""A dask cluster of two worker processes, and the death of some of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import soon

ROOT = Path(__file__).resolve().parents[2]
#: Of every bucket of `servers.s3_bucket`.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIDTESTKEY", "AWS_SECRET_ACCESS_KEY": "very-secret-key"}


@contextmanager
def two_workers() -> Iterator[Any]:
    """A client of two processes, which import the package that is tested, and have the credentials of the test server's buckets."""
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests/helpers'}")
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with (
            # Otherwise a worker that is starting again 15 s after it was killed is given up for ever.
            dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
            ) as cluster,
            distributed.Client(cluster, set_as_default=False) as client,
        ):
            yield client


class Noted:
    """A task that leaves a file for each time it is begun; in the chosen tasks, its process is killed the first time.

    The kill comes when `n_received` files in the folder say that earlier results have arrived; see `receiving`.
    """

    def __init__(
        self, call: Callable[[Any], Any], folder: Path, place: int, killed: tuple[int, ...], n_received: int
    ) -> None:
        self.call, self.folder, self.place, self.killed, self.n_received = call, folder, place, killed, n_received

    def __call__(self, task: object) -> object:
        n_begun = len(list(self.folder.glob(f"task-{self.place}-*")))
        (self.folder / f"task-{self.place}-{n_begun}-{os.getpid()}").touch()
        if self.place in self.killed and n_begun == 0:
            self.call(task)  # what it did is there, what it found is lost
            soon(lambda: len(list(self.folder.glob("received-*"))) >= self.n_received)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.call(task)


def noting(client: Any, folder: Path, *, killed: tuple[int, ...] = (), n_received: int = 0) -> Any:
    """A client that makes its tasks `Noted`; of each call the first task has the number 0."""
    folder.mkdir(exist_ok=True)
    places = iter(range(1 << 20))

    def submit(call: Callable[[Any], Any], task: object, **options: object) -> object:
        return client.submit(Noted(call, folder, next(places), killed, n_received), task, **options)

    return SimpleNamespace(asynchronous=False, submit=submit, loop=client.loop, scheduler=client.scheduler)


def receiving(monkeypatch: pytest.MonkeyPatch, module: Any, folder: Path) -> None:
    """Leave a file in `folder` for each result that moves the progress bar of a module forward."""
    folder.mkdir(exist_ok=True)
    places = iter(range(1 << 20))

    def advance(_: object, nbytes: int) -> None:
        if nbytes:
            (folder / f"received-{next(places)}").touch()

    monkeypatch.setattr(module.Progress, "advance", advance)


def begun(folder: Path) -> dict[int, int]:
    """How often each task was begun."""
    places = [int(path.name.split("-")[1]) for path in folder.glob("task-*")]
    return {place: places.count(place) for place in sorted(set(places))}


def n_processes(folder: Path) -> int:
    """In how many processes tasks were begun."""
    return len({path.name.split("-")[3] for path in folder.glob("task-*")})


def die(_: object) -> None:
    """A task that no worker survives."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_: object) -> None:
    """A task whose worker cannot reach the place that it writes to."""
    from saev_store.errors import TransportError

    raise TransportError("no route to host", where="there")
