"""What Llamascopium's `Trainer.fit` takes: batches of activations by hook point, with tokens and mask.

    trainer.fit(sae, activation_stream(loader))

Written for Llamascopium 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Self

import torch

from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError
from saev_store.integrations._provider import Provider, rows_of, rows_of_one_store
from saev_store.integrations.saelens import by_hook, names_of
from saev_store.torch import ExampleBatch, StoreLoader


class ActivationStream:
    """Batches for Llamascopium, made by `activation_stream`. Each iteration begins where the stream was made, or where a state says.

    So a trainer that looks at the first batch, and then iterates anew, gets every batch.

    Args:
        provider: The batches.
        n_batches: How many an iteration has; None: without end.
    """

    def __init__(self, provider: Provider[dict[str, torch.Tensor]], n_batches: int | None) -> None:
        self._provider, self._n_batches, self._first = provider, n_batches, provider.state_dict()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches; an iteration before this one ends."""
        self._provider.load_state_dict(self._first)
        return islice(self._provider, self._n_batches)

    def state_dict(self) -> dict[str, object]:
        """Which batch comes after those that were handed out: JSON, below 2 kB."""
        return self._provider.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Begin the next iteration where `state_dict` was taken.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message says which.
        """
        self._provider.load_state_dict(state)
        self._first = self._provider.state_dict()

    def close(self) -> None:
        """End the loader's threads and give back its memory."""
        self._provider.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def activation_stream(
    loader: StoreLoader,
    hook_points: Sequence[str] | None = None,
    *,
    n_batches: int | None = None,
) -> ActivationStream:
    """Activations for `Trainer.fit`: dicts of hook point to (batch, d_model), `tokens` int64 (batch,) and `mask`, epoch after epoch.

    `tokens` are the token ids where the loader has `token_arrays=("token_ids",)`, else the content tokens' positions. All of `mask` is true: what a
    store's mask hides is not among the rows.

    Args:
        loader: Of one layer; or of several, with `stack_layers=True`.
        hook_points: A name for each layer, in the loader's order. Default: TransformerLens's, such as "blocks.5.hook_resid_post".
        n_batches: After so many `fit` returns, with a trainer that can be saved beside the state; None: without end.

    Raises:
        ArgumentError: the names are not as many as the layers, or not different, `n_batches` is no positive integer, or several
            layers are not stacked.

    >>> from saev_store.torch import StoreLoader
    >>> loader = StoreLoader(SAMPLE, layer=5, batch_size=8, drop_last=True)
    >>> with activation_stream(loader, n_batches=100) as stream:
    ...     {name: tuple(rows.shape) for name, rows in next(iter(stream)).items()}
    {'blocks.5.hook_resid_post': (8, 8), 'tokens': (8,), 'mask': (8,)}
    """
    rows = rows_of_one_store(loader)
    names = names_of(rows.layer_keys, hook_points)
    if len(names) > 1 and not rows.space.stacks_layers:
        raise ArgumentError(
            f"the loader has {len(names)} layers, each in rows of its own; it must have them in one row",
            where="loader",
            remedy="Make the loader with stack_layers=True.",
        )
    if n_batches is not None:
        n_batches = check_count(n_batches, name="n_batches")
    return ActivationStream(Provider(loader, partial(_batch, names=names)), n_batches)


def _batch(batch: ExampleBatch, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """With the keys that the trainer asks for."""
    act = batch["act"]
    is_stacked = isinstance(act, torch.Tensor) and act.ndim == 3
    found = by_hook(batch, names) if is_stacked else {names[0]: rows_of(batch)}
    tokens = torch.as_tensor(batch.get("token_ids", batch["token_idx"])).to(torch.int64)
    return {**found, "tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool)}
