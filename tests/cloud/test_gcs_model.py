"""Publishing on Google Cloud Storage: every interleaving that is tried has one winner, whatever answers are lost."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
from cloud_servers import gcs_json_bucket, gcs_xml_bucket  # noqa: F401 (fixtures)
from gcs_model import Answer, GcsModel, GcsModelTransport
from kill_harness_disk import all_at_once, in_turn
from kill_harness_oracle import case
from waiting import HANG_S

from saev_store.errors import (
    IncompleteStoreError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.transport import open_transport
from saev_store.writer import create_store, finalize_store

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow"}
TOLD = (WriterConflictError, StoreExistsError, IncompleteStoreError)


def test_what_preconditions_do():
    model = GcsModel()
    first = model.insert("a", b"1", if_generation_match=0)
    assert first.status == 200
    assert model.insert("a", b"2", if_generation_match=0) == Answer(412)
    assert model.get("a").content == b"1"
    second = model.insert("a", b"2", if_generation_match=first.generation)
    assert second.generation > first.generation
    assert model.get("a", generation=first.generation) == Answer(404)
    assert model.get("a", if_generation_match=first.generation) == Answer(412)
    assert model.delete("a", if_generation_match=first.generation) == Answer(412)
    assert model.delete("a", if_generation_match=second.generation) == Answer(204)
    assert model.delete("a") == Answer(404)
    third = model.insert("a", b"3", if_generation_match=0)  # nothing is live, so 0 holds again
    assert third.generation > second.generation
    assert model.compose("c", ["a"] * 33) == Answer(400)
    assert model.compose("c", ["a", "b"]) == Answer(404)
    assert model.compose("c", ["a", "a"], if_generation_match=0).status == 200
    assert model.get("c").content == b"33"
    assert model.compose("c", ["a"], if_generation_match=0) == Answer(412)


@pytest.mark.parametrize("fixture", ["gcs_json_bucket", "gcs_xml_bucket"])
def test_the_stand_ins_agree_about_creation(request, fixture):
    """What a server here can show: the requests that our clients send carry the precondition, and 412 means 'exists'."""
    bucket = request.getfixturevalue(fixture)
    real = open_transport(bucket.url, bucket.options, engine="fsspec" if "json" in fixture else "obstore")
    for transport in (real, GcsModelTransport(GcsModel())):
        transport.create("a.json", b"1")
        with pytest.raises(StoreExistsError):
            transport.create("a.json", b"2")
        assert transport.read("a.json") == b"1"
        transport.put("a.json", b"3")
        assert transport.read("a.json") == b"3"
        transport.delete("a.json")
        transport.create("a.json", b"4")
        assert transport.read("a.json") == b"4"


def one_by_one(seed):
    """In place of `saev_store._runtime.threads.share`: independent requests in this thread, in an order that a seed decides."""
    order = random.Random(seed)

    def share(work, parts, _n):
        for part in order.sample(list(parts), len(parts)):
            work(part)

    return share


class Turns:
    """Threads that take turns, one request at a time, in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._alive: set[int] = set()
        self._turn: int | None = None

    def step(self, _doing: str) -> None:
        me = threading.get_ident()
        with self._changed:
            if me not in self._alive:
                return
            self._next()
            assert self._changed.wait_for(lambda: self._turn == me, timeout=HANG_S)

    def _next(self) -> None:
        self._turn = self._random.choice(sorted(self._alive)) if self._alive else None
        self._changed.notify_all()

    def run(self, works):
        outcomes, ready = [None] * len(works), threading.Barrier(len(works) + 1)

        def one(i, work):
            with self._changed:
                self._alive.add(threading.get_ident())
            ready.wait()
            try:
                outcomes[i] = work()
            except SaevStoreError as error:
                outcomes[i] = error
            finally:
                with self._changed:
                    self._alive.discard(threading.get_ident())
                    self._next()

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(works)]
        for thread in threads:
            thread.start()
        ready.wait()
        for thread in threads:
            thread.join(HANG_S)
        assert not any(thread.is_alive() for thread in threads)
        return outcomes


def write(transport, this):
    with create_store(transport, this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, this.n)
    return True


def check_store(model, this):
    model.step, model.lose = lambda _: None, lambda _: False
    base = f"{this.name}/"
    this.check(
        {name.removeprefix(base): content for name, (_, content) in model.objects.items() if name.startswith(base)}
    )


@pytest.mark.parametrize("seed", range(150))
def test_publishers_that_race_have_one_winner(seed, monkeypatch):
    monkeypatch.setattr("saev_store.writer.folder.ahead", all_at_once if seed % 4 < 2 else in_turn)
    monkeypatch.setattr("saev_store.writer.folder.share", one_by_one(seed))
    this = case(n=4, per_shard=2, pad=False, labelled=bool(seed % 2))
    turns, model = Turns(seed), GcsModel()
    transport = GcsModelTransport(model)
    for rank in range(2):
        with create_store(transport, this.metadata, part=(rank, 2), **OPTIONS) as writer:
            this.append(writer, *writer.example_range)
    model.step = turns.step
    outcomes = turns.run(
        [partial(finalize_store, GcsModelTransport(model), this.metadata) for _ in range(2 + seed % 2)]
    )
    assert outcomes.count(True) == 1, outcomes
    assert all(outcome in (True, False) or isinstance(outcome, TOLD) for outcome in outcomes), outcomes
    check_store(model, this)


@pytest.mark.parametrize("seed", range(100))
def test_lost_answers_never_make_two_winners(seed):
    """Then no writer may know that it has won, but there are never two winners, and what opens is whole."""
    this, rng = case(n=4, per_shard=2, pad=False), random.Random(seed)
    turns, model = Turns(seed), GcsModel()
    transport = GcsModelTransport(model)
    for rank in range(2):
        with create_store(transport, this.metadata, part=(rank, 2), **OPTIONS) as writer:
            this.append(writer, *writer.example_range)
    model.step, model.lose = turns.step, lambda doing: doing.startswith(("create", "put")) and rng.random() < 0.3
    outcomes = turns.run([partial(finalize_store, GcsModelTransport(model), this.metadata) for _ in range(2)])
    assert outcomes.count(True) <= 1, outcomes
    assert all(outcome in (True, False) or isinstance(outcome, (*TOLD, TransportError)) for outcome in outcomes)
    model.step, model.lose = lambda _: None, lambda _: False
    if f"{this.name}/metadata.json" not in model.objects:
        finalize_store(transport, this.metadata, takeover=True)
    check_store(model, this)


@pytest.mark.parametrize("seed", range(100))
def test_writers_that_race_have_one_winner(seed):
    """Each holds all of the store: one is told before it has written anything."""
    this = case(n=3, per_shard=3, pad=False)
    model = GcsModel()
    # The writer's own thread sends requests too: they are taken as they come.
    lock, rng = threading.Lock(), random.Random(seed)

    def step(_):
        with lock:
            pause = rng.random() * 0.0005
        threading.Event().wait(pause)

    model.step = step
    works = [partial(write, GcsModelTransport(model), this) for _ in range(2)]
    outcomes = Turns(seed).run(works)
    assert outcomes.count(True) == 1, outcomes
    assert all(outcome is True or isinstance(outcome, TOLD) for outcome in outcomes), outcomes
    check_store(model, this)


@pytest.mark.parametrize("seed", range(120))
def test_publishers_that_take_over_have_one_winner(seed, monkeypatch):
    """A writer that was taken over changes nothing that is not its own; if it has published at the last moment, it learns so."""
    monkeypatch.setattr("saev_store.writer.folder.ahead", all_at_once if seed % 4 < 2 else in_turn)
    monkeypatch.setattr("saev_store.writer.folder.share", one_by_one(seed))
    this = case(n=4, per_shard=2, pad=False)
    turns, model = Turns(seed), GcsModel()
    transport = GcsModelTransport(model)
    for rank in range(2):
        with create_store(transport, this.metadata, part=(rank, 2), **OPTIONS) as writer:
            this.append(writer, *writer.example_range)
    rng = random.Random(seed)
    loses = seed >= 60
    model.step, model.lose = turns.step, lambda doing: loses and doing.startswith("create") and rng.random() < 0.3
    works = [
        partial(finalize_store, GcsModelTransport(model), this.metadata, takeover=True) for _ in range(2 + seed % 2)
    ]
    outcomes = turns.run(works)
    # Where answers are lost, a second writer that takes over cannot know whose the equal bytes are.
    assert outcomes.count(True) == 1 or (loses and not any(outcome is True for outcome in outcomes)), outcomes
    assert all(outcome in (True, False) or isinstance(outcome, TOLD) for outcome in outcomes), outcomes
    for name in [name for name in model.objects if "/.saev_store/" in name]:
        del model.objects[name]  # a writer that was overtaken may leave its own hidden document, which is not read
    check_store(model, this)
