"""Hidden states out of a store for training code that asks hs-connectors for them, such as that of speculators.

    register()
    transfer = HiddenStatesBackend.registry["saev_store"].from_train_args(args, data_path)

Written for hs-connectors 0.9.
"""

from __future__ import annotations

import argparse
import importlib
import re
from abc import ABCMeta
from collections.abc import Mapping
from numbers import Integral
from typing import Protocol, cast

import torch

from saev_store._runtime.optional import need
from saev_store.core.layout import LayerKey
from saev_store.core.rows import Layers
from saev_store.errors import ArgumentError, SelectionError, brief
from saev_store.store.store import ShardStore
from saev_store.torch.batch import tensor_of

#: The name under which the backend is registered.
NAME = "saev_store"


class StoreTransfer:
    """Samples out of a store of texts: sample i is the document with the id i. What hs-connectors calls a transfer.

    A store that `saev-store import` has made of vLLM's files has the requests as documents, with the numbers of the files as ids. Can be
    pickled; each worker opens the store for itself.

    Args:
        url: The store: a folder or any URL. It has `document_ids` and `token_ids`.
        layers: Which layers, in this order: labels, or pairs (label, hook point); default: all. vLLM's id of a layer is the label + 1.
        storage_options: What fsspec hands to the file system.
    """

    def __init__(
        self, url: str, *, layers: Layers = "all", storage_options: Mapping[str, object] | None = None
    ) -> None:
        self._url, self._options = url, storage_options
        self._layers: Layers = layers
        self._store: ShardStore | None = None

    def setup(self) -> None:
        """Open the store. Without this call the first sample does.

        Raises:
            NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
            LayerNotFoundError: a layer was not recorded.
            SelectionError: the store has no documents, or no token ids.
        """
        self._opened()

    def _opened(self) -> ShardStore:
        """The store, opened by this object once."""
        if self._store is None:
            store = ShardStore.open(self._url, self._options)
            store.sel(layer=self._layers, tokens="content")
            missing = [name for name in ("document_ids", "token_ids") if name not in store.token_arrays]
            if missing:
                raise SelectionError(
                    f"the store has no {missing[0]}; its token arrays are {list(store.token_arrays)}",
                    where=self._url,
                    remedy="Record texts, or import hidden states, with document and token ids.",
                )
            self._store = store
        return self._store

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_store": None}

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """A sample: `hidden_states` (tokens, layers, d_model) of the stored dtype, and `token_ids` int64 (tokens,); None if there is none.

        Raises:
            ArgumentError: `file_idx` is no integer.
            CorruptShardError: a shard with its tokens is missing or short.
        """
        if isinstance(file_idx, bool) or not isinstance(file_idx, Integral):
            raise ArgumentError(f"file_idx is {brief(file_idx)}; it must be an integer", where="file_idx")
        store = self._opened()
        try:
            document = store.document(file_idx, layer=self._layers, dtype="stored")
        except SelectionError:  # no token of it
            return None
        ids = torch.from_numpy(document.token_arrays["token_ids"].astype("int64"))  # pyright: ignore[reportUnknownMemberType]  # torch says nothing about the array
        return {"hidden_states": tensor_of(document.acts.swapaxes(0, 1).copy()), "token_ids": ids}

    def get_generated(self, hs_transfer_params: Mapping[str, object]) -> dict[str, torch.Tensor] | None:
        """A store generates nothing.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"a sample was to be generated ({sorted(hs_transfer_params)}), but a store has what was recorded",
            where=self._url,
            remedy="Record or import all samples first, or train with a backend that asks a server.",
        )

    def delete(self, handle: str) -> None:
        """Does nothing: samples of a store are not temporary."""


class StoreBackend:
    """The backend that `register` registers: options on the command line of a training script, and the transfer that they mean."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add `--saev-store` and `--saev-store-layers`."""
        parser.add_argument("--saev-store", default=None, help="store with the hidden states (default: the data path)")
        parser.add_argument(
            "--saev-store-layers", nargs="+", default=None, help="labels, or label:hook_point (default: all layers)"
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add nothing: there is no server to launch."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:
        """The transfer that the options mean.

        Raises:
            ArgumentError: a layer is neither a label nor label:hook_point.
        """
        url, given = cast("str | None", args.saev_store), cast("list[str] | None", args.saev_store_layers)
        return StoreTransfer(url or data_path, layers="all" if given is None else [_layer(text) for text in given])

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, object]:
        """A server does not write into a store.

        Raises:
            ArgumentError: always.
        """
        del args
        raise ArgumentError(
            "a server is to be configured, but hidden states of a store are already there",
            where=NAME,
            remedy="Launch vLLM with the file backend, and import what it writes: saev-store import.",
        )


def _layer(text: str) -> LayerKey:
    """A label, or label:hook_point."""
    label, colon, hook_point = text.partition(":")
    if not re.fullmatch("-?[0-9]{1,9}", label) or (colon and not hook_point):
        raise ArgumentError(
            f"{text!r} is not a layer; it must be a label such as 5, or 5:mlp_out", where="--saev-store-layers"
        )
    return (int(label), hook_point) if colon else int(label)


def register() -> type[StoreBackend]:
    """Make hs-connectors know the backend "saev_store"; doing it again changes nothing.

    Raises:
        MissingDependencyError: hs-connectors is not installed.
        ArgumentError: another backend has this name.
    """
    need("hs_connectors", install="hs-connectors", where="register")
    connectors = cast("_Connectors", importlib.import_module("hs_connectors"))
    if connectors.HiddenStatesBackend.registry.setdefault(NAME, StoreBackend) is not StoreBackend:
        raise ArgumentError(f"hs-connectors already has another backend {NAME!r}", where="register")
    connectors.HiddenStatesTransfer.register(StoreTransfer)  # isinstance() holds
    return StoreBackend


class _Backends(Protocol):
    """`HiddenStatesBackend` of hs-connectors."""

    registry: dict[str, type]


class _Connectors(Protocol):
    """The module hs_connectors, which is not installed where types are checked."""

    HiddenStatesBackend: _Backends
    HiddenStatesTransfer: ABCMeta
