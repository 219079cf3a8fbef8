"""The doctests of `saev_store/`: which are collected, and what they may use without making it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

#: Modules that import an extra at the top, and the library that must be there for them.
NEEDS = {
    "saev_store/integrations/*": "torch",
    "saev_store/record/_images.py": "torch",
    "saev_store/torch/*": "torch",
    "saev_store/xarray/*": "xarray",
    "saev_store/dask/*": "dask",
    "saev_store/view/*": "starlette",
}
#: A small store that another program wrote: shape (7, 3, 5, 8), layers (2, 5, 11), with labels.
SAMPLE = Path(__file__).parent / "tests/data/saev/v2_1_head_labels_cls/store/saev/shards/941cc259"
#: Three documents of token ids, "abc", "defg" and "hi", that Megatron wrote.
TOKENS = Path(__file__).parent / "tests/data/mmididx/core_seed_example_3_4_2_int32/data.idx"

collect_ignore_glob = [pattern for pattern, library in NEEDS.items() if find_spec(library) is None]


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    """Doctests know the names `SAMPLE` and `TOKENS`."""
    if type(request.node).__name__ == "DoctestItem":
        request.getfixturevalue("doctest_namespace").update(SAMPLE=SAMPLE, TOKENS=TOKENS)
