"""Which `Host` headers servers on this machine answer: numeric addresses, localhost and names that are given, whatever the port."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saev_store.serve.hosts import is_known_host


@pytest.mark.parametrize(
    ("header", "names", "is_known"),
    [
        ("127.0.0.1", (), True), ("127.0.0.1:80", (), True), ("10.1.2.3:8000", (), True), ("[::1]:80", (), True), ("[fe80::1]", (), True),
        ("localhost", (), True), ("LocalHost:80", (), True), ("localhost:", (), True), ("localhost.evil.example", (), False),
        ("gpu1", (), False), ("gpu1", ("gpu1",), True), ("GPU1:80", ("gpu1",), True), ("gpu12", ("gpu1",), False),
        ("evil.example", ("*",), True), ("evil.example:80", ("gpu1", "*"), True), ("", (), False), (":80", (), False),
        ("127.0.0.1.evil.example", (), False), ("127.0.0.1:evil", (), False), ("[::1]x", (), False), ("::1", (), False),
        ("[gpu1]", (), False), ("127.1", (), False), ("0x7f000001", (), False), ("127.0.0.1 ", (), False), ("a@127.0.0.1", (), False),
    ],
)  # fmt: skip
def test_hosts(header: str, names: tuple[str, ...], is_known: bool) -> None:
    assert is_known_host(header, names) is is_known
