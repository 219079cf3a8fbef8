"""The labels of the layers of a cache, from what the caller gives."""

from __future__ import annotations

import re
from collections.abc import Sequence

from saev_store.core.arguments import check_count
from saev_store.core.layout import RESID_POST, LayerKey
from saev_store.errors import ArgumentError


def layer_axis(
    layers: Sequence[LayerKey] | None,
    layer_ids: Sequence[int] | None,
    n_layers: int,
    *,
    where: str,
    names: Sequence[str] = (),
) -> dict[str, object]:
    """`layers` and `hook_points` of a cache that does not have them.

    vLLM numbers the points between layers: the hidden states of id i enter layer i, so they are what layer i - 1 has left.

    Args:
        layers: Labels, or pairs (label, hook point).
        layer_ids: The same in vLLM's numbers.
        n_layers: Number of layers in the cache.
        where: Their place, for errors.
        names: Those that the cache has for them. Numbers that are given and in the names must come in this order.

    Raises:
        ArgumentError: they are not given, are not as many as the cache has, or are in another order than the names.

    >>> layer_axis(None, (2, 36), 2, where="hs_0.safetensors")
    {'layers': [1, 35], 'hook_points': ['resid_post', 'resid_post']}
    """
    if (layers is None) == (layer_ids is None):
        raise ArgumentError(
            f"the {n_layers} layers of the cache are not named",
            where="layers",
            remedy="Pass layers=…, as labels of blocks, or layer_ids=…, as vLLM was given them: one of the two.",
        )
    pairs = [layer if isinstance(layer, tuple) else (layer, RESID_POST) for layer in layers or ()]
    for number in layer_ids or ():
        check_count(number, name="layer_ids", least=0)
        pairs.append((number - 1, RESID_POST) if number else (0, "resid_pre"))
    if len(pairs) != n_layers:
        raise ArgumentError(f"{len(pairs)} layers are named; {where} has {n_layers}", where="layers")
    labels = [label for label, _ in pairs]
    numbers = [re.findall("[0-9]{1,9}", name) for name in names]
    for column in zip(*numbers, strict=True) if len({*map(len, numbers)}) == 1 else ():
        found = [int(number) for number in column]
        if found != labels and sorted(found) == sorted(labels):
            raise ArgumentError(
                f"the layers are given as {labels}; by their names they are {found}",
                where="layers",
                remedy="Give them in that order.",
            )
    return {"layers": labels, "hook_points": [hook_point for _, hook_point in pairs]}
