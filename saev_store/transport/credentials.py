"""Storage options that hold credentials: kept out of messages and out of pickles.

A pickle may end in a file, in a log or with a scheduler. So a pickle does not contain them: a copy in this process (or in
a forked child) finds them again, and a child that is being spawned gets them through the pipe that starts it. Anywhere
else, credentials come from the environment, a profile or the machine's role.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import cast

from saev_store.errors import AccessError

_HARMLESS = {
    "anon", "endpoint_url", "region", "region_name", "use_ssl", "requester_pays", "use_listings_cache", "project",
    "default_cache_type", "default_fill_cache", "default_block_size", "max_concurrency", "version_aware",
    "skip_signature", "endpoint", "base_url", "cache_storage", "target_protocol", "max_pool_connections", "verify",
}  # fmt: skip
#: Values of `token` that say where gcsfs looks for credentials.
_WORDS = {"anon", "browser", "cache", "cloud", "google_default"}
_KEPT: dict[str, Mapping[str, object]] = {}


class StorageOptions:
    """A file system's options, of which only what cannot be a secret travels in a pickle.

    >>> import pickle
    >>> options = StorageOptions({"key": "AKID", "secret": "hush-hush", "endpoint_url": "http://localhost"})
    >>> data = pickle.dumps(options)
    >>> b"hush-hush" in data, pickle.loads(data).all["secret"]
    (False, 'hush-hush')
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._all: Mapping[str, object] | None = dict(options)
        self._harmless: Mapping[str, object] = _without_secrets(self._all)
        self._name = ""
        if self._harmless != self._all:
            self._name = uuid.uuid4().hex
            _KEPT[self._name] = self._all

    @property
    def all(self) -> Mapping[str, object]:
        """Everything that was given.

        Raises:
            AccessError: this was unpickled in a process that does not have the rest.
        """
        if self._all is None:
            self._all = _KEPT.get(self._name)
        if self._all is None:
            raise AccessError(
                "credentials do not travel in a pickle, and this process does not have them",
                where="storage_options",
                remedy="Open the address here with its storage_options, or give every process credentials through its "
                "environment and pass none.",
            )
        return self._all

    def __reduce__(self) -> tuple[object, ...]:
        spawning = get_spawning_popen() is not None  # the pickle goes to the child, and nowhere else
        return _restore, (self._name, self._harmless, self.all if spawning and self._name else None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._harmless)})"

    def redact(self, text: str) -> str:
        """`text` without the values of these options that may be secrets."""
        hidden = {name: value for name, value in (self._all or {}).items() if name not in self._harmless}
        for secret in sorted(_strings(hidden), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def _restore(name: str, harmless: Mapping[str, object], everything: Mapping[str, object] | None) -> StorageOptions:
    if everything is not None:
        _KEPT[name] = everything
    options = StorageOptions({})
    options.__dict__.update(_name=name, _harmless=harmless, _all=None if name else harmless)
    return options


def _without_secrets(options: Mapping[str, object]) -> Mapping[str, object]:
    harmless: dict[str, object] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            inner = _without_secrets(cast("Mapping[str, object]", value))
            if inner == value:
                harmless[name] = value
        elif (
            isinstance(value, (bool, int, float, type(None)))
            or (name in _HARMLESS and not (isinstance(value, str) and re.search(r"://[^/]*@|[?]", value)))
            or (name == "token" and isinstance(value, str) and value in _WORDS)
        ):
            harmless[name] = value
    return harmless


def _strings(value: object) -> set[str]:
    """All texts in nested options that are long enough to be secrets and are not addresses."""
    if isinstance(value, str):
        return {value} if len(value) >= 4 and "://" not in value else set()
    found: set[str] = set()
    if isinstance(value, Mapping):
        for item in cast("Mapping[object, object]", value).values():
            found |= _strings(item)
    elif isinstance(value, (list, tuple, set)):
        for item in cast("list[object]", value):
            found |= _strings(item)
    return found
