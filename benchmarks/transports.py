"""Ranges, arrays, batches and uploads of this package against the bare peers of `bare.py`, on the same files in the same rounds.

    python benchmarks/transports.py [--late 30] [--gbit 4] [--tls] [--only PART …] [--mib 256] [--rounds 9]

The bucket is `_far_server.py`, a process of its own on this machine that shares the cores. `--late` answers so many milliseconds
late, `--gbit` puts client and server on one line of that speed, `--tls` puts nginx before the server. A ratio is ours to theirs:
of speed where the goal begins with ">=", of time where it begins with "<=". CPU is that of this process, without the server's.

* ranges: `Transport.get_ranges`, each range in memory of its own, none near another.
* read: `store.read(out=)` of twice `--mib` from a bucket, against a loop that fills the same memory with 8 MiB ranges.
* loader: an epoch of shuffled batches from a bucket, window of half the store, against its bytes in 8 MiB ranges that are dropped.
* upload: a store of one shard from memory to a bucket, against one multipart upload.
* local: files in memory. A vector as a copy, random rows, a scan, opening 10,000 shards.

Needs `saev-store[obstore]`; `--tls` also nginx and cryptography, `--gbit` root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import bare
import numpy as np
from _common import D_MODEL, LAYER, LAYERS, TOKENS, Line, compare, make_store, report
from _far_server import on_a_line, serve, serve_tls

from saev_store import ShardStore, new_metadata
from saev_store.loaders import Loader
from saev_store.transport import open_transport

if TYPE_CHECKING:
    from obstore.store import S3Store

N_SHARDS = 4
PARTS = ("ranges", "read", "loader", "upload", "local", "opening")


class Bucket(NamedTuple):
    """The bucket `b`: obstore's client, and the options with which our store reaches the same."""

    store: S3Store
    options: dict[str, object]


@contextlib.contextmanager
def bucket(folder: Path, line: argparse.Namespace) -> Iterator[Bucket]:
    """A bucket `b` whose objects are the files of `folder/b`, behind the line that the command asks for."""
    from obstore.store import S3Store

    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(serve(folder, line.late / 1000))
        client: dict[str, object] = {
            "allow_http": True, "timeout": timedelta(seconds=120), "pool_max_idle_per_host": str(bare.IN_FLIGHT),
        }  # fmt: skip
        options: dict[str, object] = {"key": "k", "secret": "s"}
        if line.tls:
            sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
            from tls import make_certificates

            certificates = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            authority = Path(make_certificates(certificates).authority)
            endpoint = stack.enter_context(serve_tls(endpoint, certificates))
            client["root_certificate"] = authority.read_text()
            options["client_kwargs"] = {"verify": str(authority)}
        store = S3Store(
            "b", access_key_id="k", secret_access_key="s", endpoint=endpoint, region="us-east-1", client_options=client
        )
        yield Bucket(store, {**options, "endpoint_url": endpoint})


def write_store(root: Path, nbytes: int) -> Path:
    """A store of standard normal numbers in equal shards, by our writer: maps of files by `tofile` were at times half as fast."""
    per_example = TOKENS * len(LAYERS) * D_MODEL * 4
    per_shard = nbytes // N_SHARDS // per_example
    metadata = new_metadata(
        family="clip", ckpt="benchmark", layers=LAYERS, content_tokens_per_example=TOKENS - 1, cls_token=True,
        d_model=D_MODEL, n_examples=N_SHARDS * per_shard, max_tokens_per_shard=per_shard * TOKENS * len(LAYERS),
    )  # fmt: skip
    rng = np.random.default_rng(17)
    with ShardStore.create(root, metadata, progress=False) as writer:
        for _ in range(N_SHARDS):
            writer.append(rng.standard_normal((per_shard, len(LAYERS), TOKENS, D_MODEL), np.float32))
    return root / metadata.hash


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("acts*.bin"))


def covered(paths: list[Path]) -> list[bare.Piece]:
    """Ranges that cover shards in the bucket."""
    return bare.whole({f"{path.parent.name}/{path.name}": path.stat().st_size for path in paths})


# -- the parts ------------------------------------------------------------------------------------------------------


def ranges(place: Bucket, objects: Path, nbytes: int, rounds: int) -> Iterator[Line]:
    """Ranges too far apart to be read in one request, in random order."""
    transport = open_transport("s3://b", place.options, engine="obstore")
    for size in (8 << 20, 1 << 20, 256 << 10):
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


def read(place: Bucket, folder: Path, rounds: int) -> Line:
    """Two of four shards."""
    store = ShardStore.open(f"s3://b/{folder.name}", storage_options=place.options, engine="obstore")
    pieces = covered(shards(folder)[:2])
    half = slice(2 * store.layout.examples_per_shard)
    out = np.ones((half.stop, *store.shape[1:]), np.float32)
    memory = memoryview(out.reshape(-1).view(np.uint8))
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


def loader(place: Bucket, folder: Path, rounds: int) -> Line:
    store = ShardStore.open(f"s3://b/{folder.name}", storage_options=place.options, engine="obstore")
    pieces = covered(shards(folder))
    with Loader(store.sel(tokens="all"), batch_size=4096, window_bytes=store.nbytes // 2) as made:

        def epoch() -> None:
            assert sum(len(batch["act"]) for batch in made) * D_MODEL * 4 == store.nbytes

        return compare(
            "shuffled loader", epoch, lambda: bare.drop(place.store, pieces), store.nbytes, rounds, ">= 0.85", "<= 1.4"
        )


def upload(place: Bucket, root: Path, nbytes: int, rounds: int) -> Line:
    folder, metadata = make_store(root, n_bytes=nbytes, n_shards=1, layers=LAYERS)
    acts, attempts = ShardStore.open(folder)[:], itertools.count()
    flat = acts.reshape(-1).view(np.uint8)

    def ours() -> None:
        url = f"s3://b/attempt{next(attempts)}"
        with ShardStore.create(url, metadata, storage_options=place.options, progress=False) as writer:
            for start in range(0, len(acts), 16):
                writer.append(acts[start : start + 16])

    return compare(
        f"a store of {nbytes >> 20} MiB", ours, lambda: bare.upload(place.store, flat), flat.nbytes, rounds, ">= 0.5"
    )


def local(folder: Path, rounds: int) -> Iterator[Line]:
    store, paths = ShardStore.open(folder), shards(folder)
    maps, per_shard = [bare.open_map(path) for path in paths], store.layout.examples_per_shard
    keys = [(i * 7 % per_shard, i % len(LAYERS), i * 31 % TOKENS) for i in range(16_384)]
    flat = np.ravel_multi_index(np.transpose(keys), store.shape[:3]).tolist()

    def one_by_one() -> None:
        for key in keys:
            store[key]

    nbytes = len(keys) * D_MODEL * 4
    yield compare("one vector", one_by_one, lambda: bare.copy_vectors(maps[0], flat), nbytes, rounds, "<= 1.0")
    for n_shards in (1, N_SHARDS):
        rows = store.sel(layer=LAYER, tokens="content", examples=slice(n_shards * per_shard))
        picks = np.random.default_rng(3).integers(0, len(rows), 16_384)
        example, token = np.divmod(picks, TOKENS - 1)
        numbers = (example * len(LAYERS) + LAYERS.index(LAYER)) * TOKENS + 1 + token
        np.testing.assert_array_equal(rows[picks], bare.gather(maps[:n_shards], numbers))
        yield compare(
            f"16,384 random rows of {n_shards} shard(s)",
            lambda rows=rows, picks=picks: rows[picks],
            lambda n_shards=n_shards, numbers=numbers: bare.gather(maps[:n_shards], numbers),
            nbytes, rounds, "<= 1.0",
        )  # fmt: skip
    out = np.ones((16, *store.shape[1:]), np.float32)

    def scan() -> None:
        for start in range(0, len(store), len(out)):
            store.read(slice(start, start + len(out)), out=out[: len(store) - start])

    memory = memoryview(out.reshape(-1).view(np.uint8))
    yield compare("full scan", scan, lambda: bare.scan(paths, memory), store.nbytes, rounds, ">= 0.95")


def opening(root: Path, rounds: int, n_shards: int = 10_000) -> Line:
    folder, metadata = make_store(root, n_bytes=0, n_shards=n_shards, layers=(2,), tokens=4, d_model=8)
    documents = [folder / "metadata.json", folder / "shards.json"]
    names = list(map(str, shards(folder)))
    return compare(
        f"opening {n_shards:,} shards", lambda: ShardStore.open(folder), lambda: bare.stats(documents, names),
        metadata.layout.nbytes, rounds, "<= 1.5",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--mib", type=int, default=256, help="a quarter of the store, and what ranges and uploads move")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--late", type=float, default=0, metavar="MS", help="latency of each answer")
    parser.add_argument("--gbit", type=float, default=0, help="a line of so many Gbit/s for all connections together")
    parser.add_argument("--tls", action="store_true", help="through nginx, with a certificate made for the run")
    options = parser.parse_args()
    on_a_line(options.gbit)
    nbytes, rounds, lines = options.mib << 20, options.rounds, list[Line]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        root, objects = Path(name), Path(name, "b")
        folder = write_store(objects, 4 * nbytes)
        with bucket(root, options) as place:
            if "ranges" in options.only:
                lines += ranges(place, objects, nbytes, rounds)
            if "read" in options.only:
                lines.append(read(place, folder, rounds))
            if "loader" in options.only:
                lines.append(loader(place, folder, rounds))
            if "upload" in options.only:
                lines.append(upload(place, root, nbytes, rounds))
        if "local" in options.only:
            lines += local(folder, 3 * rounds)
        if "opening" in options.only:
            lines.append(opening(root, rounds))
    line = f"{options.gbit:g} Gbit/s" if options.gbit else "loopback"
    report(lines, {"late_ms": options.late, "line": line, "tls": options.tls, "load": f"{os.getloadavg()[0]:.1f}"})


if __name__ == "__main__":
    main()
