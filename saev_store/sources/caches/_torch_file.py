"""Integers in files that `torch.save` has written."""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from typing import cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.sources.address import full_url
from saev_store.transport import Transport

#: What torch adds to the numbers of a tensor in a file.
_TORCH_BYTES = 64 << 10
#: What the pickle of a tensor names. torch's unpickler takes more, such as `bytearray`, whose size is a number in the file.
_NAMES = re.compile(
    r"collections OrderedDict|torch\._utils (?:_rebuild_tensor_v2|_rebuild_parameter)|torch [A-Z][A-Za-z0-9]*Storage"
)
_NO_TENSOR = "it is no tensor of integers, one for each token"


def read_integers(transport: Transport, path: str, *, nbytes: int, most: int) -> IntArray:
    """The integers of a tensor in a file, int64. Nothing in the file is executed.

    Args:
        transport: Where the file is.
        path: Its path.
        nbytes: Its size.
        most: As many numbers are loaded at most.

    Raises:
        CorruptShardError: it is larger than so many numbers are.
        DocumentError: torch has not written it, or it is something else.
    """
    where = full_url(transport, path)
    if nbytes > most * 8 + _TORCH_BYTES:
        raise CorruptShardError(f"it has {nbytes} bytes, too many for {most} numbers", where=where)
    need("torch", install="saev-store[torch]", where=path)
    import torch

    raw = io.BytesIO(transport.read(path, max_bytes=most * 8 + _TORCH_BYTES))
    try:
        names = _names(raw, nbytes)
        # Before torch takes memory for it.
        if any(not _NAMES.fullmatch(name) for name in names):
            raise DocumentError(f"{_NO_TENSOR}: its pickle names {brief(', '.join(names))}", where=where)
        found = cast("object", torch.load(raw, map_location="cpu", weights_only=True))  # pyright: ignore[reportUnknownMemberType]  # torch's own types are partial
    except DocumentError:
        raise
    except zipfile.BadZipFile:
        raise DocumentError(
            "it is no archive of torch: it is damaged, or was written by torch before 1.6",
            where=where,
            remedy="Write it with torch.save(tensor, path).",
        ) from None
    except Exception as error:  # torch raises what its unpickler and its zip reader raise
        raise DocumentError(
            f"torch does not load it with weights_only=True: {brief(str(error))}",
            where=where,
            remedy="Write it with torch.save(tensor, path).",
        ) from None
    kinds = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    try:
        if isinstance(found, torch.Tensor) and found.dtype in kinds and found.numel() <= most:
            return found.resolve_neg().numpy().astype(np.int64)
    except (TypeError, RuntimeError):  # without numbers
        pass
    raise DocumentError(_NO_TENSOR, where=where)


def _names(raw: io.BytesIO, nbytes: int) -> list[str]:
    """What the pickle in a file of torch names.

    Raises:
        ValueError: the parts of the archive are larger than it, or there is no pickle.
        BadZipFile: it is no archive: torch before 1.6 wrote none.
    """
    with zipfile.ZipFile(raw) as archive:
        parts = archive.infolist()
        if sum(part.file_size for part in parts) > nbytes:
            raise ValueError("its parts are larger than the file")
        pickles = [archive.read(part) for part in parts if part.filename.endswith(".pkl")]
    raw.seek(0)
    if len(pickles) != 1:
        raise ValueError(f"it has {len(pickles)} pickles")
    found = [(code.name, argument) for code, argument, _ in pickletools.genops(pickles[0])]
    return [str(argument or name) for name, argument in found if name in ("GLOBAL", "STACK_GLOBAL", "INST")]
