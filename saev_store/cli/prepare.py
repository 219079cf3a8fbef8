"""`saev-store prepare`: makes an Energon data set of a folder of tars."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast

import typer

from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import ArgumentError, SaevStoreError

if TYPE_CHECKING:
    from saev_store.transport import Transport

_MAX_SHOWN = 12


def prepare(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The folder of tars: a path, or any fsspec URL.")],
    split: Annotated[
        str | None,
        typer.Option("--split", "--split-ratio", metavar="N,N,N", help="Ratio of train, val and test: 8,1,1."),
    ] = None,
    split_parts: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:REGEX", help="Instead of --split: 'train:shards/train_.*'; may be repeated."),
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Exclude tars whose path contains a match.")
    ] = None,
    sample_type: Annotated[
        str | None, typer.Option(help="CaptioningSample, VQASample, …; CrudeWebdataset for raw parts.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="FIELD=PART", help="image=jpg, caption=json[caption]; may be repeated."),
    ] = None,
    field_map: Annotated[str | None, typer.Option(metavar="JSON", help="The fields as one JSON object.")] = None,
    num_workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes [default: depends on the tars].")
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for missing options.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", "--force-overwrite", help="Prepare the data set again; without a split, split.yaml is kept."
        ),
    ] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Index and split tars, and write .nv-meta beside them: an Energon data set. The tars are not changed."""
    from saev_store.sources.energon.prepare import prepare as prepare_folder
    from saev_store.transport import open_transport

    transport = open_transport(path, storage_options(options, option))
    fields = _fields(field, field_map)
    if interactive:
        split, split_parts, sample_type, fields = _ask(transport, split, split_parts, sample_type, fields, exclude)
    made = prepare_folder(
        path,
        transport=transport,
        split=split,
        split_parts=split_parts or (),
        exclude=exclude,
        sample_type=sample_type,
        field_map=fields,
        num_workers=num_workers,
        overwrite=overwrite,
        progress=progress,
    )
    if not as_json:
        emit(str(made))
        return
    from saev_store.validation import problem_to_dict

    emit_json({
        "url": made.url,
        "n_samples": made.n_samples,
        "n_parts": made.n_parts,
        "part_names": list(made.part_names),
        "shards": dict(made.shards),
        "splits": {name: list(shards) for name, shards in made.splits.items()},
        "problems": [problem_to_dict(problem) for problem in made.problems],
    })  # fmt: skip


def _fields(pairs: list[str] | None, text: str | None) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    if text is not None:
        try:
            parsed = cast("object", json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{text!r} is not JSON ({error})", where="--field-map") from None
        if not isinstance(parsed, dict) or not all(
            isinstance(part, str) for part in cast("dict[str, object]", parsed).values()
        ):
            raise ArgumentError(f"{text!r} is not an object of strings", where="--field-map")
        fields.update(cast("dict[str, str]", parsed))
    for pair in pairs or ():
        name, equals, part = pair.partition("=")
        if not name or not equals or not part:
            raise ArgumentError(
                f"{pair!r} is not FIELD=PART", where="--field", remedy="Write for example --field image=jpg."
            )
        fields[name] = part
    return fields or None


def _ask(
    transport: Transport,
    split: str | None,
    split_parts: list[str] | None,
    sample_type: str | None,
    fields: dict[str, str] | None,
    exclude: str | None,
) -> tuple[str | None, list[str] | None, str | None, dict[str, str] | None]:
    """Ask for missing options on standard error, after listing the parts of the first tar."""
    from itertools import islice

    from saev_store.sources.energon.field_map import FieldPath
    from saev_store.sources.energon.prepare import find_tars
    from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES
    from saev_store.sources.energon.split import parse_ratio
    from saev_store.sources.energon.tar_scan import Scan
    from saev_store.transport import Lists

    if not isinstance(transport, Lists):
        raise ArgumentError("this storage cannot list folders", where=transport.url)
    tars, _ = find_tars(transport, exclude=exclude)
    typer.echo(f"{len(tars):,} tars, from {tars[0][0]} to {tars[-1][0]}", err=True)
    found: dict[str, None] = {}
    for sample in islice(Scan.of(transport, tars[0][0], where=tars[0][0]).samples(), _MAX_SHOWN):
        found.update((name, None) for name, *_ in sample.parts)
    typer.echo(f"parts: {', '.join(found) or 'none'}", err=True)
    while split is None and not split_parts:
        answer = typer.prompt("Shares of train, val and test (8,1,1), or NAME:REGEX for one split", err=True)
        try:
            if ":" in answer:
                split_parts = [answer]
                while more := typer.prompt(
                    "Another NAME:REGEX (empty: no more)", default="", show_default=False, err=True
                ):
                    split_parts.append(more)
            elif len(parse_ratio(answer)) == 3:
                split = answer
            else:
                typer.echo("three numbers are needed", err=True)
        except SaevStoreError as error:
            typer.echo(str(error), err=True)
    kinds = [CRUDE, *SAMPLE_TYPES]
    while sample_type not in kinds:
        for number, kind in enumerate(kinds):
            typer.echo(f"  {number}  {kind}", err=True)
        answer = typer.prompt("Sample type, by number or name", default="0", err=True)
        sample_type = kinds[int(answer)] if answer.isdecimal() and int(answer) < len(kinds) else answer
    if sample_type == CRUDE or fields:
        return split, split_parts, sample_type, fields
    fields = {}
    kind = SAMPLE_TYPES[sample_type]
    for name in [*kind.required(), *kind.optional()]:
        needed = name in kind.required()
        while True:
            hint = "such as jpg,png or json[caption]" + ("" if needed else "; empty: leave it out")
            answer = typer.prompt(
                f"Part for {name} ({hint})", default=None if needed else "", show_default=False, err=True
            )
            try:
                if answer:
                    FieldPath.parse(answer, where=name)
                    fields[name] = answer
                break
            except SaevStoreError as error:
                typer.echo(str(error), err=True)
    return split, split_parts, sample_type, fields
