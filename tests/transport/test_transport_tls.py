"""Servers whose certificate a private authority signed: trusted in each of the ways that exist, refused at once without."""

from __future__ import annotations

import ssl

import pytest
from range_server import serving
from servers import Bucket, s3_bucket  # noqa: F401 (the second is a fixture)
from tls import Certificates, TlsFront, certificates, no_authorities  # noqa: F401 (two are fixtures)

from saev_store.errors import ArgumentError, TransportError
from saev_store.transport import open_transport
from saev_store.transport._tls import authorities, context_of, refused_certificate

pytestmark = pytest.mark.usefixtures("no_authorities")
engines = pytest.mark.parametrize("engine", ["obstore", "fsspec"])


@pytest.fixture
def front(s3_bucket: Bucket, certificates: Certificates):
    with TlsFront(s3_bucket.options["endpoint_url"], certificates) as found:
        yield found


def opened(bucket: Bucket, front: TlsFront, engine: str, **options: object):
    pytest.importorskip("obstore" if engine == "obstore" else "s3fs")
    options = {**bucket.options, "endpoint_url": front.url, "skip_instance_cache": True, **options}
    return open_transport(bucket.url, options, engine=engine)


@engines
@pytest.mark.parametrize("how", ["verify", "client_kwargs", "both", "AWS_CA_BUNDLE", "SSL_CERT_FILE", "verify=False"])
def test_a_private_authority_is_trusted_where_it_is_named(s3_bucket, front, certificates, engine, how, monkeypatch):
    options: dict[str, object] = {}
    if how == "verify":
        options = {"verify": certificates.authority}
    elif how == "client_kwargs":
        options = {"client_kwargs": {"verify": certificates.authority}}
    elif how == "both":  # ours counts
        options = {"verify": certificates.authority, "client_kwargs": {"verify": "/not/there.pem"}}
    elif how == "verify=False":
        options = {"verify": False}
    else:
        monkeypatch.setenv(how, certificates.authority)
    transport = opened(s3_bucket, front, engine, **options)
    transport.create("folder/a.bin", b"0123456789")
    assert bytes(transport.get_ranges("folder/a.bin", starts=[3], ends=[7])[0]) == b"3456"
    assert [entry.path for entry in transport.list("folder")] == ["folder/a.bin"]
    transport.delete("folder/a.bin")


@engines
def test_an_unknown_authority_is_an_error_at_once(s3_bucket, front, engine):
    """It names the server, the reason and the remedy, and the server is not asked again and again."""
    transport = opened(s3_bucket, front, engine)
    for call in (
        lambda: transport.read("metadata.json"),
        lambda: transport.get_ranges("a.bin", starts=[0], ends=[1]),
        lambda: transport.create("metadata.json", b"{}"),
    ):
        before = front.n_accepted
        with pytest.raises(TransportError) as caught:
            call()
        assert not caught.value.transient
        said = str(caught.value)
        assert f"certificate of {front.url.removeprefix('https://')} is not trusted: " in said
        assert "UnknownIssuer" in said or "unable to get local issuer certificate" in said
        assert '"verify": "/path/to/ca.pem"' in said
        assert front.n_accepted - before <= 6  # with six retries, they would be more


@engines
def test_a_certificate_for_another_name_is_refused(s3_bucket, certificates, engine):
    # 127.0.0.2 reaches the same machine, but the certificate does not name it.
    with TlsFront(s3_bucket.options["endpoint_url"], certificates, host="127.0.0.2") as other:
        transport = opened(s3_bucket, other, engine, verify=certificates.authority)
        with pytest.raises(
            TransportError, match=r"127\.0\.0\.2:\d+ is not trusted: (NotValidForName|IP address mismatch)"
        ):
            transport.read("metadata.json")


@engines
def test_a_web_server(tmp_path, certificates, engine):
    pytest.importorskip("obstore" if engine == "obstore" else "aiohttp")
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, _), TlsFront(url, certificates) as front:
        with pytest.raises(TransportError, match="is not trusted"):
            open_transport(f"{front.url}/{tmp_path.name}", {"skip_instance_cache": True}, engine=engine).read("a.bin")
        transport = open_transport(f"{front.url}/{tmp_path.name}", {"verify": certificates.authority}, engine=engine)
        assert bytes(transport.get_ranges("a.bin", starts=[3], ends=[7])[0]) == b"3456"


@engines
@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_file_of_authorities_that_is_none(s3_bucket, front, engine, tmp_path, content):
    path = tmp_path / "authorities.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"authorities\.pem: (No such file|it holds no certificate)"):
        opened(s3_bucket, front, engine, verify=str(path)).read("metadata.json")
    with pytest.raises(ArgumentError, match="verify is an int"):
        opened(s3_bucket, front, engine, verify=3)


@pytest.mark.parametrize("scheme", ["s3", "s3a", "https", "http", "gs"])
def test_which_variables_name_authorities(scheme, monkeypatch):
    """That of AWS before the general one, for addresses of S3 only; an empty one names none."""
    for aws, general, of_aws, of_others in (
        ("", "", True, True),
        ("/a", "", "/a", True),
        ("", "/b", "/b", "/b"),
        ("/a", "/b", "/a", "/b"),
    ):
        monkeypatch.setenv("AWS_CA_BUNDLE", aws)
        monkeypatch.setenv("SSL_CERT_FILE", general)
        assert authorities(scheme, None) == (of_aws if scheme.startswith("s3") else of_others)
        assert authorities(scheme, verify=False) is False


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("error: InvalidCertificate(UnknownIssuer)", "UnknownIssuer"),
        ("invalid peer certificate: UnknownIssuer", "UnknownIssuer"),
        ("[SSL] certificate verify failed: self-signed certificate (_ssl.c:1)", "self-signed certificate"),
        ("connection refused", None),
    ],
)
def test_a_refused_certificate_is_told_without_secrets(text, reason):
    for endpoint, server in (
        ("https://me:pass-word@host:9000/x", "host:9000"),
        ("https://host/x?sig=pass-word", "host"),
        ("s3://bucket/x", "bucket"),
        ("", "the server"),
    ):
        found = refused_certificate(text, where="w", endpoint=endpoint)
        if reason is None:
            assert found is None
            continue
        assert found.message == f"the certificate of {server} is not trusted: {reason}"
        assert "pass-word" not in str(found)
        assert (found.where, found.transient) == ("w", False)
        assert "verify" in str(found.remedy) and "SSL_CERT_FILE" in str(found.remedy)


def test_nothing_is_checked_only_where_that_was_asked_for():
    for authority, mode, checks in ((True, ssl.CERT_REQUIRED, True), (False, ssl.CERT_NONE, False)):
        context = context_of(authority)
        assert (context.verify_mode, context.check_hostname) == (mode, checks)
        assert context_of(authority) is context
