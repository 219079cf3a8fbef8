"""The index of an MMIDIDX data set (`.idx`): the place of each sequence in `.bin`. Pure: bytes in, checked arrays out."""

from __future__ import annotations

import struct
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Index:
    """The places of the sequences of a data set; arrays are read-only views of the file if it is mapped.

    Attributes:
        dtype: Type of a token, little-endian.
        sizes: Tokens of each sequence, int32.
        pointers: First byte of each sequence in `.bin`, int64.
        doc_idx: First sequence of each document, then the number of sequences: int64. Without documents in the file,
            each sequence counts as one.
        modes: One int8 for each sequence of a multimodal data set, else None.
    """

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
    codes = {names[0]: code for code, names in _TYPES.items()}
    if name not in codes:
        raise ArgumentError(f"dtype is {name}; it must be one of {', '.join(sorted(codes))}", where="dtype")
    return codes[name]


def index_header(dtype: npt.DTypeLike, n_sequences: int, doc_count: int) -> bytes:
    """The first 34 bytes of an index; sizes, pointers, doc_idx and modes follow."""
    return _HEADER.pack(MAGIC, VERSION, code_of(dtype), n_sequences) + _DOCUMENTS.pack(doc_count)


def check_header(head: bytes, *, idx_nbytes: int, where: str) -> tuple[int, int | None, bool, int]:
    """The number of sequences, the length of doc_idx (None without), if there are modes, and the dtype code.

    `head` is the first 34 bytes, or all of a shorter file; the size of the file must be what its numbers make.
    """
    if not head or head[:9] != MAGIC[: len(head)]:
        raise DocumentError(f"it begins with {head[:9]!r}; an MMIDIDX index begins with {MAGIC!r}", where=where)
    if len(head) < SHORT_HEADER_NBYTES:
        raise DocumentError(f"the index has {len(head)} bytes; its header has {SHORT_HEADER_NBYTES}", where=where)
    _, version, code, n = _HEADER.unpack_from(head)
    if version != VERSION or code not in _TYPES:
        known = f"version {VERSION} with codes 1 to {max(_TYPES)} is known"
        raise UnknownProtocolError(f"version is {version} and the dtype code {code}; only {known}", where=where)
    short = SHORT_HEADER_NBYTES + 12 * n
    if idx_nbytes == short:
        return n, None, False, code
    doc_count: int = _DOCUMENTS.unpack_from(head, SHORT_HEADER_NBYTES)[0] if len(head) >= HEADER_NBYTES else 0
    plain = HEADER_NBYTES + 12 * n + 8 * doc_count
    if idx_nbytes not in {plain, plain + n}:
        raise DocumentError(
            f"the index has {idx_nbytes:,} bytes; {n:,} sequences with {doc_count:,} entries of doc_idx take {plain:,} "
            f"({plain + n:,} with modes), or {short:,} without doc_idx",
            where=where,
            remedy="It was cut, or bytes were appended: copy it again.",
        )
    return n, doc_count, idx_nbytes != plain, code


def parse_index(
    raw: bytes | bytearray | memoryview, *, bin_nbytes: int, where: str, dtype: npt.DTypeLike | None = None
) -> Index:
    """The index of a data set, every number in it checked against a `.bin` of that size, in time and memory in proportion to it.

    Raises:
        DocumentError: the index breaks a rule; `UnknownProtocolError` for an unknown version or dtype.
        CorruptShardError: `.bin` is shorter or longer than the index requires.
        ArgumentError: `dtype` is not one of the code's types.
    """
    view = memoryview(raw).cast("B")
    n, doc_count, has_modes, code = check_header(bytes(view[:HEADER_NBYTES]), idx_nbytes=len(view), where=where)
    at = SHORT_HEADER_NBYTES if doc_count is None else HEADER_NBYTES
    sizes = np.frombuffer(view, "<i4", n, at)
    pointers = np.frombuffer(view, "<i8", n, at + 4 * n)
    _check("negative_size", "sizes", sizes, sizes < 0, "must be 0 or more", where)
    if doc_count is None:
        doc_idx = np.arange(n + 1, dtype=np.int64)
    else:
        doc_idx = np.frombuffer(view, "<i8", doc_count, at + 12 * n)
        if doc_count == 0 or doc_idx[0] != 0 or doc_idx[-1] != n:
            raise _broken("bad_doc_idx", "doc_idx", 0, f"doc_idx must begin with 0 and end with {n}", where)
        _check(
            "bad_doc_idx", "doc_idx", doc_idx, np.append(False, doc_idx[1:] < doc_idx[:-1]), "must not descend", where
        )
    modes = np.frombuffer(view, "i1", n, at + 12 * n + 8 * (doc_count or 0)) if has_modes else None
    chosen = _choose(code, dtype, sizes, pointers, bin_nbytes, where)
    rule = f"must be 0 or more and a multiple of the {chosen.itemsize} bytes of a token"
    _check("bad_pointer", "pointers", pointers, (pointers < 0) | (pointers % chosen.itemsize != 0), rule, where)
    # Close to 2^63, an end would be negative.
    ends = pointers.astype(np.uint64) + sizes.astype(np.uint64) * np.uint64(chosen.itemsize)
    last = int(ends.max(initial=0))
    if last != bin_nbytes:
        raise CorruptShardError(
            f"the .bin file has {bin_nbytes:,} bytes, but the last sequence ends at {last:,}",
            where=where,
            remedy="One of the two files was cut, or belongs to another data set: copy both again.",
        )
    return Index(chosen, sizes, pointers, doc_idx, modes)


def _broken(kind: str, name: str, at: int, message: str, where: str) -> DocumentError:
    problem = Problem(kind, message, where=where, loc=(name, at))
    return DocumentError(message, where=where, problems=[problem])


def _check(
    kind: str, name: str, values: npt.NDArray[np.signedinteger], bad: npt.NDArray[np.bool_], rule: str, where: str
) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise _broken(kind, name, at, f"{name}[{at}] is {values[at]}; it {rule}", where)


def _are_packed(sizes: npt.NDArray[np.int32], pointers: IntArray, itemsize: int) -> bool:
    return bool((pointers == (np.cumsum(sizes, dtype=np.int64) - sizes) * itemsize).all())


def _choose(
    code: int,
    asked: npt.DTypeLike | None,
    sizes: npt.NDArray[np.int32],
    pointers: IntArray,
    bin_nbytes: int,
    where: str,
) -> np.dtype[np.generic]:
    """The type of a token: of several meanings of the code the one that fits the files, or that the caller names."""
    options = [np.dtype(name).newbyteorder("<") for name in _TYPES[code]]
    if asked is not None:
        code_of(asked)
        wanted = np.dtype(asked).newbyteorder("<")
        if wanted not in options:
            meant = " or ".join(map(str, options))
            raise ArgumentError(f"dtype is {wanted}, but code {code} means {meant}", where="dtype")
        return wanted
    n_tokens = int(sizes.sum(dtype=np.int64))
    if len(options) > 1 and n_tokens:
        # A single sequence begins at 0 whatever its type is, so the size of .bin comes first.
        fits = [option for option in options if n_tokens * option.itemsize == bin_nbytes]
        options = fits or [each for each in options if _are_packed(sizes, pointers, each.itemsize)] or options
    if len(options) > 1:
        message = (
            f"dtype code {code} means {options[0]} or {options[1]}, depending on the tool; the files do not decide"
        )
        raise DocumentError(
            message, where=where, remedy="From Python, open it with dtype='float32' or dtype='float64'."
        )
    return options[0]
