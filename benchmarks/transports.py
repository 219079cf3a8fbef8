"""Ranges, arrays, batches and uploads of this package against the bare peers of `bare.py`, on the same files in the same rounds.

    python benchmarks/transports.py [--late 30] [--gbit 4] [--tls] [--only PART …] [--mib 256] [--rounds 9] [--json]

Public names only, so that the package as it was (`oracle.sh`) runs the same script. A ratio is ours to theirs: of speed where the
goal begins with ">=", of time where it begins with "<=". CPU is that of this process for each GB. See `bare.py` for the line.

* ranges: `Transport.get_ranges`, each range in memory of its own, none near another.
* read: `store.read(out=)` of twice `--mib` from a bucket, against a loop that fills the same memory with 8 MiB ranges.
* loader: an epoch of shuffled batches from a bucket, window of half the store, against its bytes in 8 MiB ranges that are dropped.
* upload: a store of one shard from memory to a bucket, against one multipart upload.
* local: files in memory. A vector as a copy, random rows, a scan, opening 10,000 shards.

Needs `saev-store[obstore]`, and what `bare.py` needs.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import bare
import numpy as np
from bare import Bucket, Rate, race

import saev_store
from saev_store import ShardStore, loaders, new_metadata
from saev_store.transport import open_transport

LAYERS, LAYER_IDX, TOKENS, BATCH_ROWS = (2, 5, 11), 1, 197, 4096
N_SHARDS = 4
Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One comparison; goals are those of speed or time, and of CPU."""

    what: str
    ours: Rate
    theirs: Rate
    goal: str = ""
    cpu_goal: str = ""

    @property
    def ratio(self) -> float:
        """Of speed, or of time where the goal is an upper limit."""
        ratio = self.ours.wall_s / self.theirs.wall_s
        return ratio if self.goal.startswith("<=") else 1 / ratio

    @property
    def cpu_ratio(self) -> float:
        return self.ours.cpu_s / self.theirs.cpu_s


def make_metadata(n_examples: int, per_shard: int, *, layers: tuple[int, ...] = LAYERS, tokens: int = TOKENS, d_model: int = bare.D_MODEL):  # fmt: skip
    return new_metadata(
        family="clip", ckpt="benchmark", layers=layers, content_tokens_per_example=tokens - 1, cls_token=True,
        d_model=d_model, n_examples=n_examples, max_tokens_per_shard=per_shard * tokens * len(layers),
    )  # fmt: skip


def make_store(root: Path, nbytes: int) -> Path:
    """A store of standard normal numbers in four shards."""
    per_example = len(LAYERS) * TOKENS * bare.D_MODEL
    per_shard = nbytes // N_SHARDS // (4 * per_example)
    metadata, rng = make_metadata(N_SHARDS * per_shard, per_shard), np.random.default_rng(17)
    with ShardStore.create(root, metadata, progress=False) as writer:
        for _ in range(N_SHARDS):
            writer.append(rng.standard_normal((per_shard, len(LAYERS), TOKENS, bare.D_MODEL), np.float32))
    return root / metadata.hash


def shard_sizes(folder: Path) -> dict[str, int]:
    """The keys and sizes of a store's shards."""
    return {f"{folder.name}/{path.name}": path.stat().st_size for path in sorted(folder.glob("acts*.bin"))}


def compare(what: str, ours: Run, theirs: Run, nbytes: int, rounds: int, goal: str = "", cpu_goal: str = "") -> Row:
    found = race({"ours": ours, "theirs": theirs}, nbytes, rounds)
    return Row(what, found["ours"], found["theirs"], goal, cpu_goal)


# -- the parts ------------------------------------------------------------------------------------------------------


def ranges(place: Bucket, objects: Path, nbytes: int, rounds: int) -> Iterator[Row]:
    """Ranges too far apart to be read in one request, in random order."""
    transport = open_transport("s3://b", place.options, engine="obstore")
    for size in bare.SIZES:
        key, step = f"k{size}", size + (4 << 20)
        starts = (np.random.default_rng(5).permutation(nbytes // size) * step).tolist()
        with (objects / key).open("wb") as file:
            for start in starts:
                file.seek(start)
                file.write(os.urandom(size))
        ends = [start + size for start in starts]
        pieces = list(map(bare.Piece, itertools.repeat(key), starts, ends))
        ours, theirs = transport.get_ranges(key, starts=starts, ends=ends), bare.keep(place.store, pieces)
        assert all(bytes(a) == bytes(b) for a, (b, _) in zip(ours, theirs, strict=True))
        del ours, theirs
        yield compare(
            f"ranges of {size >> 10} KiB",
            lambda key=key, starts=starts, ends=ends: transport.get_ranges(key, starts=starts, ends=ends),
            lambda pieces=pieces: bare.keep(place.store, pieces),
            nbytes, rounds, *(("", "") if size < 1 << 20 else (">= 0.9", "<= 1.4")),
        )  # fmt: skip
        (objects / key).unlink()


def read(place: Bucket, folder: Path, rounds: int) -> Row:
    """The first half of the store: two shards."""
    store = ShardStore.open(f"s3://b/{folder.name}", storage_options=place.options, engine="obstore")
    pieces = bare.whole(dict(list(shard_sizes(folder).items())[: N_SHARDS // 2]))
    out = np.ones((len(store) // 2, *store.shape[1:]), np.float32)
    memory = memoryview(out.reshape(-1).view(np.uint8))
    half = slice(len(out))
    store.read(half, out=out)
    digest = out.view(np.uint32).sum()
    bare.fill(place.store, pieces, memory)
    assert digest == out.view(np.uint32).sum()
    return compare(
        f"store.read(out=) of {out.nbytes >> 20} MiB",
        lambda: store.read(half, out=out),
        lambda: bare.fill(place.store, pieces, memory),
        out.nbytes, rounds, ">= 0.9",
    )  # fmt: skip


def loader(place: Bucket, folder: Path, rounds: int) -> Row:
    store = ShardStore.open(f"s3://b/{folder.name}", storage_options=place.options, engine="obstore")
    rows, pieces = store.sel(tokens="all"), bare.whole(shard_sizes(folder))
    options = {"batch_size": BATCH_ROWS, "window_bytes": store.nbytes // 2}
    made = (
        loaders.ShuffledLoader(rows, **options)
        if hasattr(loaders, "ShuffledLoader")
        else loaders.Loader(rows, **options)
    )

    def epoch() -> None:
        assert sum(len(batch["act"]) for batch in made) * bare.D_MODEL * 4 == store.nbytes

    with made:
        return compare(
            "shuffled loader", epoch, lambda: bare.drop(place.store, pieces), store.nbytes, rounds, ">= 0.85", "<= 1.4"
        )


def upload(place: Bucket, nbytes: int, rounds: int) -> Row:
    per_example = len(LAYERS) * TOKENS * bare.D_MODEL * 4
    acts = np.random.default_rng(17).standard_normal(
        (nbytes // per_example, len(LAYERS), TOKENS, bare.D_MODEL), np.float32
    )
    flat, attempts = acts.reshape(-1).view(np.uint8), itertools.count()
    metadata = make_metadata(len(acts), len(acts))

    def ours() -> None:
        url = f"s3://b/attempt{next(attempts)}"
        with ShardStore.create(url, metadata, storage_options=place.options, progress=False) as writer:
            for start in range(0, len(acts), 16):
                writer.append(acts[start : start + 16])

    return compare(
        f"a store of {nbytes >> 20} MiB", ours, lambda: bare.upload(place.store, flat), flat.nbytes, rounds, ">= 0.5"
    )


def local(folder: Path, rounds: int) -> Iterator[Row]:
    store = ShardStore.open(folder)
    paths = sorted(folder.glob("acts*.bin"))
    maps, per_shard = [bare.open_map(path) for path in paths], len(store) // N_SHARDS
    keys = [(i * 7 % per_shard, i % len(LAYERS), i * 31 % TOKENS) for i in range(16_384)]
    flat = np.ravel_multi_index(np.transpose(keys), store.shape[:3]).tolist()

    def one_by_one() -> None:
        for key in keys:
            store[key]

    one_nbytes = len(keys) * bare.D_MODEL * 4
    yield compare("one vector", one_by_one, lambda: bare.copy_vectors(maps[0], flat), one_nbytes, rounds, "<= 1.0")
    for n_shards in (1, N_SHARDS):
        rows = store.sel(layer=LAYERS[LAYER_IDX], tokens="content", examples=slice(n_shards * per_shard))
        picks = np.random.default_rng(3).integers(0, len(rows), 16_384)
        example, token = np.divmod(picks, TOKENS - 1)
        numbers = (example * len(LAYERS) + LAYER_IDX) * TOKENS + 1 + token
        np.testing.assert_array_equal(rows[picks], bare.gather(maps[:n_shards], numbers))
        yield compare(
            f"16,384 random rows of {n_shards} shard(s)",
            lambda rows=rows, picks=picks: rows[picks],
            lambda n_shards=n_shards, numbers=numbers: bare.gather(maps[:n_shards], numbers),
            len(picks) * bare.D_MODEL * 4, rounds, "<= 1.0",
        )  # fmt: skip
    out = np.ones((16, *store.shape[1:]), np.float32)

    def scan() -> None:
        for start in range(0, len(store), len(out)):
            store.read(slice(start, start + len(out)), out=out[: len(store) - start])

    memory = memoryview(out.reshape(-1).view(np.uint8))
    yield compare("full scan", scan, lambda: bare.scan(paths, memory), store.nbytes, rounds, ">= 0.95")


def opening(root: Path, rounds: int, n_shards: int = 10_000) -> Row:
    metadata = make_metadata(n_shards, 1, layers=(2,), tokens=5, d_model=8)
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(np.zeros((n_shards, 1, 5, 8), np.float32))
    folder = root / metadata.hash
    documents = [folder / "metadata.json", folder / "shards.json"]
    shards = [str(path) for path in sorted(folder.glob("acts*.bin"))]
    assert len(shards) == n_shards
    return compare(
        f"opening {n_shards:,} shards", lambda: ShardStore.open(folder), lambda: bare.stats(documents, shards),
        n_shards * 160, rounds, "<= 1.5",
    )  # fmt: skip


PARTS = ("ranges", "read", "loader", "upload", "local", "opening")


def show(rows: list[Row]) -> None:
    print(
        f"{'what':32} {'MB/s':>7} {'theirs':>7} {'ratio':>6} {'goal':>7} {'CPU s/GB':>9} {'theirs':>7} {'ratio':>6} {'goal':>7} "
        f"{'spread':>7}"
    )
    for row in rows:
        print(
            f"{row.what:32} {row.ours.mb_s:7.0f} {row.theirs.mb_s:7.0f} {row.ratio:6.2f} {row.goal:>7} "
            f"{row.ours.cpu_s_gb:9.2f} {row.theirs.cpu_s_gb:7.2f} {row.cpu_ratio:6.2f} {row.cpu_goal:>7} "
            f"{max(row.ours.spread, row.theirs.spread):7.0%}"
        )


def main() -> None:
    parser = bare.line_arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    bare.on_a_line(options.gbit)
    nbytes, rounds, rows = options.mib << 20, options.rounds, list[Row]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        (objects := Path(root, "b")).mkdir()
        folder = make_store(objects, 4 * nbytes)
        with bare.bucket(Path(root), options) as place:
            if "ranges" in options.only:
                rows += ranges(place, objects, nbytes, rounds)
            if "read" in options.only:
                rows.append(read(place, folder, rounds))
            if "loader" in options.only:
                rows.append(loader(place, folder, rounds))
            if "upload" in options.only:
                rows.append(upload(place, nbytes, rounds))
        if "local" in options.only:
            rows += local(folder, 3 * rounds)
        if "opening" in options.only:
            rows.append(opening(Path(root), rounds))
    if options.json:
        print(json.dumps([{**asdict(row), "ratio": row.ratio, "cpu_ratio": row.cpu_ratio} for row in rows]))
        return
    line = f"{options.gbit:g} Gbit/s" if options.gbit else "loopback"
    print(f"{options.late:g} ms, {line}, TLS {options.tls}, load {os.getloadavg()[0]:.1f}, {saev_store.__file__}")
    show(rows)


if __name__ == "__main__":
    main()
