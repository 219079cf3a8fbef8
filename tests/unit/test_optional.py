"""Optional libraries: what is missing is named, and what installs it."""

from __future__ import annotations

import pytest

from saev_store._runtime.optional import need
from saev_store.errors import MissingDependencyError


@pytest.mark.parametrize("where", [None, "store.as_dask()"])
def test_the_library_that_is_missing_is_named(tmp_path, monkeypatch, where):
    """It may be one that the library needs itself."""
    (tmp_path / "saev_outer_library.py").write_text("import saev_inner_library")
    monkeypatch.syspath_prepend(tmp_path)
    for module, missing in (
        ("saev_outer_library", "saev_inner_library"),
        ("saev_inner_library", "saev_inner_library"),
    ):
        with pytest.raises(MissingDependencyError) as caught:
            need(module, install="saev-store[dask]", where=where)
        assert caught.value.message == f"{missing} is not installed"
        assert (caught.value.where, caught.value.remedy) == (where or module, "Run: pip install 'saev-store[dask]'.")
    need("json", install="nothing")
