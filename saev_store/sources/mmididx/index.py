"""The index of an MMIDIDX data set (`.idx`): the place of each sequence in `.bin`. Pure: bytes in, checked arrays out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, UnknownProtocolError, brief
from saev_store.problems import Problem

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
#: Magic, version, dtype, number of sequences; then the length of doc_idx, which one variant lacks.
_HEADER = struct.Struct("<9sQBQ")
_DOCUMENTS = struct.Struct("<Q")
HEADER_NBYTES, SHORT_HEADER_NBYTES = _HEADER.size + _DOCUMENTS.size, _HEADER.size
#: Meanings of the dtype byte. Tools disagree on two of them; Megatron's meaning comes first.
_TYPES: dict[int, tuple[str, ...]] = {
    1: ("uint8",), 2: ("int8",), 3: ("int16",), 4: ("int32",), 5: ("int64",), 6: ("float64", "float32"),
    7: ("float32", "float64"), 8: ("uint16",), 9: ("uint32",), 10: ("uint64",),
}  # fmt: skip


class Index(NamedTuple):
    """The arrays of an index, read-only views of it; without documents in the file, each sequence counts as one."""

    dtype: np.dtype[np.generic]
    sizes: npt.NDArray[np.int32]
    pointers: IntArray
    doc_idx: IntArray
    modes: npt.NDArray[np.int8] | None


def code_of(dtype: npt.DTypeLike) -> int:
    """The code that our writer gives a token type: Megatron's."""
    try:
        name = np.dtype(dtype).newbyteorder("=").name
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{brief(dtype)} is not a dtype: {brief(str(error))}", where="dtype") from None
    codes = {names[0]: code for code, names in _TYPES.items() if "float" not in names[0]}
    if name not in codes:
        raise ArgumentError(f"dtype is {name}; it must be one of {', '.join(sorted(codes))}", where="dtype")
    return codes[name]


def index_header(dtype: npt.DTypeLike, n_sequences: int, doc_count: int) -> bytes:
    """The first 34 bytes of an index; sizes, pointers and doc_idx follow."""
    return _HEADER.pack(MAGIC, VERSION, code_of(dtype), n_sequences) + _DOCUMENTS.pack(doc_count)


def check_header(head: bytes, *, idx_nbytes: int, where: str) -> tuple[int, int, int | None, bool]:
    """The dtype code, the number of sequences, the length of doc_idx (None without), and if there are modes.

    `head` is the first 34 bytes, or all of a shorter file; the size of the file must be what its numbers make.
    """
    if len(head) < SHORT_HEADER_NBYTES or head[:9] != MAGIC:
        message = f"it begins with {head[:9]!r} and has {idx_nbytes:,} bytes"
        rule = f"an MMIDIDX index begins with {MAGIC!r} and has at least {SHORT_HEADER_NBYTES} bytes"
        raise DocumentError(f"{message}; {rule}", where=where)
    _, version, code, n = _HEADER.unpack_from(head)
    if version != VERSION or code not in _TYPES:
        known = f"version {VERSION} with codes 1 to {max(_TYPES)} is known"
        raise UnknownProtocolError(f"version is {version} and the dtype code {code}; only {known}", where=where)
    if idx_nbytes == SHORT_HEADER_NBYTES + 12 * n:
        return code, n, None, False
    doc_count: int = _DOCUMENTS.unpack_from(head, SHORT_HEADER_NBYTES)[0] if len(head) >= HEADER_NBYTES else 0
    plain = HEADER_NBYTES + 12 * n + 8 * doc_count
    if idx_nbytes not in {plain, plain + n}:
        message = f"the index has {idx_nbytes:,} bytes; its {n:,} sequences and {doc_count:,} entries take {plain:,}"
        raise DocumentError(message, where=where, remedy="It was cut, or bytes were appended: copy it again.")
    return code, n, doc_count, idx_nbytes != plain


def parse_index(raw: memoryview, *, bin_nbytes: int, where: str) -> Index:
    """The index of a data set, every number in it checked against a `.bin` of that size.

    Raises:
        DocumentError: the index breaks a rule; `UnknownProtocolError` for an unknown version or dtype.
        CorruptShardError: `.bin` is shorter or longer than the index requires.
    """
    code, n, doc_count, has_modes = check_header(bytes(raw[:HEADER_NBYTES]), idx_nbytes=len(raw), where=where)
    at = SHORT_HEADER_NBYTES if doc_count is None else HEADER_NBYTES
    sizes = np.frombuffer(raw, "<i4", n, at)
    pointers = np.frombuffer(raw, "<i8", n, at + 4 * n)
    _check("negative_size", "sizes", sizes, sizes < 0, "must be 0 or more", where)
    doc_idx = np.arange(n + 1, dtype=np.int64)
    if doc_count is not None:
        doc_idx = np.frombuffer(raw, "<i8", doc_count, at + 12 * n)
        edges: list[int] = doc_idx[[0, -1]].tolist() if doc_count else []
        _check("bad_doc_idx", "doc_idx", [edges], np.array([edges != [0, n]]), f"must go from 0 to {n}", where)
        falls = np.append(False, doc_idx[1:] < doc_idx[:-1])
        _check("bad_doc_idx", "doc_idx", doc_idx, falls, "must not descend", where)
    modes = np.frombuffer(raw, "i1", n, at + 12 * n + 8 * (doc_count or 0)) if has_modes else None
    dtype = _choose(code, sizes, pointers, bin_nbytes, where)
    rule = f"must be 0 or more and a multiple of the {dtype.itemsize} bytes of a token"
    _check("bad_pointer", "pointers", pointers, (pointers < 0) | (pointers % dtype.itemsize != 0), rule, where)
    # Close to 2^63, an end would be negative.
    ends = pointers.astype(np.uint64) + sizes.astype(np.uint64) * np.uint64(dtype.itemsize)
    last = int(ends.max(initial=0))
    if last != bin_nbytes:
        message = f"the .bin file has {bin_nbytes:,} bytes, but the last sequence ends at {last:,}"
        remedy = "One of the two files was cut, or belongs to another data set: copy both again."
        raise CorruptShardError(message, where=where, remedy=remedy)
    return Index(dtype, sizes, pointers, doc_idx, modes)


def _check(
    kind: str, name: str, values: Sequence[object] | IntArray, bad: npt.NDArray[np.bool_], rule: str, where: str
) -> None:
    """Raise `DocumentError` at the first of the values that is bad."""
    if bad.any():
        at = int(bad.argmax())
        message = f"{name} has {values[at]} at {at}; it {rule}"
        raise DocumentError(message, where=where, problems=[Problem(kind, message, where=where, loc=(name, at))])


def _choose(
    code: int, sizes: npt.NDArray[np.int32], pointers: IntArray, bin_nbytes: int, where: str
) -> np.dtype[np.generic]:
    """The type of a token: of several meanings of the code the one that fits the files."""
    options = [np.dtype(name).newbyteorder("<") for name in _TYPES[code]]
    if len(options) > 1:
        ends = np.cumsum(sizes, dtype=np.int64)
        # A single sequence begins at 0 whatever its type is, so the size of .bin comes first.
        fits = [each for each in options if ends.max(initial=0) * each.itemsize == bin_nbytes]
        fits = fits or [each for each in options if np.array_equal(pointers, (ends - sizes) * each.itemsize)]
        if len(fits) != 1:
            message = f"dtype code {code} means {options[0]} or {options[1]}, and the files do not decide"
            raise DocumentError(message, where=where)
        options = fits
    return options[0]
