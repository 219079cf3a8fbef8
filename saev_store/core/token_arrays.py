"""Numbers that a store holds for each content token beside its vectors: labels, token ids, masks.

Section 5 of docs/protocol.md: the file `<name>.bin` of a token array holds (n_examples, content tokens) numbers in C order.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, brief

#: The dtypes of token arrays; a bool is a byte, 0 or 1.
DTYPES = ("bool", "uint8", "int32", "int64", "float32")
#: Names with a meaning, and the dtype that each must have.
MEANINGS: Mapping[str, str] = {
    "labels": "uint8",
    "token_ids": "int32",
    "mask": "bool",
    "document_ids": "int64",
    "positions": "int32",
}
#: What stands for "none" at special tokens, for which nothing is recorded, by dtype.
NONE: Mapping[str, float] = {"bool": False, "uint8": 255, "int32": -1, "int64": -1, "float32": math.nan}
#: The most token arrays of a store.
MAX_ARRAYS = 64
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_SHARD = re.compile(r"acts[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenArray:
    """One token array, as metadata.json declares it; `file_name` is the name of its file.

    Raises:
        ArgumentError: a rule about its name or dtype is broken.
    """

    name: str
    dtype: str
    file_name: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or _SHARD.fullmatch(self.name):  # pyright: ignore[reportUnnecessaryIsInstance]  # it may come from a file
            raise ArgumentError(
                f"the token array {brief(self.name)} has a name that is not allowed; it must be of the letters a to z, digits "
                "and _, begin with a letter, have at most 64 characters, and not be that of a shard",
                where="token_arrays",
            )
        allowed = (MEANINGS[self.name],) if self.name in MEANINGS else DTYPES
        if self.dtype not in allowed:
            raise ArgumentError(
                f"the token array {self.name} has dtype {brief(self.dtype)}; it must be {' or '.join(allowed)}",
                where="token_arrays",
            )
        object.__setattr__(self, "file_name", f"{self.name}.bin")  # frozen

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """Its NumPy dtype, little-endian."""
        dtype = np.dtype(self.dtype)
        return dtype if sys.byteorder == "little" else dtype.newbyteorder("<")

    def is_valid(self, values: bytes | bytearray | memoryview) -> bool:
        """Return True if bytes of its file can be its values: those of a bool are 0 and 1, those of other dtypes are any."""
        return self.dtype != "bool" or int(np.frombuffer(values, dtype=np.uint8).max(initial=0)) <= 1

    def nbytes(self, layout: Layout) -> int:
        """The exact size of its file."""
        return layout.n_examples * self.example_nbytes(layout)

    def example_nbytes(self, layout: Layout) -> int:
        """Bytes of one example."""
        return layout.content_tokens_per_example * self.numpy_dtype.itemsize


#: Labels, which stores of every version may have, declared or not.
LABELS = TokenArray("labels", "uint8")


def shown_names(names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """The names under which all token arrays of a store are shown beside `taken` ones: their own, or with `tokens_` in front."""
    found = dict[str, str]()
    free = set(names) - set(taken)
    for name in sorted(set(names)):
        shown = name
        while shown in taken or (shown != name and shown in {*free, *found.values()}):
            shown = f"tokens_{shown}"
        found[name] = shown
    return found
