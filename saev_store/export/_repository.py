"""Icechunk repositories as places: how an address names one, how one is created whole, and what Icechunk's errors are here."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING

from saev_store.errors import (
    ArgumentError,
    ForkError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
    brief,
)
from saev_store.export._references import url_parts
from saev_store.transport.checks import os_errors
from saev_store.transport.durable import ASIDE_PREFIX

if TYPE_CHECKING:
    import icechunk

#: The branch that exports are commits of.
BRANCH = "main"
#: The process that has used Icechunk for an export.
_used_in: int | None = None


def check_not_forked(where: str) -> None:
    """Refuse to use Icechunk in a child of a process that did: its threads are not there, so every call would hang.

    Raises:
        ForkError: this process was forked after an export.
    """
    global _used_in  # noqa: PLW0603  # Icechunk's threads are of the process, too
    if _used_in not in (None, os.getpid()):
        raise ForkError(
            "Icechunk was used before this process was forked, and does not work in it",
            where=where,
            remedy='Start workers with "spawn" or "forkserver".',
        )
    _used_in = os.getpid()


def check_icechunk_types(target: object, container: object) -> None:
    """Refuse what Icechunk would take for neither an address, nor a storage, nor a container.

    Raises:
        ArgumentError: `target` or `container` is something else.
    """
    import icechunk

    if isinstance(target, str):
        if not target or "\0" in target:
            raise ArgumentError(f"{target!r} is not an address: pass a path or a URL as str", where="target")
    elif not isinstance(target, icechunk.Storage):
        raise ArgumentError(f"{brief(target)} is neither an address nor an icechunk.Storage", where="target")
    if container is not None and not isinstance(container, icechunk.VirtualChunkContainer):
        raise ArgumentError(f"{brief(container)} is not an icechunk.VirtualChunkContainer", where="container")


def container_of(base: str) -> icechunk.VirtualChunkContainer:
    """A container that allows reading below the store's folder, with credentials of the environment.

    Raises:
        ArgumentError: Icechunk has no reader for its scheme.
    """
    import icechunk

    prefix, parts = f"{base}/", url_parts(base, where="base")
    match parts.scheme:
        case "file":
            return icechunk.VirtualChunkContainer(prefix, icechunk.local_filesystem_store(parts.path))
        case "s3":
            return icechunk.VirtualChunkContainer(prefix, icechunk.s3_store())
        case "gs" | "gcs":
            return icechunk.VirtualChunkContainer(prefix, icechunk.gcs_store())
        case "http" | "https":
            return icechunk.VirtualChunkContainer(prefix, icechunk.http_store())
        case _:
            raise ArgumentError(
                f"Icechunk has no reader for {base!r}",
                where="base",
                remedy="Pass a VirtualChunkContainer as `container`.",
            )


def storage_of(target: str) -> icechunk.Storage:
    """The storage of an address, with credentials of the environment.

    Raises:
        ArgumentError: Icechunk has none for its scheme.
    """
    import icechunk

    parts = url_parts(target, where="target")
    path = parts.path.strip("/")
    match parts.scheme:
        case "" | "file":
            return icechunk.local_filesystem_storage(target.removeprefix("file://"))
        case "s3":
            return icechunk.s3_storage(bucket=parts.netloc, prefix=path, from_env=True)
        case "gs" | "gcs":
            return icechunk.gcs_storage(bucket=parts.netloc, prefix=path, from_env=True)
        case _:
            raise ArgumentError(
                f"Icechunk cannot write to {target!r}", where="target", remedy="Pass an icechunk.Storage of your own."
            )


def create_whole(folder: str, config: icechunk.RepositoryConfig, where: str) -> None:
    """Create an empty repository on a disk: under another name first, for what is left of one cannot be created again.

    Args:
        folder: A path.
        config: Of the repository.
        where: The address that the caller gave.

    Raises:
        AccessError: it cannot be created.
        StoreExistsError: the folder contains something.
    """
    import icechunk

    parent, name = os.path.split(os.path.abspath(folder))
    aside = f"{parent}/{ASIDE_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    try:
        with os_errors(where, "write"):  # where that fails, Icechunk panics
            os.makedirs(parent, exist_ok=True)
            os.mkdir(aside)
        icechunk.Repository.create(icechunk.local_filesystem_storage(aside), config=config).save_config()
        os.rename(aside, f"{parent}/{name}")
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        raise taken(icechunk.local_filesystem_storage(f"{parent}/{name}"), where) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def taken(storage: icechunk.Storage, where: str) -> SaevStoreError:
    """The error for a folder that is not empty: another process has created the repository, or the files are something else."""
    import icechunk

    if icechunk.Repository.exists(storage):
        return WriterConflictError(
            "another process has created the repository meanwhile",
            where=where,
            remedy="Append to it, or name a new folder.",
        )
    return StoreExistsError(
        "the folder contains files that are no repository, perhaps of a creation that was interrupted",
        where=where,
        remedy="Name a new or empty folder.",
    )


@contextmanager
def our_errors(where: str) -> Generator[None]:
    """A block in which Icechunk's errors become ours."""
    import icechunk

    try:
        yield
    except SaevStoreError:
        raise
    except (icechunk.IcechunkError, OSError) as error:
        raise TransportError(
            f"Icechunk could not write: {_sentence(error)}", where=where, remedy="Remove the cause, and call again."
        ) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which is no `Exception`
            raise
        raise TransportError(
            f"Icechunk failed: {_sentence(error)}", where=where, remedy="Remove the cause, and call again."
        ) from error


def _sentence(error: BaseException) -> str:
    """What an error of Icechunk says, without the trace of calls."""
    text = str(error).strip().partition("\n")[0].removeprefix("x ")
    return re.sub(r"ICError \{ kind: (.*?), context: SpanTrace.*", r"\1", text)


def is_begun(repository: icechunk.Repository) -> bool:
    """Whether nothing was committed to a repository since it was created: an export was interrupted, or somebody made it for one."""
    import icechunk

    with suppress(icechunk.IcechunkError):  # it has no such branch
        return sum(1 for _ in islice(repository.ancestry(branch=BRANCH), 2)) == 1
    return False
