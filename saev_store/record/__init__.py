"""Recording: writes activations of a transformer into a store, each hook point of each block under its own label.

Needs the extra `record` (torch and transformers), which is imported by calls only.
"""

from saev_store.record._adapt import adapt
from saev_store.record._adapters import Adapter, TextAdapter, VisionAdapter
from saev_store.record._architectures import HookPoint
from saev_store.record._estimate import RecordingEstimate, estimate_recording
from saev_store.record._examples import ExampleSource
from saev_store.record._images import Images
from saev_store.record._load import load_image_processor, load_language_model, load_vision_model
from saev_store.record._masks import Masks
from saev_store.record._part import Part, RecordedPart, finalize
from saev_store.record._record import record
from saev_store.record._recorder import Recorder
from saev_store.record._repair import RepairedRecording, repair
from saev_store.record._texts import Texts
from saev_store.record.demo import DemoResult, Photographs, load_fables, load_photographs, run_demo

__all__ = [
    "Adapter",
    "DemoResult",
    "ExampleSource",
    "HookPoint",
    "Images",
    "Masks",
    "Part",
    "Photographs",
    "RecordedPart",
    "Recorder",
    "RecordingEstimate",
    "RepairedRecording",
    "TextAdapter",
    "Texts",
    "VisionAdapter",
    "adapt",
    "estimate_recording",
    "finalize",
    "load_fables",
    "load_image_processor",
    "load_language_model",
    "load_photographs",
    "load_vision_model",
    "record",
    "repair",
    "run_demo",
]
