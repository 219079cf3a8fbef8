"""The command `import`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from saev_store.cli._common import (
    AsJson,
    DstOptions,
    DstPairs,
    Pairs,
    Progress,
    StorageOptions,
    check_destination,
    emit,
    emit_json,
    integers,
    layer_keys,
    storage_options,
)
from saev_store.cli._ends import say_done
from saev_store.errors import ArgumentError


def import_(
    url: Annotated[str, typer.Argument(metavar="URL", help="The folder of a cache: a path, or any fsspec URL.")],
    to: Annotated[str, typer.Option(metavar="ROOT", help="The folder in which the store's folder is created.")],
    family: Annotated[str, typer.Option(help="The family of models, such as gpt2; it is part of the metadata.")],
    ckpt: Annotated[
        str | None, typer.Option(help="The checkpoint, such as gpt2-small [default: as the cache names it].")
    ] = None,
    format: Annotated[
        Literal["saelens", "hidden-states"] | None,
        typer.Option("--format", help="Format of the cache [default: by the names of its files]."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="2,5:attn_out", help="Layers of the cache, in its order, if it does not name them."),
    ] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option(metavar="3,18,36", help="Layers of hidden states, as ids of vLLM: id i is layer i - 1."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of an example, such as 512, where documents lie end to end.")
    ] = None,
    cls_token: Annotated[
        bool | None, typer.Option("--cls-token/--no-cls-token", help="Token 0 of each context is a CLS or BOS token.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            metavar="DTYPE", help="Round the numbers to float32, bfloat16 or float16 [default: as in the cache]."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Where the data set is that the model has seen: a path or URL, kept in the metadata."),
    ] = None,
    max_tokens_per_shard: Annotated[
        int | None, typer.Option(help="The most vectors of a shard [default: at least 32 shards, each up to 1 GiB].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an unfinished import, or refuse to.")
    ] = True,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Compare the store with the cache before it is published, or do not."
        ),
    ] = True,
    on_nonfinite: Annotated[
        Literal["raise", "warn", "allow"], typer.Option(help="What to do with NaN and infinity.")
    ] = "raise",
    on_overflow: Annotated[
        Literal["raise", "warn", "saturate"], typer.Option(help="What to do with numbers that would become infinite.")
    ] = "raise",
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    dst_options: DstOptions = None,
    dst_option: DstPairs = None,
    progress: Progress = None,
) -> None:
    """Write what another program has cached as a store, bit for bit; an interrupted import continues where it stopped.

    Caches of SAELens, and hidden states of vLLM and speculators.
    """
    from saev_store.sources.caches import import_cache

    if context is not None and context < 1:
        raise ArgumentError(f"it is {context}; it must be more than 0", where="--context")
    target = storage_options(dst_options, dst_option, name="--dst-storage-options")
    check_destination(to, target, where="--to", options_name="--dst-storage-options")
    try:
        store = import_cache(
            url, to, format=format, family=family, ckpt=ckpt,
            layers=None if layers is None else layer_keys(layers, where="--layers"),
            layer_ids=None if layer_ids is None else integers(layer_ids, where="--layer-ids"),
            context=context, cls_token=cls_token, dtype=dtype, dataset=dataset, max_tokens_per_shard=max_tokens_per_shard, resume=resume,
            verify=verify, storage_options=storage_options(options, option),
            dst_storage_options=target,
            on_nonfinite=on_nonfinite, on_overflow=on_overflow, progress=progress,
        )  # fmt: skip
    except ArgumentError as error:
        if error.where in {"acts", "array"}:  # the library was not told where they come from
            error.where = url
        raise
    say_done("imported", "writing importing", at=store.url, as_json=as_json)
    with store:
        if as_json:
            emit_json({"url": store.url, "shape": list(store.shape), "dtype": store.dtype.name})
        else:
            emit(store.url)
