"""What may be appended: one array for each layer, tensors bit for bit, numbers at the limits of 16 bits."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.errors import ArgumentError

META = {
    "family": "gpt2", "ckpt": "x", "layers": (5, 2, 5), "hook_points": ["resid_post", "attn.z", "attn_out"],
    "content_tokens_per_example": 3, "cls_token": True, "d_model": 4, "n_examples": 6, "max_tokens_per_shard": 36,
}  # fmt: skip
PLAIN = {"hook_points": None, "layers": (5, 2, 7)}
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
#: Bits that a way through another dtype or through arithmetic would change, by dtype.
ODD_BITS = {
    "bfloat16": [0x7FC1, 0x7F81, 0xFFAA, 0x0001, 0x8001, 0x007F, 0x8000, 0x7F80, 0xFF80, 0x7F7F, 0x0080, 0x3F81],
    "float16": [0x7E01, 0x7C01, 0xFDAA, 0x0001, 0x8001, 0x03FF, 0x8000, 0x7C00, 0xFC00, 0x7BFF, 0x0400, 0x3C01],
    "float32": [
        0x7FC00001, 0x7F800001, 0xFFAAAAAA, 1, 0x80000001, 0x007FFFFF, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF,
        0x00800000, 0x3F800001,
    ],
}  # fmt: skip


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def odd_numbers(dtype: str) -> np.ndarray:
    """(6, 3, 4, 4) numbers, all of the odd ones at every place of a vector."""
    unsigned = np.dtype(f"u{DTYPES[dtype].itemsize}")
    return np.resize(np.array(ODD_BITS[dtype], unsigned), (6, 3, 4, 4)).view(DTYPES[dtype])


def written(root, batches, dtype, **changes) -> np.ndarray:
    metadata = new_metadata(**META | changes, dtype=dtype)
    with ShardStore.create(root, metadata, on_nonfinite="allow", progress=False) as writer:
        for batch in batches:
            writer.append(batch)
    return ShardStore.open(root / metadata.hash).read(dtype="stored")


# -- one array for each layer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_by_any_name(tmp_path, dtype):
    acts = odd_numbers(dtype)
    resid, z, attn = acts.swapaxes(0, 1)
    batches = [
        {(5, "attn_out"): attn[:2], (2, "attn.z"): z[:2], (5, "resid_post"): resid[:2]},
        {"blocks.5.hook_resid_post": resid[2:4], "blocks.5.hook_attn_out": attn[2:4], "blocks.2.attn.hook_z": z[2:4]},
        {"blocks.2.attn.z": z[4], "blocks.5.resid_post": resid[4], "blocks.5.attn_out": attn[4]},
        {2: z[5:], (5, "resid_post"): resid[5:], "blocks.5.hook_attn_out": attn[5:]},
    ]
    assert np.array_equal(bits(written(tmp_path, batches, dtype)), bits(acts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_tensors(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    acts = odd_numbers(dtype)
    whole = torch.from_numpy(bits(acts).view(f"i{acts.dtype.itemsize}")).view(getattr(torch, dtype))
    names = ["blocks.5.hook_resid_post", "blocks.2.hook_resid_post", "blocks.7.hook_resid_post"]
    batches = [
        {name: whole[:3, position] for position, name in enumerate(names)},
        {5: whole[3:, 0], 2: whole[3:, 1], 7: whole[3:, 2]},
    ]
    assert np.array_equal(bits(written(tmp_path, batches, dtype, **PLAIN)), bits(acts))


def test_mappings_that_are_not_the_layers_of_the_store(tmp_path):
    metadata = new_metadata(**META, dtype="bfloat16")
    writer = ShardStore.create(tmp_path, metadata, progress=False)
    one = np.zeros((2, 4, 4), np.float32)
    whole = {(5, "resid_post"): one, 2: one, (5, "attn_out"): one}
    for change, match in (
        ({5: one}, r"5 is not one of the layers \[\(5, 'resid_post'\), \(2, 'attn.z'\), \(5, 'attn_out'\)\]"),
        ({"blocks.3.hook_resid_post": one}, "'blocks.3.hook_resid_post' is not one of the layers"),
        ({"hook_embed": one}, "'hook_embed' is not one of"),
        ({True: one}, "True is not one of"),
        ({"blocks.2.attn.hook_z": one}, r"2 and 'blocks.2.attn.hook_z' both stand for layer \(2, 'attn.z'\)"),
        ({2: one[:1]}, r"2 has shape \(1, 4, 4\); each layer must have the same \(k, 4, 4\)"),
        ({2: one[:, 1:]}, r"2 has shape \(2, 3, 4\)"),
        ({2: one[0]}, r"2 has shape \(4, 4\)"),
        ({2: one.astype(np.float16)}, r"2 is float16, \(5, 'resid_post'\) is float32"),
        ({2: "words"}, "2 has shape"),
        ({2: [[1.0], [1.0, 2.0]]}, "does not become a NumPy array"),
    ):
        with pytest.raises(ArgumentError, match=match):
            writer.append(whole | change)
    for missing in whole:
        with pytest.raises(ArgumentError, match="is missing; a store has all of its layers"):
            writer.append({name: value for name, value in whole.items() if name != missing})
    with pytest.raises(ArgumentError, match=r"layer \(5, 'resid_post'\) is missing"):
        writer.append({})
    assert writer.n_written == 0
    writer.append(whole)
    assert writer.n_written == 2
    writer.close()


def test_a_repair_takes_layers_too(tmp_path):
    acts = np.random.default_rng(0).standard_normal((6, 3, 4, 4)).astype(np.float32)
    assert np.array_equal(written(tmp_path, [acts], "float32", **PLAIN), acts)
    path = tmp_path / new_metadata(**META | PLAIN).hash
    (path / "acts000001.bin").unlink()
    with ShardStore.open(path, damaged_ok=True).repair() as repair:
        ((first, end),) = repair.missing
        repair.append({label: acts[first:end, position] for position, label in enumerate((5, 2, 7))})
    assert np.array_equal(ShardStore.open(path)[...], acts)


# -- tensors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_strides_are_written_bit_for_bit(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    acts = odd_numbers(dtype)
    whole = torch.from_numpy(bits(acts).view(f"i{acts.dtype.itemsize}")).view(getattr(torch, dtype))
    doubled = torch.zeros((12, 3, 8, 4), dtype=whole.dtype)
    doubled[::2, :, ::2] = whole
    views = {
        "contiguous": whole,
        "transposed": whole.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "every second": doubled[::2, :, ::2],
        "one by one": [row.clone() for row in whole],
        "of a graph": whole.clone().requires_grad_().permute(0, 1, 2, 3),
        "a parameter": torch.nn.Parameter(whole.clone()),
    }
    for name, view in views.items():
        batches = view if isinstance(view, list) else [view[:1], view[1:]]
        found = written(tmp_path / name, batches, dtype)
        assert np.array_equal(bits(found), bits(acts)), name


# -- limits ---------------------------------------------------------------------------------------------------------------

#: The largest number, and a half step more: by dtype.
LIMITS = {"bfloat16": ("0x1.fep127", "0x1.ffp127"), "float16": ("0x1.ffcp15", "0x1.ffep15")}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", LIMITS)
def test_up_to_half_a_step_beyond_the_largest_number_is_rounded_down(tmp_path, dtype, sign):
    largest, half = (np.float32(float.fromhex(text)) for text in LIMITS[dtype])
    assert float(ml_dtypes.finfo(DTYPES[dtype]).max) == largest
    acts = np.zeros((6, 3, 4, 4), np.float32)
    acts[1, 2, 3] = sign * np.array(
        [largest, np.nextafter(half, np.float32(0)), np.nextafter(largest, np.float32(0)), 1]
    )
    found = written(tmp_path, [acts], dtype)
    assert found[1, 2, 3].astype(np.float64).tolist() == [sign * largest] * 3 + [sign]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("more", ["exactly half a step", "more than half a step", "much more"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_half_a_step_and_more_is_the_policy_s_matter(tmp_path, dtype, more, sign):
    largest, half = (np.float32(float.fromhex(text)) for text in LIMITS[dtype])
    value = {
        "exactly half a step": half,
        "more than half a step": np.nextafter(half, np.float32(np.inf)),
        "much more": np.finfo(np.float32).max,
    }[more]
    metadata = new_metadata(**META, dtype=dtype)
    acts = np.zeros((6, 3, 4, 4), np.float32)
    acts[4, 1, 0, 2] = sign * value
    acts[4, 1, 1] = [np.inf, -np.inf, np.nan, -0.0]  # are what they are
    for policy, stored in (("raise", None), ("warn", np.inf), ("saturate", largest)):
        writer = ShardStore.create(
            tmp_path / policy, metadata, on_overflow=policy, on_nonfinite="allow", progress=False
        )
        if stored is None:
            with pytest.raises(
                ArgumentError, match=f"example 4 holds 1 numbers that {dtype} cannot hold; the first is"
            ):
                writer.append(acts)
            assert writer.n_written == 0
            writer.close()
            continue
        if policy == "warn":
            with pytest.warns(SaevStoreWarning, match="recorded as infinity"):
                writer.append(acts)
        else:
            writer.append(acts)
        writer.close()
        found = ShardStore.open(tmp_path / policy / metadata.hash)[...]
        assert found[4, 1, 0].tolist() == [0, 0, sign * stored, 0]
        assert bits(found[4, 1, 1]).tolist() == bits(acts[4, 1, 1]).tolist()
        found[4, 1] = 0
        assert not found.any()


@pytest.mark.parametrize("policy", ["warn", "saturate"])
def test_bfloat16_numbers_that_float16_does_not_hold(tmp_path, policy):
    acts = np.zeros((6, 3, 4, 4), DTYPES["bfloat16"])
    acts[2, 0, 0] = [65280, 65536, -65536, 3e38]  # neighbours in bfloat16
    metadata = new_metadata(**META, dtype="float16")
    writer = ShardStore.create(tmp_path, metadata, on_overflow=policy, progress=False)
    if policy == "warn":
        with pytest.warns(SaevStoreWarning, match="example 2 holds 3 numbers"):
            writer.append(acts)
    else:
        writer.append(acts)
    writer.close()
    large = np.inf if policy == "warn" else 65504.0
    assert ShardStore.open(tmp_path / metadata.hash)[2, 0, 0].tolist() == [65280, large, -large, large]


@pytest.mark.parametrize("policy", ["warn", "saturate"])
@pytest.mark.parametrize(("given", "dtype"), [("bfloat16", "float16"), ("float32", "float16"), ("float32", "bfloat16")])
def test_every_number_of_the_wider_dtype_s_upper_16_bits(tmp_path, given, dtype, policy):
    """All 65,536 of them; float32 numbers with some bits below."""
    patterns = np.arange(2**16, dtype=np.uint32).reshape(32, 4, 8, 64)
    acts = (
        patterns.astype(np.uint16).view(DTYPES[given]) if given == "bfloat16" else (patterns << 16 | 0x7FFF).view("f4")
    )
    changes = {
        "layers": range(4),
        "hook_points": None,
        "content_tokens_per_example": 7,
        "d_model": 64,
        "n_examples": 32,
    }
    metadata = new_metadata(**META | changes, dtype=dtype)
    with np.errstate(all="ignore"):
        wide = acts.astype(np.float64)
        truth = acts.astype(DTYPES[dtype])
    if policy == "saturate":
        became = np.isfinite(wide) & np.isinf(truth)
        truth[became] = np.sign(wide[became]) * float(ml_dtypes.finfo(DTYPES[dtype]).max)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if policy == "warn" else "error", SaevStoreWarning)
        options = {"on_overflow": policy, "on_nonfinite": "allow", "progress": False}
        with ShardStore.create(tmp_path, metadata, **options) as writer:
            writer.append(acts)
    assert np.array_equal(bits(ShardStore.open(tmp_path / metadata.hash).read(dtype="stored")), bits(truth))


@pytest.mark.parametrize("dtype", DTYPES)
def test_signalling_nans_are_told_like_others(tmp_path, dtype):
    acts = odd_numbers(dtype)
    writer = ShardStore.create(tmp_path, new_metadata(**META, dtype=dtype), on_nonfinite="warn", progress=False)
    with pytest.warns(SaevStoreWarning, match="example 0 holds 20 values that are not finite"):
        writer.append(acts)
    writer.close()
    assert np.array_equal(bits(ShardStore.open(writer.url).read(dtype="stored")), bits(acts))


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_are_found_in_either_byte_order(tmp_path, number):
    """The two bytes of these numbers, the other way round, are those of small finite ones."""
    metadata = new_metadata(**META | PLAIN, dtype="float16")
    for order in "<>":
        acts = np.ones((6, 3, 4, 4), f"{order}f2")
        acts[4, 1, 2, 3] = number
        with ShardStore.create(tmp_path / str(ord(order)), metadata, progress=False) as writer:
            with pytest.raises(ArgumentError, match="example 4 holds 1 values that are not finite"):
                writer.append(acts)
            writer.append(np.ones((6, 3, 4, 4), f"{order}f2"))


def test_16_bits_always_fit_into_float32(tmp_path):
    for dtype in ("bfloat16", "float16"):
        acts = odd_numbers(dtype)
        with np.errstate(invalid="ignore"):
            wide = acts.astype(np.float32)
        assert np.array_equal(bits(written(tmp_path / dtype, [acts], "float32")), bits(wide))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_remedy_for_large_numbers_is_not_the_dtype_at_hand(tmp_path, dtype):
    metadata = new_metadata(**{**META, **PLAIN, "dtype": dtype})
    acts = np.full(metadata.layout.shape, 3.4e38, np.float32)
    with pytest.raises(ArgumentError) as caught, ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    other = {"bfloat16": "float32", "float16": "bfloat16"}[dtype]
    assert f" {other} has" in caught.value.remedy
    assert f" {dtype} has" not in caught.value.remedy


@pytest.mark.parametrize(("dtype", "low", "high"), [("uint8", 0, 255), ("int32", -(2**31), 2**31 - 1), ("bool", 0, 1)])
def test_numbers_of_token_arrays_up_to_the_bounds_of_their_dtype(tmp_path, dtype, low, high):
    """Given as wider integers, as tokenizers do."""
    metadata = new_metadata(**META, dtype="bfloat16", token_arrays={"some": dtype})
    values = np.resize(np.array([low, high], np.int64), (6, 3))
    acts = np.zeros((6, 3, 4, 4), np.float32)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        for wrong in (low - 1, high + 1):
            changed = values.copy()
            changed[5, 2] = wrong
            with pytest.raises(
                ArgumentError, match=f"some holds values from .*; some are integers from {low} to {high}"
            ):
                writer.append(acts, some=changed)
        writer.append(acts, some=values)
    found = ShardStore.open(writer.url).token_arrays["some"]
    assert found.dtype == dtype
    assert np.array_equal(found, values)
