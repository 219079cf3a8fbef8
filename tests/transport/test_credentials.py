"""Which options travel in a pickle, and which texts are taken out of messages."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from saev_store.errors import AccessError
from saev_store.transport import credentials
from saev_store.transport.credentials import StorageOptions

#: Options with a secret in them, and the secret.
SECRET = {
    "by an unknown name": ({"key": "AKIDEXAMPLE"}, "AKIDEXAMPLE"),
    "user and password of an endpoint": ({"endpoint_url": "https://me:pass-word@host"}, "pass-word"),
    "user of an endpoint": ({"endpoint_url": "https://to-ken@host/x"}, "to-ken"),
    "query of an endpoint": ({"base_url": "https://host/x?sig=abcdef"}, "abcdef"),
    "one level deeper": ({"client_kwargs": {"aws_session_token": "deep-secret"}}, "deep-secret"),
    "an endpoint one level deeper": ({"client_kwargs": {"endpoint_url": "https://me:pass-word@host"}}, "pass-word"),
    "in a list": ({"headers": ["Bearer list-secret"]}, "list-secret"),
    "in a list by a harmless name's neighbour": ({"anon": True, "cookies": {"a": ["list-secret"]}}, "list-secret"),
    "a token that is no word": ({"token": "ya29.secret"}, "ya29.secret"),
}
HARMLESS = [
    {"anon": True, "endpoint_url": "http://localhost:9000"},
    {"token": "anon"},
    {"token": "google_default", "project": "p"},
    {"client_kwargs": {"region_name": "eu-west-3", "verify": "/etc/ssl/ca.pem"}},
    {"some_number": 3, "some_switch": False, "nothing": None},
]


@pytest.mark.parametrize("name", SECRET)
def test_secrets_do_not_travel_and_are_found_again_here(name: str):
    given, secret = SECRET[name]
    data = pickle.dumps(StorageOptions(given))
    assert secret.encode() not in data
    assert pickle.loads(data).all == given
    assert secret not in repr(StorageOptions(given))


@pytest.mark.parametrize("name", SECRET)
def test_elsewhere_secrets_are_missing_and_that_is_said(name: str):
    data = pickle.dumps(StorageOptions(SECRET[name][0]))
    script = f"import sys, pickle; sys.path[:0] = {sys.path!r}; pickle.loads({data!r}).all"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 1
    assert "AccessError: storage_options: credentials do not travel in a pickle" in done.stderr


@pytest.mark.parametrize("given", HARMLESS, ids=str)
def test_what_is_no_secret_travels(given: dict[str, object]):
    data = pickle.dumps(StorageOptions(given))
    script = f"import sys, pickle; sys.path[:0] = {sys.path!r}; print(pickle.loads({data!r}).all == {given!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_messages_are_without_secrets():
    options = StorageOptions({
        "key": "hush", "secret": "hush-hush", "anon": False, "region": "eu-west-3", "client_kwargs": {"a": ["deep-one"]},
    })  # fmt: skip
    text = options.redact("eu-west-3 refused hush-hush for hush, deep-one")
    assert text == "eu-west-3 refused *** for ***, ***"
    options = StorageOptions({"several": {"set-one"}, "pair": ("pair-one", ["pair-two", {"x": "pair-three"}])})
    inside = StorageOptions({"key": "zzzz", "secret": "a-zzzz-b"})
    assert inside.redact("a-zzzz-b, zzzz") == "***, ***"  # the longest first, wherever it has the other
    assert options.redact("set-one pair-one pair-two pair-three other") == "*** *** *** *** other"


@pytest.mark.parametrize("name", ["password", "secret", "key"])
def test_a_secret_that_is_a_word_of_tokens_is_one(name: str):
    options = StorageOptions({name: "cloud", "token": "cloud"})
    assert repr(options) == "StorageOptions(token)"
    assert pickle.dumps(options).count(b"cloud") == 1


def test_what_is_without_its_secrets_changes_no_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(credentials, "_KEPT", {})
    data = pickle.dumps(StorageOptions({"key": "hush-hush", "anon": False}))
    monkeypatch.setattr(credentials, "_KEPT", {})  # as in another process
    options = pickle.loads(data)
    assert options.redact("a message") == "a message"
    with pytest.raises(AccessError, match="this process does not have them"):
        _ = options.all


def test_texts_too_short_to_be_secrets_stay():
    assert StorageOptions({"key": "the"}).redact("the answer") == "the answer"
    assert StorageOptions({"key": "them"}).redact("them all") == "*** all"


@pytest.mark.parametrize("name", SECRET)
def test_a_process_that_is_started_here_passes_secrets_on_to_its_own(name: str, monkeypatch: pytest.MonkeyPatch):
    """Its first pickle holds them, which goes to the child and nowhere else; what the child pickles finds them there."""
    given, secret = SECRET[name]
    with monkeypatch.context() as patch:
        patch.setattr(credentials, "get_spawning_popen", object)
        data = pickle.dumps(StorageOptions(given))
    monkeypatch.setattr(credentials, "_KEPT", {})  # as in the child, which has just begun
    found = pickle.loads(data)
    assert found.all == given
    again = pickle.dumps(found)
    assert secret.encode() not in again
    assert pickle.loads(again).all == given
