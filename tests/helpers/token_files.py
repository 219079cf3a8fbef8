"""LLMBATCH and MMIDIDX files made from their specifications with `struct` and NumPy alone: the oracle of the tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from saev_store.transport import open_transport

DATA = Path(__file__).parents[1] / "data"
#: Codes of token types as Megatron writes them, and two that only others know.
CODES = {
    "uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8,
    "uint32": 9, "uint64": 10,
}  # fmt: skip


def through(engine: str, opener, path: Path):
    """What `opener` makes of a file that is read by an engine."""
    return opener(path.name, transport=open_transport(path.parent, engine=engine))


def samples(name: str) -> list[Path]:
    """Folders of the peer-written samples of a format."""
    return sorted(path.parent for path in (DATA / name).glob("*/expected.json"))


def malformed(name: str) -> list[dict]:
    """The cases of a format's manifest of malformed files."""
    return json.loads((DATA / name / "malformed" / "manifest.json").read_text())["cases"]


def truth(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """What a sample holds: its description, and its arrays."""
    with np.load(folder / "expected.npz", allow_pickle=False) as arrays:
        return json.loads((folder / "expected.json").read_text()), dict(arrays)


def llmbatch_bytes(
    batches: np.ndarray,
    *,
    seed: int = 0,
    total: int | None = None,
    version: int = 1,
    dtype: int = 0,
    count: int | None = None,
) -> bytes:
    """A file of batches (n, batch_size, seq_len)."""
    n, batch_size, seq_len = batches.shape
    total = n * batch_size if total is None else total
    out = [
        struct.pack(
            "<8sIIIQIII", b"LLMBATCH", version, batch_size, seq_len, n if count is None else count, dtype, seed, total
        ).ljust(4096, b"\0")
    ]
    for batch in batches:
        raw = batch.astype("<u4").tobytes()
        out.append(raw.ljust(-(-len(raw) // 4096) * 4096, b"\0"))
    return b"".join(out)


def mmididx_bytes(
    sequences: list[np.ndarray],
    *,
    doc_idx: list[int] | None = None,
    modes: list[int] | None = None,
    code: int | None = None,
    pointers: list[int] | None = None,
    short: bool = False,
) -> tuple[bytes, bytes]:
    """The `.idx` and `.bin` of sequences; `short` is the variant without doc_idx."""
    dtype = sequences[0].dtype if sequences else np.dtype("int32")
    sizes = [len(sequence) for sequence in sequences]
    if pointers is None:
        pointers = [sum(sizes[:i]) * dtype.itemsize for i in range(len(sizes))]
    if doc_idx is None:
        doc_idx = list(range(len(sizes) + 1))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, CODES[dtype.name] if code is None else code, len(sizes))
    idx = [head] if short else [head, struct.pack("<Q", len(doc_idx))]
    idx += [struct.pack(f"<{len(sizes)}i", *sizes), struct.pack(f"<{len(pointers)}q", *pointers)]
    if not short:
        idx.append(struct.pack(f"<{len(doc_idx)}q", *doc_idx))
    if modes is not None:
        idx.append(struct.pack(f"<{len(modes)}b", *modes))
    return b"".join(idx), b"".join(sequence.astype(dtype.newbyteorder("<")).tobytes() for sequence in sequences)
