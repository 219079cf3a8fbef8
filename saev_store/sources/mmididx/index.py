"""The index of an MMIDIDX data set (`.idx`): the place of each sequence in `.bin`. Pure: bytes in, checked arrays out."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
#: Bytes of a header with and without the length of doc_idx.
HEADER_NBYTES, SHORT_HEADER_NBYTES = _HEADER.size + _DOCUMENTS.size, _HEADER.size
_SIZE, _POINTER, _DOC, _MODE = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8"), np.dtype("i1")
#: Meanings of the dtype byte; where tools disagree, the size of an element decides. Megatron's meaning comes first.
_TYPES: dict[int, tuple[str, ...]] = {
    1: ("uint8",),
    2: ("int8",),
    3: ("int16",),
    4: ("int32",),
    5: ("int64",),
    6: ("float64", "float32"),
    7: ("float32", "float64"),
    8: ("uint16",),
    9: ("uint32",),
    10: ("uint64",),
}
#: Entries that are checked at once, which bounds the memory of a check.
_STRIDE = 1 << 20

#: `"megatron"` has doc_idx, `"fairseq"` does not.
Variant = Literal["megatron", "fairseq"]


@dataclass(frozen=True)
class Index:
    """The places of the sequences of a data set; arrays are read-only views of the file where it is mapped.

    Attributes:
        dtype: Type of a token, little-endian.
        sizes: Tokens of each sequence, int32.
        pointers: First byte of each sequence in `.bin`, int64.
        doc_idx: First sequence of each document and, at the end, the number of sequences: int64; one document for each
            sequence where the file has no documents.
        modes: One int8 for each sequence of a multimodal data set, else None.
        variant: The layout of the file.
        idx_nbytes, bin_nbytes: Sizes of `.idx` and `.bin`.
    """

    dtype: np.dtype[np.generic]
    sizes: npt.NDArray[np.int32]
    pointers: IntArray
    doc_idx: IntArray
    modes: npt.NDArray[np.int8] | None
    variant: Variant
    idx_nbytes: int
    bin_nbytes: int


def parse_index(
    raw: bytes | bytearray | memoryview, *, bin_nbytes: int, where: str, dtype: npt.DTypeLike | None = None
) -> tuple[Index, tuple[Problem, ...]]:
    """The index of a data set, every number in it checked against a `.bin` of that size.

    Takes time in proportion to the index; the checks need at most about 64 MiB.

    Args:
        raw: The whole `.idx` file.
        bin_nbytes: Size of the `.bin` file.
        where: The index's name, for messages.
        dtype: The type of a token, for a code that means several types where nothing else decides.

    Returns:
        The index, and warnings.

    Raises:
        DocumentError: the index breaks a rule; `UnknownProtocolError` for an unknown version or dtype.
        CorruptShardError: `.bin` is shorter or longer than the index says.
        ArgumentError: `dtype` is not one of the code's types.
    """
    view = memoryview(raw).cast("B")
    n, doc_count, has_modes, code = check_header(view[:HEADER_NBYTES], idx_nbytes=len(view), where=where)
    at = HEADER_NBYTES if doc_count is not None else SHORT_HEADER_NBYTES
    sizes = np.frombuffer(view, _SIZE, n, at)
    pointers = np.frombuffer(view, _POINTER, n, at + 4 * n)
    n_tokens = _check_sizes(sizes, where)
    if doc_count is None:
        doc_idx = np.arange(n + 1, dtype=np.int64)
    else:
        doc_idx = np.frombuffer(view, _DOC, doc_count, at + 12 * n)
        _check_documents(doc_idx, n, where)
    modes = np.frombuffer(view, _MODE, n, at + 12 * n + 8 * (doc_count or 0)) if has_modes else None
    chosen = _choose(_candidates(code, where), code, dtype, sizes, pointers, n_tokens, bin_nbytes, where)
    problems = _check_pointers(sizes, pointers, n_tokens, chosen.itemsize, bin_nbytes, where)
    variant: Variant = "megatron" if doc_count is not None else "fairseq"
    return Index(chosen, sizes, pointers, doc_idx, modes, variant, len(view), bin_nbytes), problems


def _candidates(code: int, where: str) -> tuple[np.dtype[np.generic], ...]:
    if code not in _TYPES:
        raise UnknownProtocolError(
            f"dtype code {code} is unknown; {min(_TYPES)} to {max(_TYPES)} are read", where=where
        )
    return tuple(np.dtype(name).newbyteorder("<") for name in _TYPES[code])


def code_of(dtype: npt.DTypeLike) -> int:
    """The code that our writer gives a token type: Megatron's.

    >>> code_of("uint16"), code_of(np.float32)
    (8, 7)
    """
    try:
        name = np.dtype(dtype).newbyteorder("=").name
    except (TypeError, ValueError) as error:  # UnicodeEncodeError for a lone surrogate
        raise ArgumentError(f"{brief(dtype)} is no dtype: {brief(str(error))}", where="dtype") from None
    for code, names in _TYPES.items():
        if names[0] == name:
            return code
    known = ", ".join(sorted({names[0] for names in _TYPES.values()}))
    raise ArgumentError(f"{name} has no code in this format: {known} do", where="dtype")


def index_header(dtype: npt.DTypeLike, n_sequences: int, doc_count: int) -> bytes:
    """The first 34 bytes of an index; sizes, pointers, doc_idx and modes follow."""
    return _HEADER.pack(MAGIC, VERSION, code_of(dtype), n_sequences) + _DOCUMENTS.pack(doc_count)


def check_header(
    head: bytes | bytearray | memoryview, *, idx_nbytes: int, where: str
) -> tuple[int, int | None, bool, int]:
    """The numbers in the first bytes of an index, checked against the size of the file before the rest is read.

    Args:
        head: The first 34 bytes, or all of a shorter file.
        idx_nbytes: Size of the `.idx` file.
        where: Its name, for messages.

    Returns:
        The number of sequences, the length of doc_idx (None in the variant without), whether there are modes, and the
        dtype code.

    Raises:
        DocumentError: this is no index, or the file is not as long as it says.
    """
    view = memoryview(head)
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)] or not view:
        raise DocumentError(
            f"it begins with {bytes(view[:9])!r}; an MMIDIDX index begins with {MAGIC!r}"
            if view
            else "the file is empty",
            where=where,
        )
    if len(view) < SHORT_HEADER_NBYTES:
        raise DocumentError(f"the index has {len(view)} bytes; its header alone has {SHORT_HEADER_NBYTES}", where=where)
    _, version, code, n = _HEADER.unpack_from(view)
    if version != VERSION:
        raise UnknownProtocolError(f"version is {version}; only {VERSION} is known", where=where)
    _candidates(code, where)
    short = SHORT_HEADER_NBYTES + 12 * n
    if idx_nbytes == short:
        return n, None, False, code
    expected = "more"
    if len(view) >= HEADER_NBYTES:
        (doc_count,) = _DOCUMENTS.unpack_from(view, SHORT_HEADER_NBYTES)
        plain = HEADER_NBYTES + 12 * n + 8 * doc_count
        if idx_nbytes in {plain, plain + n}:
            return n, doc_count, idx_nbytes != plain, code
        expected = f"{plain:,} bytes with {doc_count:,} entries of doc_idx ({plain + n:,} with modes)"
    raise DocumentError(
        f"the index has {idx_nbytes:,} bytes; {n:,} sequences take {expected}, or {short:,} without doc_idx",
        where=where,
        remedy="It was cut, or bytes were appended: copy it again.",
    )


def _first_bad(n: int, bad: Callable[[slice], npt.NDArray[np.bool_]]) -> int | None:
    """The first position where `bad` of a slice is true; the search goes piece by piece."""
    for start in range(0, n, _STRIDE):
        found = bad(slice(start, min(start + _STRIDE, n)))
        if found.any():
            return start + int(found.argmax())
    return None


def _check_sizes(sizes: npt.NDArray[np.int32], where: str) -> int:
    at = _first_bad(len(sizes), lambda part: sizes[part] < 0)
    if at is not None:
        raise _broken(
            "negative_size", f"sizes[{at}] is {sizes[at]}; a sequence has at least 0 tokens", where, "sizes", at
        )
    return sum(int(sizes[start : start + _STRIDE].sum(dtype=np.int64)) for start in range(0, len(sizes), _STRIDE))


def _check_documents(doc_idx: IntArray, n: int, where: str) -> None:
    if not len(doc_idx) or doc_idx[0] != 0 or doc_idx[-1] != n:
        ends = f"{doc_idx[0]} … {doc_idx[-1]}" if len(doc_idx) else "empty"
        raise _broken("bad_doc_idx", f"doc_idx is {ends}; it must begin with 0 and end with {n}", where, "doc_idx", 0)
    at = _first_bad(len(doc_idx) - 1, lambda part: doc_idx[part.start + 1 : part.stop + 1] < doc_idx[part])
    if at is not None:
        message = f"doc_idx[{at + 1}] is {doc_idx[at + 1]} after {doc_idx[at]}; it must not descend"
        raise _broken("bad_doc_idx", message, where, "doc_idx", at + 1)


def _packed_offset(sizes: npt.NDArray[np.int32], pointers: IntArray, itemsize: int) -> int | None:
    """The first sequence that does not begin where the one before ends; None if all do."""
    end = 0
    for start in range(0, len(sizes), _STRIDE):
        part = slice(start, start + _STRIDE)
        ends = end + np.cumsum(sizes[part], dtype=np.int64) * itemsize
        wrong = np.flatnonzero(pointers[part] != np.concatenate(([end], ends[:-1])))
        if len(wrong):
            return start + int(wrong[0])
        end = int(ends[-1])
    return None


def _choose(
    options: tuple[np.dtype[np.generic], ...],
    code: int,
    dtype: npt.DTypeLike | None,
    sizes: npt.NDArray[np.int32],
    pointers: IntArray,
    n_tokens: int,
    bin_nbytes: int,
    where: str,
) -> np.dtype[np.generic]:
    if dtype is not None:
        code_of(dtype)
        wanted = np.dtype(dtype).newbyteorder("<")
        if wanted not in options:
            raise ArgumentError(
                f"dtype code {code} can mean {' or '.join(map(str, options))}, not {wanted}", where="dtype"
            )
        return wanted
    if len(options) == 1:
        return options[0]
    fits = [
        option
        for option in options
        if n_tokens
        and (n_tokens * option.itemsize == bin_nbytes or _packed_offset(sizes, pointers, option.itemsize) is None)
    ]
    # A single sequence begins at 0 whatever its type is; then the size of .bin alone decides.
    if len(fits) > 1:
        fits = [option for option in fits if n_tokens * option.itemsize == bin_nbytes]
    if len(fits) == 1:
        return fits[0]
    raise DocumentError(
        f"dtype code {code} means {options[0]} to some tools and {options[1]} to others, and {n_tokens:,} tokens in a "
        f".bin of {bin_nbytes:,} bytes do not decide",
        where=where,
        remedy=f"From Python, open it with dtype='{options[0].name}' or dtype='{options[1].name}'.",
    )


def _check_pointers(
    sizes: npt.NDArray[np.int32], pointers: IntArray, n_tokens: int, itemsize: int, bin_nbytes: int, where: str
) -> tuple[Problem, ...]:
    """Check that sequences are inside .bin and do not overlap; a warning unless they are packed in order."""
    packed_from = _packed_offset(sizes, pointers, itemsize)
    if packed_from is None:
        if n_tokens * itemsize != bin_nbytes:
            raise CorruptShardError(
                f"the .bin file has {bin_nbytes:,} bytes; {n_tokens:,} tokens of {itemsize} bytes make {n_tokens * itemsize:,}",
                where=where,
                remedy="One of the two files was cut, or belongs to another data set: copy both again.",
            )
        return ()
    n = len(sizes)
    at = _first_bad(n, lambda part: pointers[part] < 0)
    if at is not None:
        raise _broken("negative_pointer", f"pointers[{at}] is {pointers[at]}", where, "pointers", at)
    if itemsize > 1 and _packed_offset(sizes, pointers, 1) is None:
        message = f"pointers count tokens (pointers[{packed_from}] is {pointers[packed_from]}); they must count bytes"
        raise _broken("pointers_in_elements", message, where, "pointers", packed_from)
    at = _first_bad(n, lambda part: pointers[part] % itemsize != 0)
    if at is not None:
        message = f"pointers[{at}] is {pointers[at]}, no multiple of the {itemsize} bytes of a token"
        raise _broken("unaligned_pointer", message, where, "pointers", at)
    at = _first_bad(n, lambda part: pointers[part] > bin_nbytes - sizes[part].astype(np.int64) * itemsize)
    if at is not None:
        raise CorruptShardError(
            f"sequence {at} has {sizes[at]:,} tokens at byte {pointers[at]:,}; .bin has {bin_nbytes:,} bytes",
            where=where,
            remedy="One of the two files was cut, or belongs to another data set: copy both again.",
        )
    return (_check_apart(sizes, pointers, n_tokens, itemsize, bin_nbytes, packed_from, where),)


def _check_apart(
    sizes: npt.NDArray[np.int32],
    pointers: IntArray,
    n_tokens: int,
    itemsize: int,
    bin_nbytes: int,
    packed_from: int,
    where: str,
) -> Problem:
    """Check sequences in another order or with gaps: no two may share a byte."""
    order = np.argsort(pointers, kind="stable")
    order = order[sizes[order] > 0]
    starts = pointers[order]
    ends = starts + sizes[order].astype(np.int64) * itemsize
    shared = np.flatnonzero(starts[1:] < ends[:-1])
    if len(shared):
        a, b = sorted((int(order[shared[0]]), int(order[shared[0] + 1])))
        message = f"sequences {a} and {b} overlap: they begin at bytes {pointers[a]:,} and {pointers[b]:,}"
        raise _broken("overlapping_sequences", message, where, "pointers", b)
    last = int(ends.max(initial=0))
    if last != bin_nbytes:
        raise CorruptShardError(
            f"the .bin file has {bin_nbytes:,} bytes, but the last sequence ends at {last:,}", where=where
        )
    gaps = bin_nbytes - n_tokens * itemsize
    message = (
        f"sequences are not packed in order: number {packed_from} begins at byte {pointers[packed_from]:,}, and {gaps:,} "
        "bytes belong to none; each is read where its pointer says"
    )
    return Problem("not_packed", message, where=where, loc=("pointers", packed_from), severity="warning")


def _broken(kind: str, message: str, where: str, name: str, at: int) -> DocumentError:
    problem = Problem(kind, message, where=where, loc=(name, at))
    return DocumentError(message, where=where, problems=(problem,))
