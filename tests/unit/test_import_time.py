"""`import saev_store` stays light: no heavy library may be loaded by it. Loaded modules are counted, never seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests/data/saev/v2_1_head_labels_cls/store/saev/shards/941cc259"

HEAVY = {
    "aiobotocore", "aiohttp", "boto3", "botocore", "dask", "fsspec", "gcsfs", "IPython", "matplotlib", "obstore",
    "pandas", "PIL", "rich", "s3fs", "skimage", "torch", "tqdm", "transformers", "typer", "xarray", "zarr",
}  # fmt: skip


def loaded_by(code: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter after `code`."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S
    )
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    loaded = loaded_by("import saev_store")
    assert "saev_store" in loaded
    assert not loaded & HEAVY


def test_looking_at_a_local_store_loads_nothing_heavy_either():
    """Opening, the card, reading, selecting and a deep validation need no client, no framework and no Zarr."""
    loaded = loaded_by(
        "from saev_store import ShardStore\n"
        f"store = ShardStore.open({str(SAMPLE)!r})\n"
        "repr(store), store._repr_html_(), store[0, 0, 0], store.sel(layer=5)[:4], store.labels\n"
        "store.validate(deep=True, progress=False)"
    )
    assert not loaded & HEAVY
