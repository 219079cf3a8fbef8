"""Which modules have their doctests collected: those whose optional libraries are installed."""

from __future__ import annotations

from importlib.util import find_spec

#: Modules below `saev_store/` that import an extra at the top, and the library that must be there for them.
NEEDS = {
    "saev_store/torch/*": "torch",
    "saev_store/transport/_obstore.py": "obstore",
    "saev_store/xarray.py": "xarray",
    "saev_store/dask.py": "dask",
}

collect_ignore_glob = [pattern for pattern, library in NEEDS.items() if find_spec(library) is None]
