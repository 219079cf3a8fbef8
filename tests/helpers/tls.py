"""A TLS server with a private certificate authority: what MinIO or Ceph in a laboratory's own network looks like."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import pytest


class Certificates(NamedTuple):
    """Files in PEM format: the authority's certificate, and the server's certificate and key."""

    authority: str
    server: str
    key: str


def make_certificates(folder: Path) -> Certificates:
    """A new authority, and a certificate that it signed for localhost."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def certificate(name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("laboratory"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=2))
        )

    root, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    authority = (
        certificate("laboratory", root)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(root.public_key()), critical=False)
        .add_extension(usage, critical=True)
        .sign(root, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    server = (
        certificate("localhost", key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(root, hashes.SHA256())
    )
    files = Certificates(*(str(folder / name) for name in ("authority.pem", "server.pem", "key.pem")))
    pem = serialization.Encoding.PEM
    Path(files.authority).write_bytes(authority.public_bytes(pem))
    Path(files.server).write_bytes(server.public_bytes(pem))
    Path(files.key).write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return files


class TlsFront:
    """Accepts TLS on a free port and passes the bytes on to a server without TLS; use it in a `with` block."""

    def __init__(self, upstream: str, certificates: Certificates, host: str = "localhost") -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.server, certificates.key)
        self._listener = socket.create_server((host, 0), backlog=128)
        self.url = f"https://{host}:{self._listener.getsockname()[1]}"
        self.n_accepted = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # `close` alone does not wake a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.n_accepted += 1
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            client = self._context.wrap_socket(plain, server_side=True)
        except OSError:  # the client refused the certificate
            plain.close()
            return
        with client, socket.create_connection(self._upstream) as server:
            # One side speaks at a time, so what the server says is passed on in a thread of its own.
            threading.Thread(target=_pass_on, args=(server, client), daemon=True).start()
            _pass_on(client, server)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no certificate authorities."""
    for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
