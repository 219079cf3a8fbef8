"""Resume: compares the claim with what is to be written, verifies what is left of a part, and drops the rest."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import cast

from saev_store._runtime.progress import Progress
from saev_store.core.layout import shard_name
from saev_store.errors import ResumeError, SaevStoreWarning, counted, outside
from saev_store.transport import Sink
from saev_store.writer._digests import BlockDigester, block_ranges, digest
from saev_store.writer._shard_file import Receipt, ShardFile, ShardPlan, leading_receipts, read_token_rows
from saev_store.writer.folder import Claim, Folder, receipt_path


@dataclass(frozen=True)
class Kept:
    """Where a resumed part goes on.

    Attributes:
        shard_idx: The shard of the next example.
        file: That shard with what is kept of it, None where it begins anew.
        has_tokens: Whether what is kept has token rows; None where nothing is kept.
        receipts: Those of the complete shards before it.
    """

    shard_idx: int
    file: ShardFile | None = None
    has_tokens: bool | None = None
    receipts: list[Receipt] = field(default_factory=list[Receipt])


def kept_of(plan: ShardPlan, shards: range, *, verify: str, progress: bool | None) -> Kept:
    """Check what an interrupted attempt left of a part, and drop what cannot be trusted.

    Shards are written in order, so everything after the first damage goes: what follows could only be kept if the
    caller appended examples out of order.
    """
    receipts = leading_receipts(plan.folder, plan.layout, shards, plan.block_bytes)
    has_tokens = receipts[0].tokens is not None if receipts else None
    total = sum(receipt.used_nbytes for receipt in receipts) if verify == "digests" else 0
    complete = [pair for pair in zip(shards, receipts, strict=False) if pair[1].complete]
    example_nbytes = plan.layout.example_nbytes
    longest = plan.layout.examples_per_shard * plan.token_row_nbytes
    with (
        Progress(total, "verifying", shown=progress if total else False) as bar,
        closing(plan.folder.each(lambda pair: _is_there(plan, *pair), complete, most_nbytes=longest)) as there,
    ):
        for shard_idx, receipt in zip(shards, receipts, strict=False):
            if (
                receipt.complete
                and next(there)
                and (
                    verify == "sizes"
                    or plan.folder.is_as_written(shard_name(shard_idx), receipt.file, plan.block_bytes, bar)
                )
            ):
                continue
            whole = receipts[: shard_idx - shards.start]
            # Publishing deletes the hidden files after it creates metadata.json: a missing receipt or file of token rows may be one
            # that was deleted before our own owner document.
            plan.owner.check()
            plan.check_unpublished()
            file = _continued(plan, shard_idx, receipt, verify, bar)
            # From the last one down: a crash in between leaves no gap that a later resume could not see.
            for dropped in reversed(range(shard_idx + 1, shards.start + len(receipts))):
                plan.folder.delete(receipt_path(dropped))
            kept_nbytes = file.digester.nbytes if file is not None else 0
            if receipt.complete or kept_nbytes < receipt.used_nbytes // example_nbytes * example_nbytes:
                _warn(plan, shard_idx, kept_nbytes, n_dropped=len(receipts) - (shard_idx - shards.start) - 1)
            if file is None:
                plan.folder.delete(receipt_path(shard_idx))
                return Kept(shard_idx, None, has_tokens if whole else None, whole)
            if kept_nbytes == plan.layout.used_nbytes(shard_idx):  # killed between its last byte and its completion
                file.record(committed := file.commit())
                return Kept(shard_idx + 1, None, has_tokens, [*whole, committed])
            return Kept(shard_idx, file, has_tokens, whole)
    return Kept(shards.start + len(receipts), None, has_tokens, receipts)


def _is_there(plan: ShardPlan, shard_idx: int, receipt: Receipt) -> bool:
    """Whether a complete shard has its size, and its token rows."""
    if plan.folder.size(shard_name(shard_idx)) != plan.file_nbytes(shard_idx):
        return False
    return receipt.tokens is None or _token_rows(plan, shard_idx, receipt) is not None


def _token_rows(plan: ShardPlan, shard_idx: int, receipt: Receipt) -> bytes | None:
    return read_token_rows(plan.folder, plan.layout, shard_idx, receipt, plan.token_row_nbytes)


def _continued(plan: ShardPlan, shard_idx: int, receipt: Receipt, verify: str, bar: Progress) -> ShardFile | None:
    """A shard that continues after its last whole, undamaged example; None if nothing of it can be kept."""
    tokens = None
    if receipt.tokens is not None:
        tokens = _token_rows(plan, shard_idx, receipt)
        if tokens is None:
            return None
    if plan.folder.is_far:  # a whole file or none
        return None
    size = plan.folder.size(shard_name(shard_idx)) or 0  # before the file is opened, which gives it its full size
    sink = plan.open_sink(shard_idx, resume=True)
    try:
        digester = _kept_digests(plan, sink, receipt, verify, size, bar)
        if digester.nbytes == 0:
            sink.abort()
            return None
        sink.keep(digester.nbytes)
    except BaseException:
        sink.abort()
        raise
    tokens = tokens[: plan.tokens_nbytes(digester.nbytes)] if tokens is not None else None
    file = ShardFile(plan, shard_idx, sink=sink, digester=digester, tokens=tokens)
    # From here on the receipt must not promise more than is kept: those bytes are about to be written once more.
    kept = file.receipt(digester.nbytes, digester.digests(), complete=False)
    if kept != receipt:
        file.record(kept)
    return file


def _kept_digests(
    plan: ShardPlan, sink: Sink, receipt: Receipt, verify: str, size: int, bar: Progress
) -> BlockDigester:
    """The digests of the whole, undamaged examples at the start of a file that was found with `size` bytes."""
    good = 0
    blocks = list(block_ranges(receipt.used_nbytes, plan.block_bytes))
    last = len(blocks) - 1
    for i, (start, end) in enumerate(blocks):
        if verify == "sizes" and end > size:
            break
        # Where only sizes are to be checked, the last block is read all the same: its digest has to go on growing.
        if verify == "digests" or i == last:
            block = sink.read_back(start, end)
            if len(block) != end - start or digest(block) != receipt.digests[i]:
                break
            bar.advance(end - start)
        good = end
    good = good // plan.layout.example_nbytes * plan.layout.example_nbytes
    n_whole, rest = divmod(good, plan.block_bytes)
    digester = BlockDigester(plan.block_bytes, receipt.digests[:n_whole])
    if rest:
        digester.update(sink.read_back(good - rest, good))
    return digester if digester.nbytes == good else BlockDigester(plan.block_bytes)


def _warn(plan: ShardPlan, shard_idx: int, kept_nbytes: int, *, n_dropped: int) -> None:
    first, _ = plan.layout.example_range(shard_idx)
    after = f" and the {counted(n_dropped, 'shard')} after it" if n_dropped > 0 else ""
    warnings.warn(
        f"{plan.folder.where(shard_name(shard_idx))}: not what was written (its file, its digests, or what was recorded of its tokens); "
        f"{kept_nbytes // plan.layout.example_nbytes} of its examples are kept, the rest of it{after} has to be appended "
        f"again, from example {first + kept_nbytes // plan.layout.example_nbytes} on.",
        SaevStoreWarning,
        stacklevel=outside(),
    )


def check_claim(folder: Folder, there: Claim, here: Claim) -> None:
    """Check that a claim that was found is the one this call would make; `ResumeError` names every difference."""
    was, now = asdict(there.options), asdict(here.options)
    found = metadata_differences(there.metadata, here.metadata)
    found += [f"{name} is {was[name]!r} there, {now[name]!r} in this call" for name in was if was[name] != now[name]]
    if found:
        raise ResumeError(
            f"the unfinished store there is another one: {'; '.join(found)}",
            where=folder.url,
            remedy="Use the same metadata and options, or throw it away with `discard_unfinished`.",
        )


def metadata_differences(there: str, here: str) -> list[str]:
    """Which keys differ between two metadata documents, both values shown; of objects, which of their keys.

    >>> metadata_differences('{"n_examples": 5, "data": {"seed": 1}}', '{"n_examples": 5, "data": {"seed": 2}}')
    ['data.seed is 1 there, 2 in this call']
    """
    if there == here:
        return []
    try:
        old, new = cast("object", json.loads(there)), cast("object", json.loads(here))
    except (ValueError, RecursionError):
        return ["the metadata there is no JSON"]
    if not isinstance(old, dict) or not isinstance(new, dict):
        return ["the metadata there is no JSON object"]
    found = _differences(cast("Mapping[str, object]", old), cast("Mapping[str, object]", new), "")
    return found or ["the metadata says the same in other bytes (the order of its keys, or white space)"]


def _differences(olds: Mapping[str, object], news: Mapping[str, object], prefix: str) -> list[str]:
    """The differences of two objects, which are below `prefix`."""
    found: list[str] = []
    for key in {**olds, **news}:
        old, new = olds.get(key), news.get(key)
        if isinstance(old, dict) and isinstance(new, dict):  # the nesting of a document is limited
            found += _differences(
                cast("Mapping[str, object]", old), cast("Mapping[str, object]", new), f"{prefix}{key}."
            )
            continue
        was, now = (repr(document[key])[:200] if key in document else "absent" for document in (olds, news))
        if was != now:
            found.append(f"{prefix}{key} is {was} there, {now} in this call")
    return found
