"""How many requests it takes to write a store into a bucket; counted beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from saev_store.core.layout import Layout
from saev_store.core.token_arrays import TokenArray
from saev_store.transport.obstore import part_bytes

#: claim.json, publisher.json, shards.json, digests.json and metadata.json.
_N_DOCUMENTS = 5


def writing_requests(layout: Layout, arrays: Sequence[TokenArray] = ()) -> int:
    """PUT and POST requests for a store that one writer sends through obstore without an interruption.

    Services charge for them alike; deleting is free, and there are a few reads. fsspec sends larger parts, so fewer requests.

    Args:
        layout: The geometry of the store.
        arrays: What is recorded for each content token.

    >>> layout = Layout(n_examples=40, layers=(0,), content_tokens_per_example=4, cls_token=False, d_model=8, examples_per_shard=10)
    >>> writing_requests(layout)
    13
    """
    shards = (layout.n_shards - 1) * _upload_requests(layout.shard_nbytes)
    shards += _upload_requests(layout.used_nbytes(layout.n_shards - 1))
    # A receipt for each shard, and the token rows that become token arrays at the end.
    beside = layout.n_shards * (2 if arrays else 1)
    return shards + beside + sum(_upload_requests(array.nbytes(layout)) for array in arrays) + _N_DOCUMENTS


def _upload_requests(file_nbytes: int) -> int:
    """PUT and POST requests that a file takes: one, or one for each part, one before them and one behind.

    >>> _upload_requests(0), _upload_requests(8 << 20), _upload_requests(20 << 20)
    (1, 1, 5)
    """
    n_parts = -(-file_nbytes // part_bytes(file_nbytes))
    return n_parts + 2 if n_parts > 1 else 1
