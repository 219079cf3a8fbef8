"""`repair`: records again what a published recording has lost, and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from saev_store.core.arguments import check_choice, is_mapping
from saev_store.core.layout import RESID_POST
from saev_store.errors import ResumeError
from saev_store.record._fill import fill_missing
from saev_store.record._identity import repairable
from saev_store.record._recheck import KeptExamples, Recheck
from saev_store.record._record import plan
from saev_store.store.opening import exists
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer import open_repair

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt
    import torch

    from saev_store.core.dtypes import StoredDtype
    from saev_store.documents import Metadata
    from saev_store.record._adapters import Adapter
    from saev_store.record._examples import Batch, ExampleSource
    from saev_store.writer import RepairedFile
    from saev_store.writer.inputs import NonfinitePolicy


@dataclass(frozen=True)
class RepairedRecording:
    """Result of a repair; `str()` is a line for each file.

    Attributes:
        store: The store, opened; it is whole.
        files: The files that were written again, in that order; empty if nothing was lost.
    """

    store: ShardStore
    files: tuple[RepairedFile, ...]

    def to_dict(self) -> dict[str, object]:
        """The address and the files, as plain JSON types."""
        return {"url": self.store.url, "files": [asdict(file) for file in self.files]}

    def __str__(self) -> str:
        bytes_are = {True: "the bytes of before", False: "other bytes than before", None: "no digest to compare with"}
        lines = [f"{file.name}: {bytes_are[file.identical]}" for file in self.files]
        return "\n".join(lines) or "nothing is lost: no file was changed"


def repair(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    url: str | os.PathLike[str],
    *,
    device: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    recheck: Recheck = "exact",
    on_nonfinite: NonfinitePolicy = "raise",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
) -> RepairedRecording:
    """Record again what a published recording has lost: shards and token arrays that are missing, short or damaged.

    All files are compared with digests.json first. Only the batches with a lost example run through the model, and one with an
    example that is there. A file that is lost is built next to its place, and takes it in one step when it is whole. No other
    file is touched. Token arrays come from the source alone.

    After a crash the same call repairs the rest. If nothing is lost, nothing runs. The weights, the configuration, the hook
    points and the source have to be those of the recording; the rest is compared by the vectors.

    `url` is the folder of the store itself; the other arguments are those of `record`. Before anything is replaced, an example that
    is there is computed again: `recheck="exact"` refuses to repair if a bit differs, there or, by the digests, in a file that is to be
    replaced. `"close"` accepts what is only rounding; digests.json then has the digests of the new bytes.

    Raises:
        ResumeError: the store was not made by `record`, or in another way, and the message names what differs; or the model gives
            other vectors.
        WriterConflictError: another process is repairing the store.
        NotFoundError, IncompleteStoreError, DocumentError: there is no published store, see `ShardStore.open`.
        ArgumentError, MissingDependencyError: as of `record`.
    """
    check_choice(recheck, get_args(Recheck), name="recheck")
    transport = open_transport(url, storage_options)
    damaged = ShardStore.open(transport, damaged_ok=True)
    there = damaged.metadata
    if "recording" not in (() if isinstance(there.data, str) else cast("Mapping[str, object]", there.data)):
        raise ResumeError(
            "`record` has not made this store: data.recording is absent, which names what to run again",
            where=transport.url,
            remedy="Copy the lost files from where they are whole. From Python: store.repair() takes vectors.",
        )
    recorder, here = plan(
        model, source, tuple(dict.fromkeys(there.layers)), hook_points=tuple(dict.fromkeys(there.hook_points or (RESID_POST,))),
        dtype=cast("StoredDtype", there.layout.dtype), max_tokens_per_shard=there.max_tokens_per_shard, dataset=there.dataset,
        family=there.family, ckpt=there.ckpt, protocol=there.protocol, device=device,
    )  # fmt: skip
    if differences := _unbridged(there, here):
        raise ResumeError(
            f"the store was recorded in another way: {'; '.join(differences)}",
            where=transport.url,
            remedy="Repair with the model and the source that it was recorded with.",
        )
    kept = KeptExamples(transport, there.layout, recheck, saturate=on_overflow == "saturate")
    found = damaged.validate(deep=True, progress=progress)
    if any(problem.kind == "unreadable_digests" for problem in found.problems):
        found.raise_if_bad()
    with open_repair(
        transport, there, lost=found.lost, exact=recheck == "exact", on_nonfinite=on_nonfinite, on_overflow=on_overflow,
        progress=progress,
    ) as writer:  # fmt: skip
        given = source.geometry(recorder.adapter).token_arrays
        # Without digests.json nothing has whether there were labels, but the source.
        absent = [name for name in given if not exists(transport, f"{name}.bin")]
        for name in dict.fromkeys([*writer.lost_arrays, *absent]):
            if name not in given:  # before protocol 3.0 no document has whether there are labels
                raise ResumeError(f"its {name} are lost, and the source of this call has none", where=writer.url)
            writer.restore_array(name, _values(source, name, there.layout.n_examples))
        fill_missing(writer, recorder, source, range(there.layout.n_examples), kept, without=given)
    return RepairedRecording(ShardStore.open(open_transport(url, storage_options)), tuple(writer.repaired))


def _unbridged(there: Metadata, here: Metadata) -> list[str]:
    """Differences of two metadata documents that no repair bridges."""
    old, new = (cast("dict[str, Any]", json.loads(found.raw)) for found in (there, here))
    new["data"]["recording"] = repairable(old["data"]["recording"], new["data"]["recording"])
    for found in (old, new):  # the digest of the tokenizer counts, whatever its folder is called
        text = cast("dict[str, Any]", found.get("text") or {})
        cast("dict[str, object]", text.get("tokenizer") or {}).pop("name", None)
    return _differences(old, new, "")


def _differences(olds: Mapping[str, object], news: Mapping[str, object], prefix: str) -> list[str]:
    """Keys that differ between two documents, both values shown; of objects, which of their keys."""
    found: list[str] = []
    for key in {**olds, **news}:
        old, new = olds.get(key), news.get(key)
        if is_mapping(old) and is_mapping(new):  # the nesting of a document is limited
            # A digest of all bytes, which other releases took, has no counterpart.
            found += [] if old.get("scope") != new.get("scope") else _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} is {repr(old)[:200]} there, {repr(new)[:200]} in this call")
    return found


def _values(source: ExampleSource, name: str, n_examples: int) -> Iterator[npt.NDArray[np.generic]]:
    """A token array in pieces, (k, content tokens). The model does not run."""
    computed = ((batch, _no_vectors(batch)) for batch in source.batches(0, n_examples))
    for recorded in source.assemble(computed, 0):
        yield recorded.token_arrays[name][: n_examples - recorded.first]


def _no_vectors(batch: Batch) -> torch.Tensor:
    """In the place of the vectors of a batch: one layer of vectors of one number each."""
    import torch

    rows, tokens, *_ = torch.as_tensor(batch.inputs[0]).shape
    return torch.zeros(rows, 1, tokens, 1)
