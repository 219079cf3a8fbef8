"""Google's multipart documents, as its reference shows them; that the requests are right is shown in test_uploads.py."""

from __future__ import annotations

import asyncio
import secrets
from urllib.parse import urlsplit

import pytest

from saev_store.errors import TransportError
from saev_store.transport import open_transport
from saev_store.transport._gcs_xml_uploads import GcsXmlService
from saev_store.transport._obstore_options import place_of
from saev_store.transport._obstore_uploads import gcsfs_options, s3fs_options
from saev_store.transport._parts import Part

HEAD = '<?xml version="1.0" encoding="UTF-8"?>'
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Bucket:
    """Stands for gcsfs and its client: pages of three parts and of two uploads."""

    _location = "https://storage.googleapis.com"
    safe_url = "gs://lab"

    def __init__(self, answer=None) -> None:
        self.answer, self.asked = answer, []

    def fs(self):
        return self

    def split_path(self, path):
        bucket, _, name = path.partition("/")
        return bucket, name, None

    def redact(self, text):
        return text.replace("hush", "***")

    def invalidate_cache(self, path=None) -> None:
        pass

    async def _call(self, method, path, *names, **query):
        assert urlsplit(path).path.count("{}") == len(names)
        self.asked.append((method, *names))
        headers = query.pop("headers")
        if self.answer is not None:
            return headers, self.answer
        return {}, (self.parts(query) if "uploadId" in query else self.uploads(query)).encode()

    def parts(self, query):
        first = int(query.get("part-number-marker", 0)) + 1
        numbers = [number for number in range(first, 8) if number < first + 3]
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><LastModified>2026-11-01T01:02:03.456Z</LastModified>"
            f"<ETag>&quot;{number:032x}&quot;</ETag><Size>{number + 100}</Size></Part>"
            for number in numbers
        )
        more = str(7 not in numbers).lower()
        return f"{HEAD}<ListPartsResult {NAMESPACE}><Bucket>lab</Bucket>{listed}<IsTruncated>{more}</IsTruncated></ListPartsResult>"

    def uploads(self, query):
        keys = [f"a/{number:02d}.bin" for number in range(5)]
        after = [key for key in keys if key > query.get("key-marker", "")]
        assert query.get("upload-id-marker", "") == (f"id-{query['key-marker']}" if "key-marker" in query else "")
        listed = "".join(
            f"<Upload><Key>{key}</Key><UploadId>id-{key}</UploadId><StorageClass>STANDARD</StorageClass></Upload>"
            for key in after[:2]
        )
        more = str(len(after) > 2).lower()
        return f"{HEAD}<ListMultipartUploadsResult {NAMESPACE}><IsTruncated>{more}</IsTruncated>{listed}</ListMultipartUploadsResult>"


def test_listings_of_several_pages():
    service = GcsXmlService(Bucket())
    parts = asyncio.run(service.parts("lab/a/00.bin", "id"))
    assert parts == [Part(number, number + 100, f"{number:032x}") for number in range(1, 8)]
    uploads = asyncio.run(service.unfinished("lab/a"))
    assert uploads == [(f"lab/a/{number:02d}.bin", f"id-a/{number:02d}.bin") for number in range(5)]


def test_an_error_is_one_whatever_its_status_was():
    error = f"{HEAD}<Error><Code>InternalError</Code><Message>We are sorry, hush.</Message></Error>".encode()
    for answer in (error, b"<html>", b"", b"\xff"):
        service = GcsXmlService(Bucket(answer))
        for work in (service.parts("lab/a", "id"), service.unfinished("lab/a"), service.start("lab/a", "t")):
            with pytest.raises(TransportError, match=r"InternalError: We are sorry, \*\*\*|no XML") as caught:
                asyncio.run(work)
            assert caught.value.transient
    with pytest.raises(TransportError, match="InternalError"):
        asyncio.run(GcsXmlService(Bucket(error)).finish("lab/a", "id", "t", [Part(1, 5, "e")]))
    asyncio.run(GcsXmlService(Bucket(b"")).finish("lab/a", "id", "t", [Part(1, 5, "e")]))


def test_an_upload_has_a_name():
    for text in (b"<InitiateMultipartUploadResult><UploadId></UploadId></InitiateMultipartUploadResult>", b"<html/>"):
        with pytest.raises(TransportError, match="without a name"):
            asyncio.run(GcsXmlService(Bucket(text)).start("lab/a", "t"))


def test_uploads_of_gcsfs_are_not_asked_for():
    """A shard that was begun with `engine="fsspec"` starts over, whatever Google says of such a name."""
    bucket = Bucket()
    assert asyncio.run(GcsXmlService(bucket).parts("lab/a", secrets.token_hex(8))) == []
    assert bucket.asked == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"token": "google_default"}),
        ({"token": "anon"}, {"token": "anon"}),
        ({"skip_signature": "true"}, {"token": "anon"}),
        ({"skip_signature": "false"}, {"token": "google_default"}),
        ({"service_account": "/k.json"}, {"token": "/k.json"}),
        ({"application_credentials": "/k.json", "project": "p"}, {"token": "/k.json"}),
        ({"service_account_key": '{"type": "service_account"}'}, {"token": {"type": "service_account"}}),
        ({"service_account_key": "no JSON"}, None),
        (
            {"bearer_token": "b", "base_url": "http://h:1/"},
            {
                "token": "anon",
                "session_kwargs": {"headers": {"Authorization": "Bearer b"}},
                "endpoint_url": "http://h:1",
            },
        ),
    ],
)
def test_options(options, expected):
    assert gcsfs_options(place_of("gs://lab/x", options)) == expected


def test_options_of_s3_that_are_text_or_have_no_equivalent():
    place = place_of("s3://lab", {"skip_signature": "false", "request_payer": "true", "region": "r"})
    assert s3fs_options(place) == {
        "anon": False,
        "requester_pays": True,
        "client_kwargs": {"region_name": "r"},
    }
    # s3fs would sum up the parts that it sends in another way than obstore those that it has sent.
    assert s3fs_options(place_of("s3://lab", {"checksum_algorithm": "SHA256"})) is None


@pytest.mark.parametrize(
    ("url", "options", "variable"),
    [
        ("gs://lab", {"bearer_token": "b"}, "GOOGLE_SKIP_SIGNATURE"),
        ("gs://lab", {"token": "anon"}, "GOOGLE_BASE_URL"),
        ("s3://lab", {"key": "k", "secret": "s"}, "AWS_ENDPOINT"),
    ],
)
def test_nobody_else_asks_where_a_variable_tells_obstore_alone(url, options, variable, monkeypatch):
    """It would be another account, or another service, than the one that obstore writes to."""
    pytest.importorskip("obstore")
    pytest.importorskip("gcsfs" if url.startswith("gs") else "s3fs")
    monkeypatch.delenv(variable, raising=False)
    assert open_transport(url, options, engine="obstore")._uploader() is not None
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert open_transport(url, options, engine="obstore")._uploader() is None
    said = {"GOOGLE_BASE_URL": "base_url", "AWS_ENDPOINT": "endpoint", "GOOGLE_SKIP_SIGNATURE": "skip_signature"}[
        variable
    ]
    assert open_transport(url, {**options, said: "http://127.0.0.1:9"}, engine="obstore")._uploader() is not None
