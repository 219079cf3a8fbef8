"""One of several processes does what all of them want done, in a place without locks.

Who does it keeps a small document there, and changes it every few seconds. Who finds that it has not changed in many looks
takes over. It only saves work: two that believe to be the one do no harm, for only one of them can publish.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from contextlib import suppress
from types import TracebackType

from saev_store.errors import SaevStoreError
from saev_store.transport import Transport
from saev_store.writer.folder import Folder

#: How often the document changes.
BEAT_S = 5.0
#: Looks that find it unchanged before somebody takes over, at least; everybody waits for up to as many again, by chance, so
#: that most often one does. Looks are counted, not seconds: a machine that stands still takes nothing from another.
PATIENCE = 60
_MAX_BYTES = 4096


class Lease:
    """A context that says whether this process is the one: True, or False to ask again a little later.

    Args:
        transport: The place.
        path: The document; it is removed when the context ends.

    Raises:
        ReadOnlyError: nothing can be written there.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self._folder, self._path = Folder(transport, ""), path
        self._patience = PATIENCE + secrets.randbelow(PATIENCE)
        self._attempt = secrets.token_hex(8)
        self._seen: bytes | None = None
        self._n_same = self._n_beats = 0
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> bool:
        found = self._look()
        if found is not None and not self._is_given_up(found):
            return False
        if found is not None:
            self._folder.put(self._path, self._document())
        elif self._folder.create(self._path, self._document()) == "taken":
            return False
        if not self._is_ours():  # somebody else was as quick, where creating is not atomic
            return False
        self._ended.clear()
        self._beating = threading.Thread(target=self._beat, name="saev-lease", daemon=True)
        self._beating.start()
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._beating is None:
            return
        self._ended.set()
        self._beating.join()
        self._beating = None
        with suppress(SaevStoreError):  # the others will find that it does not change any more
            if self._is_ours():
                self._folder.delete(self._path)

    def _is_given_up(self, found: bytes) -> bool:
        self._n_same = self._n_same + 1 if found == self._seen else 0
        self._seen = found
        return self._n_same >= self._patience

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(SaevStoreError):  # the next beat may arrive
                if not self._is_ours():
                    return
                self._folder.put(self._path, self._document())

    def _document(self) -> bytes:
        self._n_beats += 1
        who = {"attempt": self._attempt, "pid": os.getpid(), "host": socket.gethostname(), "beat": self._n_beats}
        return json.dumps(who).encode()

    def _look(self) -> bytes | None:
        return self._folder.read_or_none(self._path, max_bytes=_MAX_BYTES)

    def _is_ours(self) -> bool:
        return self._attempt.encode() in (self._look() or b"")
