"""Input of SAELens's trainers: activations of one hook, or of several, without end.

    provider = data_provider(loader)
    trainer = SAETrainer(cfg, sae, provider, save_checkpoint_fn=provider.save_to_checkpoint)

Written for SAELens 6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch

from saev_store.core.layout import transformer_lens_name
from saev_store.errors import ArgumentError, NotFoundError, brief
from saev_store.integrations._provider import Provider, rows_of, rows_of_one_store
from saev_store.torch import Consumer, ExampleBatch, StoreLoader
from saev_store.transport.checks import from_os_error, os_errors

T = TypeVar("T")

#: The file in a checkpoint's folder with the number of the next batch.
STATE_NAME = "saev_store_provider.json"


class SaelensProvider(Provider[T]):
    """A provider with the names that SAELens's own source of activations has for checkpoints.

    Made by `data_provider` and `multi_hook_data_provider`. `save_to_checkpoint` is a `save_checkpoint_fn` of SAELens's trainers.
    """

    def save_to_checkpoint(self, checkpoint_path: Path | str | None) -> None:
        """Write which batch comes next into a checkpoint's folder, as `saev_store_provider.json`.

        SAELens calls this last, and a kill leaves no part of the file: a checkpoint that has it is complete.

        Args:
            checkpoint_path: The folder, which exists. None, which SAELens passes where it keeps no checkpoint, does nothing.

        Raises:
            NotFoundError, AccessError, TransportError: the system refuses to write there.
        """
        if checkpoint_path is not None:
            new = Path(checkpoint_path, STATE_NAME).with_suffix(".json.new")
            with os_errors(str(new.with_suffix("")), "write"):
                new.write_text(json.dumps(self.state_dict()), encoding="utf-8")
                new.replace(new.with_suffix(""))

    def load_from_checkpoint(self, checkpoint_path: Path | str) -> None:
        """Continue with the batch that came after a checkpoint.

        Raises:
            NotFoundError: the checkpoint was written without `save_to_checkpoint`.
            AccessError, TransportError: the system refuses to read it.
            ArgumentError: the state is of other rows, another batch size, seed or version; the message names it.
        """
        path = Path(checkpoint_path, STATE_NAME)
        try:
            state = cast("object", json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise NotFoundError(
                "the checkpoint does not have the next batch",
                where=str(path),
                remedy="Pass save_checkpoint_fn=provider.save_to_checkpoint to the trainer.",
            ) from None
        except OSError as error:
            raise from_os_error(error, where=str(path), doing="read") from error
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                f"it is not what save_to_checkpoint writes: {error}", where=str(path), remedy="Use another checkpoint."
            ) from error
        self.load_state_dict(cast("Mapping[str, object]", state))


def data_provider(loader: StoreLoader | Consumer) -> SaelensProvider[torch.Tensor]:
    """Activations for `SAETrainer`: tensors (batch, d_model), epoch after epoch.

    Make the loader with `drop_last=True` and `batch_size` as `train_batch_size_samples`: SAELens counts every batch as a full one. A
    `batch_size` is that of one rank.

    Args:
        loader: Without `stack_layers`.

    Raises (from the provider):
        ArgumentError: batches are of stacked layers, or of two stores.

    >>> loader = StoreLoader(SAMPLE, layer=5, batch_size=8, drop_last=True)
    >>> with data_provider(loader) as provider:
    ...     [tuple(next(provider).shape) for _ in range(4)]  # an epoch has three
    [(8, 8), (8, 8), (8, 8), (8, 8)]
    """
    return SaelensProvider(loader, rows_of)


def multi_hook_data_provider(
    loader: StoreLoader, hook_names: Sequence[str] | None = None
) -> SaelensProvider[dict[str, torch.Tensor]]:
    """Activations for `MultiSAETrainer`: name of each hook to a tensor (batch, d_model), of the same tokens, epoch after epoch.

    Tensors are views of one batch.

    Args:
        loader: Of several layers, with `stack_layers=True`.
        hook_names: A name for each layer, in the loader's order. Default: TransformerLens's, such as "blocks.5.hook_resid_post".

    Raises:
        ArgumentError: the names are not as many as the layers, or not different; from the provider: batches are not of stacked
            layers.

    >>> loader = StoreLoader(SAMPLE, layer=(5, 11), stack_layers=True, batch_size=8)
    >>> with multi_hook_data_provider(loader) as provider:
    ...     {name: tuple(rows.shape) for name, rows in next(provider).items()}
    {'blocks.5.hook_resid_post': (8, 8), 'blocks.11.hook_resid_post': (8, 8)}
    """
    keys = rows_of_one_store(loader).layer_keys
    names = tuple(map(transformer_lens_name, keys) if hook_names is None else hook_names)
    if not len({*names}) == len(names) == len(keys):
        raise ArgumentError(
            f"hook_names is {brief(hook_names)}; it must be a different name for each of the layers {list(keys)}",
            where="hook_names",
        )
    return SaelensProvider(loader, partial(_by_hook, names=names))


def _by_hook(batch: ExampleBatch, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The layers of a stacked batch, by name: views (n, d_model)."""
    return dict(zip(names, rows_of(batch, stacked=True).unbind(1), strict=True))
