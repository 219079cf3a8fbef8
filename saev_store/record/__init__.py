"""Recording: writes activations of a vision transformer into a store, each block's output under its own label.

```python
from saev_store.record import Batches, record_to_store

store = record_to_store(model, Batches(images, batch_size=32), "/scratch/shards", layers=(3, 7, 11),
                        max_tokens_per_shard=2_400_000, data={"__class__": "ImageFolder"}, dataset="/data/birds")
```

Needs the extra `record` (torch and transformers), which is imported by calls only.
"""

from saev_store.record._dump import Batches, record_to_store
from saev_store.record._hooks import Recorder
from saev_store.record._photos import Photographs, load_photographs
from saev_store.record.demo import DemoResult, run_demo

__all__ = ["Batches", "DemoResult", "Photographs", "Recorder", "load_photographs", "record_to_store", "run_demo"]
