"""The public names of the packages are fixed: adding or removing one changes this file."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import saev_store

PUBLIC = {
    "saev_store": """
        Layout Metadata PairSelection Problem SaevStoreError SaevStoreWarning Selection ShardStore StorePair
        __version__ new_metadata pair
    """,
    "saev_store.cli": """
        main
    """,
    "saev_store.integrations.saev": """
        Index IndexMap IndexedConfig IndexedDataset LabelsWriter Metadata OrderedConfig OrderedDataLoader PixelAgg
        RecordedTransformer Shard ShardInfo ShardWriter ShuffledConfig ShuffledDataLoader make_ordered_config
        pixel_to_patch_labels
    """,
    "saev_store.documents": """
        COUNT_KEYS METADATA_MAX_NBYTES Metadata PROTOCOLS RECIPES SHARDS_MAX_NBYTES ShardsIndex VERSIONS
        WRITABLE_VERSIONS content_hashes match_hash new_metadata parse_json
        parse_metadata parse_shards parse_token_array_size rewriting shards_bytes
    """,
    "saev_store.export": """
        SaevParser to_virtual_dataset
    """,
    "saev_store.loaders": """
        Batch Explanation Loader LoaderOptions Mixing filtered stage
    """,
    "saev_store.order": """
        Cut Epoch Mixing ORDER_VERSION Permutation Pool derive permutation predict_mixing
    """,
    "saev_store.record": """
        Adapter DemoResult ExampleSource HookPoint Images Masks Part Photographs RecordedPart Recorder
        RecordingEstimate RepairedRecording TextAdapter Texts VisionAdapter adapt estimate_recording
        finalize load_fables load_image_processor load_language_model load_photographs load_vision_model record
        repair run_demo
    """,
    "saev_store.sources": """
        ImageFolder MapStyle Origin Source TextFile open_source recorded_from reopen
    """,
    "saev_store.sources.caches": """
        import_cache
    """,
    "saev_store.sources.energon": """
        CrudeSample EnergonDataset RawSample SAMPLE_TYPES Sample
    """,
    "saev_store.sources.llmbatch": """
        BatchFileReader BatchNativeLoader Header record_order write_batch_dataset write_batch_file
    """,
    "saev_store.sources.mmididx": """
        IndexedDataset IndexedDatasetBuilder SampleIndices TokenSamples build_indices build_sample_idx
    """,
    "saev_store.stats": """
        STATISTICS STATS_NAME Stats kept_stats moments_of store_stats
    """,
    "saev_store.store": """
        ShardStore
    """,
    "saev_store.torch": """
        BatchDataset Consumer ExampleBatch Normalization RowOptions SharedLoader StoreDataset StoreLoader StoreOptions
        tensors
    """,
    "saev_store.transport": """
        Buffer Engine Entry FileStat LocalTransport ReadCost Sink Transport open_transport
    """,
    "saev_store.validation": """
        Report Survey check_dirname check_survey merge_ranges
        quick_checks survey_store validate
    """,
    "saev_store.view": """
        View
    """,
    "saev_store.writer": """
        Digests FileDigests Leftover RepairWriter RepairedFile ShardWriter
        clean copy_store create_store discard_unfinished finalize_store load_digests open_repair
    """,
    "saev_store.xarray": """
        SaevBackend concat dataset_of open_store
    """,
    "saev_store.zarr": """
        BFloat16 ZarrView open_view
    """,
}


def declared() -> Iterator[tuple[str, list[str]]]:
    """The names in `__all__` of every module that has one, from its source."""
    root = Path(saev_store.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "_next" in path.parts:  # nothing public imports it
            continue
        found: list[str] = []
        for node in ast.parse(path.read_text()).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == "__all__":
                found += ast.literal_eval(node.value)
        if found:
            parts = path.relative_to(root.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), found


def test_exactly_these_names_are_public():
    assert {name: sorted(names) for name, names in declared()} == {
        name: sorted(PUBLIC[name].split()) for name in PUBLIC
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_once(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:  # ours, of an extra that is not installed
        pytest.skip(str(error))
    assert [
        public for public in module.__all__ if module.__all__.count(public) > 1 or not hasattr(module, public)
    ] == []


def test_a_star_import_brings_no_private_name():
    names: dict[str, object] = {}
    exec("from saev_store import *", names)
    assert set(names) - {"__builtins__"} == set(PUBLIC["saev_store"].split())
