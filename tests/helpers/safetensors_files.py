"""Files of the safetensors format, written by hand, right and wrong ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np

SPELLED = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int16": "I16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}


def safetensors(tensors: dict[str, np.ndarray], edit: Callable[[dict], None] | None = None, *, pad: int = 0) -> bytes:
    """A file of the format; `edit` may change its header."""
    header, data = {"__metadata__": {"by": "a test"}}, b""
    for name, values in tensors.items():
        raw = values.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": SPELLED[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    if edit is not None:
        edit(header)
    text = json.dumps(header).encode()
    text += b" " * (pad - len(text))
    return struct.pack("<Q", len(text)) + text + data
