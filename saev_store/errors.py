"""All exceptions and warnings of the package: one tree, stable kinds, picklable.

```text
SaevStoreError
├── NotFoundError          (FileNotFoundError)   there is no store, file or root
├── AccessError            (PermissionError)     it exists, but may not be read or written
├── DocumentError          (ValueError)          metadata.json / shards.json / labels.bin break a rule; carries all problems
│   └── UnknownProtocolError                     a protocol or dtype this version cannot read (a *breaking* change)
├── UnsafeContentError     (ValueError)          a name in a file that leaves the store's folder
├── LayerNotFoundError     (KeyError)            a layer label the store does not hold
├── TokenArrayNotFoundError (KeyError)           a token array the store does not have
├── SelectionError         (IndexError)          an index, slice, mask or option that does not fit the store
├── ArgumentError          (ValueError)          any other argument that breaks a rule
├── CorruptShardError      (OSError)             a shard is missing, short or differs from its digest
│   └── MissingShardError  (FileNotFoundError)   a shard's file does not exist
├── TransportError         (OSError)             bytes could not be read or written
│   └── DeadlineError      (TimeoutError)        not within the time allowed
├── StoreExistsError       (FileExistsError)     a complete store or object already exists
├── IncompleteStoreError   (RuntimeError)        a store that is not published
├── ResumeError            (ValueError)          this call cannot continue the unfinished store
├── WriterConflictError    (RuntimeError)        another writer holds or has published the store
├── ReadOnlyError          (PermissionError)     a write through a read-only transport
├── ForkError              (RuntimeError)        use in a forked child of a client that does not survive fork()
└── MissingDependencyError (ImportError)         an extra has to be installed first
```

Handlers may rely on `kind`: codes are append-only and never change their meaning.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Sequence
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, ClassVar

from saev_store.names import one_line, printable

if TYPE_CHECKING:
    from saev_store.problems import Problem


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80


def brief(value: object) -> str:
    """A value as text of bounded length, for messages.

    >>> brief("a" * 100)[:12], brief(10**5000)
    ("'aaaaaaaaaaa", 'an integer of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _BRIEF.repr(value)
    except ValueError:  # a list of integers too long to print
        return kind_of(value)


def kind_of(value: object) -> str:
    """The type of a value, with its article.

    >>> kind_of(3), kind_of([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name.startswith(tuple('aeioAEIO')) else 'a'} {name}"


def outside() -> int:
    """The `stacklevel` with which a warning points at the code that called this package, however deep the caller of this is in it."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
        frame, level = frame.f_back, level + 1
    return max(level, 1)


def counted(n: int, noun: str) -> str:
    """A number of things as text.

    >>> counted(1, "shard"), counted(2000, "shard")
    ('1 shard', '2,000 shards')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


class SaevStoreError(Exception):
    """The root of the tree of errors.

    Args:
        message: The value and the rule that it breaks.
        where: The file, URL or argument that has the value.
        remedy: What the caller can do.

    >>> print(NotFoundError("there is no metadata.json", where="/data/x", remedy="Open one of its sub-folders."))
    /data/x: there is no metadata.json. Open one of its sub-folders.
    """

    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.message = message
        self.where = where
        self.remedy = remedy
        super().__init__(message)

    def __str__(self) -> str:
        text = f"{one_line(self.where)}: {self.message}" if self.where else self.message
        if self.remedy:
            text = f"{text}{'' if text.endswith(('.', '!', '?', ':')) else '.'} {self.remedy}"
        return printable(text)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), dict(self.__dict__)))


def _shown_context(error: SaevStoreError) -> BaseException | None:
    return None if error.__suppress_context__ else _CONTEXT.__get__(error)


# `raise … from None` hides a client's error, which may quote a request with its credentials. Tools that pickle an error with its
# context (dask's workers) must not find it either.
_CONTEXT: GetSetDescriptorType = BaseException.__dict__["__context__"]
setattr(SaevStoreError, "__context__", property(_shown_context, _CONTEXT.__set__))  # noqa: B010  # a plain assignment is a type error


def _rebuild(cls: type[SaevStoreError], state: dict[str, object]) -> SaevStoreError:
    error = cls.__new__(cls)
    error.args = (state.get("message"),)  # those that are an OSError take none from `__new__`
    error.__dict__.update(state)
    return error


class NotFoundError(SaevStoreError, FileNotFoundError):
    """There is no store, file or root at the address."""

    kind = "not_found"


class AccessError(SaevStoreError, PermissionError):
    """The file system or the bucket refuses access."""

    kind = "access"


class _WithProblems(SaevStoreError):
    """An error with a list of problems."""

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        remedy: str | None = None,
        problems: Sequence[Problem] = (),
    ) -> None:
        super().__init__(message, where=where, remedy=remedy)
        self.problems = tuple(problems)


class DocumentError(_WithProblems, ValueError):
    """A document of a store breaks at least one rule; `problems` lists all of them."""

    kind = "document"


class UnknownProtocolError(DocumentError):
    """The store follows a major protocol version, or a dtype, that this package cannot read."""

    kind = "unknown_protocol"


class UnsafeContentError(SaevStoreError, ValueError):
    """A file names something outside the store's folder, or would execute code."""

    kind = "unsafe_content"


class LayerNotFoundError(SaevStoreError, KeyError):
    """A layer *label* is not in `layers`."""

    kind = "layer_not_found"


class TokenArrayNotFoundError(SaevStoreError, KeyError):
    """No token array of the store has this name."""

    kind = "token_array_not_found"


class SelectionError(SaevStoreError, IndexError):
    """An index is out of range, or a selection is not valid for this store."""

    kind = "selection"


class ArgumentError(SaevStoreError, ValueError):
    """An argument breaks a rule that its docstring states."""

    kind = "argument"


class CorruptShardError(_WithProblems, OSError):
    """A shard is missing, too short, or differs from what was written; `problems` lists all known damage."""

    kind = "corrupt_shard"


class MissingShardError(CorruptShardError, FileNotFoundError):
    """A shard's file is missing. Also a `FileNotFoundError`, which scripts for other loaders catch."""

    kind = "missing_shard"


class TransportError(SaevStoreError, OSError):
    """Bytes could not be read or written; `transient` if a retry may help."""

    kind = "transport"

    def __init__(
        self, message: str, *, where: str | None = None, remedy: str | None = None, transient: bool = False
    ) -> None:
        super().__init__(message, where=where, remedy=remedy)
        self.transient = transient


class DeadlineError(TransportError, TimeoutError):
    """An operation exceeded its time-out."""

    kind = "deadline"


class StoreExistsError(SaevStoreError, FileExistsError):
    """A complete store or file exists where a new one was to be created."""

    kind = "store_exists"


class IncompleteStoreError(SaevStoreError, RuntimeError):
    """The store is not published: its writer has not finished, or has crashed."""

    kind = "incomplete_store"


class ResumeError(SaevStoreError, ValueError):
    """The unfinished store cannot be continued by this call (other metadata or options)."""

    kind = "resume"


class WriterConflictError(SaevStoreError, RuntimeError):
    """Another writer holds this store, has taken it over, or has published it."""

    kind = "writer_conflict"


class ReadOnlyError(SaevStoreError, PermissionError):
    """A write through a read-only transport or view."""

    kind = "read_only"


class ForkError(SaevStoreError, RuntimeError):
    """A client that does not survive `fork()` was used in a forked child."""

    kind = "fork"


class MissingDependencyError(SaevStoreError, ImportError):
    """A feature needs an optional package that is not installed."""

    kind = "missing_dependency"


class SaevStoreWarning(UserWarning):
    """Something is unusual; all vectors are still right."""


class BreakingProtocolWarning(SaevStoreWarning):
    """The store follows a newer major version of the protocol (section 5)."""
