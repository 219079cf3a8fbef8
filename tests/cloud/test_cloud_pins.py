"""Objects that are replaced while they are read, through every client; and credentials, which no message shows."""

from __future__ import annotations

import copy
import logging
import pickle
import traceback

import numpy as np
import pytest
from cloud_servers import PLACES, Fault, Proxy, gcs_json_bucket, gcs_xml_bucket, speak_gcs, swift_bucket  # noqa: F401 (fixtures)
from dense_stores import plain_store
from retries import few_tries  # noqa: F401 (a fixture)
from servers import Bucket, s3_bucket, s3_endpoint  # noqa: F401 (one is a fixture)

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import CorruptShardError, SaevStoreError, TransportError
from saev_store.transport import open_transport
from saev_store.transport.obstore import _transport

pytest.importorskip("obstore")

OLD, NEW = (np.random.default_rng(seed).bytes(20_000) for seed in (0, 1))
LAYOUT = Layout(
    n_examples=8, layers=(3, 7), content_tokens_per_example=4, cls_token=True, d_model=16, examples_per_shard=4
)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[Bucket, str]:
    fixture, engine = PLACES[request.param]
    return request.getfixturevalue(fixture), engine


def test_a_replaced_object_is_an_error_and_never_a_mixture(place: tuple[Bucket, str]):
    bucket, engine = place
    writer, reader = (open_transport(f"{bucket.url}/x", bucket.options, engine=engine) for _ in range(2))
    writer.put("acts.bin", OLD)
    assert bytes(reader.get_ranges("acts.bin", starts=[0], ends=[100])[0]) == OLD[:100]
    writer.put("acts.bin", NEW)
    with pytest.raises(TransportError, match="replaced while it was being read"):
        reader.get_ranges("acts.bin", starts=[0, 5000], ends=[100, 6000])
    memory = bytearray(100)
    with pytest.raises(TransportError, match="replaced while it was being read"):
        reader.readinto("acts.bin", starts=[100], buffers=[memoryview(memory)])
    # A copy in another process reads the same object or none.
    travelled = pickle.loads(pickle.dumps(reader))
    with pytest.raises(TransportError, match="replaced while it was being read"):
        travelled.get_ranges("acts.bin", starts=[0], ends=[100])
    with pytest.raises(TransportError, match="replaced while it was being read"):
        reader.at("").get_ranges("acts.bin", starts=[0], ends=[100])
    reader.close()
    assert bytes(reader.get_ranges("acts.bin", starts=[0], ends=[100])[0]) == NEW[:100]
    writer.put("acts.bin", OLD[:150])
    with pytest.raises((TransportError, CorruptShardError)):
        reader.get_ranges("acts.bin", starts=[0], ends=[100])


def test_what_we_change_ourselves_is_no_surprise(place: tuple[Bucket, str]):
    bucket, engine = place
    transport = open_transport(f"{bucket.url}/x", bucket.options, engine=engine)
    for data in (OLD, NEW):
        transport.put("acts.bin", data)
        assert bytes(transport.get_ranges("acts.bin", starts=[10], ends=[100])[0]) == data[10:100]
    transport.delete("acts.bin")
    transport.create("acts.bin", OLD)
    assert bytes(transport.get_ranges("acts.bin", starts=[10], ends=[100])[0]) == OLD[10:100]
    sink = transport.open_sink("acts.bin", used_nbytes=len(NEW), file_nbytes=len(NEW), resume=True)
    sink.write(0, [memoryview(NEW)])
    sink.commit()
    assert bytes(transport.get_ranges("acts.bin", starts=[10], ends=[100])[0]) == NEW[10:100]


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_what_the_service_copies_for_us_is_no_surprise(s3_bucket: Bucket, engine: str):
    source, target = (
        open_transport(f"{s3_bucket.url}/{name}", s3_bucket.options, engine=engine) for name in ("from", "to")
    )
    for data in (OLD, NEW):
        source.put("acts.bin", data)
        assert target.copy_within(source, "acts.bin", "acts.bin")
        assert bytes(target.get_ranges("acts.bin", starts=[10], ends=[100])[0]) == data[10:100]


@pytest.mark.parametrize(("engine", "asks"), [("obstore", "call"), ("fsspec", "ask")])
def test_a_copy_counts_as_a_request_and_has_time_for_its_size(
    s3_bucket: Bucket, engine: str, asks: str, monkeypatch: pytest.MonkeyPatch
):
    source, target = (
        open_transport(f"{s3_bucket.url}/{name}", s3_bucket.options, engine=engine) for name in ("long", "copied")
    )
    source.put("acts.bin", OLD)
    sizes, real = [], getattr(target.client, asks)

    def spied(*arguments: object, nbytes: int = 0) -> object:
        sizes.append(nbytes)
        return real(*arguments, nbytes=nbytes)

    monkeypatch.setattr(target.client, asks, spied)
    before = target.counters.operations.get("copy_within", 0)
    assert target.copy_within(source, "acts.bin", "acts.bin")
    assert target.counters.operations["copy_within"] == before + 1
    assert sizes == [len(OLD) // 16]


def test_large_objects_are_sent_in_parts_and_copied_by_this_machine(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    """Exactly as long as a service takes in one request is not too long."""
    import obstore

    source, target = (
        open_transport(f"{s3_bucket.url}/{name}", s3_bucket.options, engine="obstore") for name in ("large", "sent")
    )
    in_parts, put = [], obstore.put_async

    async def spied(*arguments: object, use_multipart: bool, **options: object) -> object:
        in_parts.append(use_multipart)
        return await put(*arguments, use_multipart=use_multipart, **options)

    monkeypatch.setattr(obstore, "put_async", spied)
    for most in (len(OLD), len(OLD) - 1):
        monkeypatch.setattr(_transport, "_MOST_PUT_AT_ONCE", most)
        source.put("acts.bin", OLD)
        assert source.read("acts.bin") == OLD
    assert in_parts == [False, True]
    for most in (len(OLD), len(OLD) - 1):
        monkeypatch.setattr(_transport, "_MOST_COPIED_AT_ONCE", most)
        assert target.copy_within(source, "acts.bin", "acts.bin") is (most == len(OLD))


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_shard_of_an_open_store_is_replaced(s3_bucket: Bucket, engine: str):
    stored = plain_store(LAYOUT, tail="cut")
    writer = open_transport(f"{s3_bucket.url}/{stored.name}", s3_bucket.options, engine=engine)
    for name, data in stored.files.items():
        writer.put(name, data)
    store = ShardStore.open(f"{s3_bucket.url}/{stored.name}", s3_bucket.options, engine=engine)
    assert store[0].tobytes() == stored.dense[0].tobytes()
    writer.put("acts000000.bin", stored.files["acts000001.bin"])
    with pytest.raises(TransportError, match=r"acts000000\.bin.*replaced"):
        store[1:3]
    for batch in ([0, 5], [3]):
        with pytest.raises(TransportError, match=r"acts000000\.bin.*replaced"):
            store.sel(layer=7).rows(np.array(batch) * 5)
    assert store[5].tobytes() == stored.dense[5].tobytes()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_file_behind_a_web_server_is_replaced(s3_bucket: Bucket, engine: str):
    pytest.importorskip("aiohttp")
    writer = open_transport(s3_bucket.url, s3_bucket.options, engine="fsspec")
    writer.put("x/acts.bin", OLD)
    with Proxy(s3_endpoint(), change=speak_gcs) as proxy:  # which signs
        transport = open_transport(f"{proxy.url}/{s3_bucket.url.removeprefix('s3://')}/x", engine=engine)
        assert bytes(transport.get_ranges("acts.bin", starts=[7], ends=[10])[0]) == OLD[7:10]
        writer.put("x/acts.bin", NEW)
        with pytest.raises(TransportError, match="replaced while it was being read"):
            transport.get_ranges("acts.bin", starts=[0, 11], ends=[10, 20])


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_answer_of_another_range_is_refused(s3_bucket: Bucket, engine: str):
    open_transport(s3_bucket.url, s3_bucket.options, engine=engine).put("acts.bin", OLD)
    with Proxy(s3_endpoint(), [Fault(method="GET", shift_range=7, times=-1)]) as proxy:
        options = {**s3_bucket.options, "endpoint_url": proxy.url}
        transport = open_transport(s3_bucket.url, options, engine=engine)
        with pytest.raises(TransportError):
            transport.get_ranges("acts.bin", starts=[100], ends=[200])


SECRETS = ("AKIDHUSHHUSH", "very/secret+key=hush", "session.token.hush")


def told(error: BaseException | None) -> str:
    """Everything that a person or a log could see of an error."""
    return "".join(traceback.format_exception(error)) + repr(error) + str(vars(error))


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=403, code="SignatureDoesNotMatch", echo=True, times=-1),
        Fault(status=400, code="ExpiredToken", echo=True, times=-1),
        Fault(status=500, echo=True, times=-1),
        Fault(status=301, code="PermanentRedirect", echo=True, times=-1),
        Fault(status=404, code="NoSuchKey", echo=True, times=-1),
        Fault(reset_at=3, times=-1),
        Fault(garbage=True, times=-1),
    ],
    ids=lambda fault: f"{fault.status or 'broken'}-{fault.code}",
)
def test_no_message_shows_credentials(s3_bucket: Bucket, engine: str, fault: Fault, caplog, capfd, few_tries):
    """Not even where a server or a proxy repeats in its answer what it was sent."""
    open_transport(s3_bucket.url, s3_bucket.options, engine="obstore").put("x.bin", OLD)
    caplog.set_level(logging.DEBUG, logger="saev_store")
    key, secret, token = SECRETS
    with Proxy(s3_endpoint(), [copy.copy(fault)]) as proxy:
        options = {"key": key, "secret": secret, "token": token, "endpoint_url": proxy.url}
        if engine == "obstore":
            from saev_store.transport.obstore._transport import ObstoreTransport

            transport = ObstoreTransport(s3_bucket.url, options, timeout_s=1)
        else:
            from saev_store.transport.fsspec._transport import FsspecTransport

            transport = FsspecTransport(s3_bucket.url, {**options, "skip_instance_cache": True}, timeout_s=1)
        seen = [repr(transport), str(transport), transport.url, transport.name, str(transport.counters)]
        for call in (
            lambda: transport.read("x.bin"),
            lambda: transport.size("x.bin"),
            lambda: transport.get_ranges("x.bin", starts=[0], ends=[10]),
            lambda: transport.list(""),
            lambda: transport.put("y.bin", b"1"),
            lambda: transport.create("z.bin", b"1"),
        ):
            try:
                call()
            except SaevStoreError as error:
                seen.append(told(error))
                seen.append(repr(pickle.dumps(error)))
        assert len(seen) > 5 + 2  # several calls failed
        seen.append(repr(pickle.dumps(transport)))
    seen += [caplog.text, *capfd.readouterr()]
    for secret in SECRETS[1:]:
        assert not [text for text in seen if secret in text]


def test_what_an_error_hides_is_hidden_from_picklers_too():
    """Tools that pickle an error with its context, as dask's workers do, find none where `raise … from None` hid it."""
    with pytest.raises(SaevStoreError) as hidden:
        try:
            raise OSError("token=hush")
        except OSError:
            raise TransportError("could not read", where="x") from None
    assert hidden.value.__context__ is None
    with pytest.raises(SaevStoreError) as shown:
        try:
            raise OSError("plain")
        except OSError as error:
            raise TransportError("could not read", where="x") from error
    assert isinstance(shown.value.__cause__, OSError)
    try:
        raise OSError("first")
    except OSError as first:
        try:
            raise TransportError("while handling it")  # what is tested
        except TransportError as second:
            assert second.__context__ is first
