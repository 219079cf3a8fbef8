"""`saev-store head`: shows some vectors and their norms."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from saev_store.cli._options import AsJson, Pairs, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json, table

#: Values of a vector shown in the table; `--json` has all of them.
_SHOWN = 6
_MOST_ROWS = 100_000


def head(
    url: Url,
    n: Annotated[int, typer.Option("-n", min=1, max=_MOST_ROWS, help="Number of vectors.")] = 5,
    layer: Annotated[int | None, typer.Option(help="Label of a layer [default: the first recorded].")] = None,
    tokens: Annotated[Literal["all", "content", "special"], typer.Option(help="Which tokens.")] = "all",
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Show the first vectors of a layer with their example, token and norm."""
    import numpy as np

    from saev_store.store.store import ShardStore

    with ShardStore.open(url, storage_options(options, option), damaged_ok=True) as store:
        label = store.layers[0] if layer is None else layer
        selection = store.sel(layer=label, tokens=tokens)
        rows = np.arange(min(n, len(selection)))
        vectors = selection.rows(rows)
        norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
        where = selection.coordinates(rows)
        example, token = where.example_idx.tolist(), where.token_idx.tolist()
    if as_json:
        emit_json({
            "url": store.url,
            "layer": label,
            "tokens": tokens,
            "vectors": [
                {"example_idx": e, "token_idx": t, "norm": norm, "values": values}
                for e, t, norm, values in zip(example, token, norms.tolist(), vectors.tolist(), strict=True)
            ],
        })  # fmt: skip
        return
    more = " …" if store.shape[3] > _SHOWN else ""
    lines = [
        (
            str(e),
            "CLS" if t < 0 else str(t),
            f"{norm:.4g}",
            " ".join(f"{value:.4g}" for value in values[:_SHOWN]) + more,
        )
        for e, t, norm, values in zip(example, token, norms.tolist(), vectors.tolist(), strict=True)
    ]
    emit(f"layer {label} of {list(store.layers)}, {store.shape[3]} values per vector")
    emit(table(("example", "token", "norm", "values"), lines))
