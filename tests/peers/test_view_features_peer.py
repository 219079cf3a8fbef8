"""Activations on the page are those that SAELens computes, for files that it has written."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sae_lens")
torch = pytest.importorskip("torch")
pytest.importorskip("starlette")

from saev_store.view import read_sae

SIZES = {"d_in": 24, "d_sae": 60}
KINDS = [
    ("Standard", {}),
    ("Standard", {"apply_b_dec_to_input": False, "normalize_activations": "layer_norm"}),
    ("TopK", {"k": 5}),
    ("TopK", {"k": 5, "rescale_acts_by_decoder_norm": True, "normalize_activations": "constant_norm_rescale"}),
    ("JumpReLU", {}),
    ("Gated", {}),
]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.filterwarnings("ignore")  # what SAELens and its libraries warn about is not ours
def test_activations_equal_those_of_saelens(tmp_path, kind, settings):
    import sae_lens

    settings = {"rescale_acts_by_decoder_norm": False, **settings} if kind == "TopK" else settings
    made = getattr(sae_lens, f"{kind}SAE")(getattr(sae_lens, f"{kind}SAEConfig")(**SIZES, **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for values in made.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) / 2)
        if kind == "JumpReLU":
            made.threshold.copy_(torch.rand(60, generator=generator) * 5)
        vectors = torch.randn(50, 24, generator=generator) * 3 + 1
        theirs = made.encode(vectors)
        decoded = made.decode(theirs).numpy().astype(np.float64)
        theirs = theirs.to_dense() if theirs.is_sparse else theirs
    made.save_model(str(tmp_path))
    ours = read_sae(tmp_path / "sae_weights.safetensors", d_model=24)
    np.testing.assert_allclose(ours.encode(vectors.numpy()), theirs.numpy(), rtol=1e-4, atol=1e-4)
    assert (theirs.numpy() > 0).any()
    x = vectors.numpy().astype(np.float64)
    expected = 1 - ((x - decoded) ** 2).sum() / ((x - x.mean(axis=0)) ** 2).sum()
    assert ours.variance_explained(vectors.numpy()) == pytest.approx(expected, rel=1e-4)
