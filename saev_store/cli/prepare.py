"""`saev-store prepare`: makes an Energon data set of a folder of tars."""

from __future__ import annotations

from typing import Annotated

import typer

from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import ArgumentError


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
    num_workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes [default: depends on the tars].")
    ] = None,
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

    made = prepare_folder(
        path,
        storage_options(options, option),
        split=split,
        split_parts=split_parts or (),
        exclude=exclude,
        sample_type=sample_type,
        field_map=_fields(field),
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


def _fields(pairs: list[str] | None) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, part = pair.partition("=")
        if not name or not equals or not part:
            raise ArgumentError(
                f"{pair!r} is not FIELD=PART", where="--field", remedy="Write for example --field image=jpg."
            )
        fields[name] = part
    return fields or None
