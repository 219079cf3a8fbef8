"""A sparse autoencoder (SAE) of a safetensors file: read, checked, and applied to vectors. NumPy only; nothing is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import numpy_dtype
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, brief
from saev_store.sources.address import full_url, locate
from saev_store.sources.safetensors import DTYPES, Tensor, read_header
from saev_store.transport import Transport
from saev_store.view._arithmetic import Singles, norms_of

#: The configuration beside the tensors, and its bytes at most.
_CONFIG, _MOST_CONFIG_NBYTES = "cfg.json", 1 << 20
#: By what is meant: the names that libraries give it. Those with a True are stored the other way round.
_SPELLINGS = {
    "encoder": (("W_enc", False), ("encoder.weight", True)),
    "encoder_bias": (("b_enc", False), ("encoder.bias", False)),
    "decoder": (("W_dec", False), ("decoder.weight", True)),
    "decoder_bias": (("b_dec", False), ("bias", False), ("decoder_bias", False)),
    "gate_bias": (("b_gate", False), ("gate_bias", False)),
    "magnitude_bias": (("b_mag", False), ("mag_bias", False)),
    "log_scale": (("r_mag", False),),
    "threshold": (("threshold", False),),
    "k": (("k", False),),
}
#: Of SAELens; it counts where `cfg.json` says so, and is in files where it does not.
_FACTOR = "scaling_factor"
#: Tensors from which nothing is computed.
_IDLE = (_FACTOR, "num_batches_not_active")
_ARCHITECTURES = ("standard", "jumprelu", "topk", "gated")
_FUNCTIONS = ("relu", "topk")
_NORMALIZATIONS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")
#: What SAELens adds to a standard deviation.
_EPSILON = 1e-5


@dataclass(frozen=True, eq=False)
class Sae:
    """A sparse autoencoder.

    Attributes:
        name: The name of its file.
        architecture: One of "standard", "jumprelu", "topk" and "gated".
        encoder: Its weights, float32 (d_model, n_features).
        encoder_bias: Float32 (n_features,); of a gated one that of the gate.
        decoder: Float32 (n_features, d_model).
        decoder_bias: Float32 (d_model,).
        is_centred: Whether the bias of the decoder is subtracted from vectors before they are encoded.
        normalize: How vectors are scaled before, as SAELens names it.
        k: How many features of a vector are active at most, for "topk".
        threshold: Smaller activations become 0, float32 (n_features,) or (1,), for "jumprelu".
        magnitude: Scale and bias of the activations, float32 (2, n_features), for "gated".
        feature_scale: What activations are multiplied with before the largest are chosen, float32 (n_features,) or (1,).
    """

    name: str
    architecture: str
    encoder: Singles
    encoder_bias: Singles
    decoder: Singles
    decoder_bias: Singles
    is_centred: bool
    normalize: str
    k: int | None
    threshold: Singles | None
    magnitude: Singles | None
    feature_scale: Singles

    @property
    def d_model(self) -> int:
        """The length of a vector."""
        return len(self.encoder)

    @property
    def n_features(self) -> int:
        """How many features it has."""
        return self.encoder.shape[1]

    def encode(self, vectors: Singles, feature: int | None = None) -> Singles:
        """Activations of all features, float32 (n, n_features), or of one, (n, 1). Vectors that are not finite have none.

        Args:
            vectors: Float32 (n, d_model).
            feature: The one that is asked for.
        """
        chosen = slice(None) if feature is None else slice(feature, feature + 1)
        # Which features are the largest is not known from one of them.
        columns = slice(None) if self.k is not None else chosen
        centred, _, _ = self._scaled(vectors)
        with np.errstate(over="ignore", invalid="ignore"):
            products = centred @ self.encoder[:, columns]
            found = (products + self.encoder_bias[columns]) * _of(self.feature_scale, columns)
            if self.magnitude is not None:
                scale, bias = self.magnitude[:, columns]
                found = np.where(found > 0, products * scale + bias, 0)
            if self.threshold is not None:
                found = np.where(found > _of(self.threshold, columns), found, 0)
        if self.k is not None and self.k < self.n_features:
            least = np.argpartition(found, self.n_features - self.k, axis=1)[:, : self.n_features - self.k]
            np.put_along_axis(found, least, 0, axis=1)
        found = np.maximum(found, 0, dtype=np.float32)[:, chosen if self.k is not None else slice(None)]
        found[~np.isfinite(found)] = 0
        return found

    def variance_explained(self, vectors: Singles) -> float:
        """The share of the variance of finite vectors (n, d_model) that decoding their activations gives back."""
        acts = self.encode(vectors).astype(np.float64) / self.feature_scale
        _, factor, offset = self._scaled(vectors)
        decoded = (acts @ self.decoder.astype(np.float64) + self.decoder_bias) * factor + offset
        total = float(np.square(vectors - vectors.mean(axis=0, dtype=np.float64)).sum())
        return 1 - float(np.square(vectors - decoded).sum()) / total if total > 0 else float("nan")

    def _scaled(self, vectors: Singles) -> tuple[Singles, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Vectors as the encoder gets them; and a factor and an offset of each, (n, 1), that undo the scaling."""
        rows = vectors.astype(np.float64)
        factor, offset = np.ones((len(rows), 1)), np.zeros((len(rows), 1))
        if self.normalize == "constant_norm_rescale":
            factor = norms_of(vectors)[:, np.newaxis] / np.sqrt(self.d_model)
        elif self.normalize == "layer_norm":
            with np.errstate(invalid="ignore"):
                offset, factor = rows.mean(axis=1, keepdims=True), rows.std(axis=1, ddof=1, keepdims=True)
        usable = np.where(factor > 0, factor, np.nan) + (_EPSILON if self.normalize == "layer_norm" else 0)
        with np.errstate(invalid="ignore"):
            rows = (rows - offset) / usable - (self.decoder_bias if self.is_centred else 0)
        rows[~np.isfinite(rows).all(axis=1)] = np.nan
        return rows.astype(np.float32), factor, offset


def _of(values: Singles, columns: slice) -> Singles:
    """Some columns of values for each feature, or the one value for all."""
    return values if len(values) == 1 else values[columns]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_sae(
    url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None, *, d_model: int | None = None
) -> Sae:
    """The sparse autoencoder of a safetensors file, with the settings of `cfg.json` beside it.

    Files of SAELens and sparsify, and others with the tensors W_enc, b_enc, W_dec, b_dec or encoder.weight, encoder.bias,
    decoder.weight, bias, as saev and dictionary_learning name them.

    Args:
        url: The address of the file.
        storage_options: Options of its file system.
        d_model: The length of the vectors that it must take.

    Raises:
        NotFoundError: there is no such file.
        CorruptShardError, DocumentError: it is no safetensors file, or not one of a sparse autoencoder.
        ArgumentError: it takes vectors of another length.
    """
    transport, path = locate(url, storage_options, engine="auto", transport=None)
    try:
        nbytes = transport.size(path)
    except FileNotFoundError:
        raise NotFoundError(
            "there is no such file", where=full_url(transport, path), remedy="Pass the safetensors file of an SAE."
        ) from None
    where = full_url(transport, path)
    tensors, _ = read_header(transport, path, nbytes)
    config = _config(transport)
    _check_names(tensors, config, where)
    found = {meant: _tensor(transport, path, tensors, meant, where) for meant in _SPELLINGS}
    transport.close()
    if "encoder.weight" in tensors:  # dictionary_learning and sparsify, which do so always
        config = {"apply_b_dec_to_input": True, **config}
    return _checked(path, found, config, where, d_model)


def _check_names(tensors: Mapping[str, Tensor], config: Mapping[str, object], where: str) -> None:
    """Refuse a file with tensors that are not read: activations may depend on them."""
    known = {name for spellings in _SPELLINGS.values() for name, _ in spellings}
    others = sorted(tensors.keys() - known.union(_IDLE))
    if _flag(config, "finetuning_scaling_factor", where) and _FACTOR in tensors:
        others.append(_FACTOR)
    if others:
        raise DocumentError(
            f"it has the tensors {brief(others)}, which are not read; activations may depend on them",
            where=where,
            remedy=f"Leave them out of the file if they do not. Tensors that are read: {', '.join(sorted(known))}.",
        )
    for meant, spellings in _SPELLINGS.items():
        several = [name for name, _ in spellings if name in tensors]
        if len(several) > 1:
            raise DocumentError(
                f"it has {' and '.join(several)}; each is the {meant.replace('_', ' ')}",
                where=where,
                remedy="Keep one.",
            )


def _tensor(
    transport: Transport, path: str, tensors: Mapping[str, Tensor], meant: str, where: str
) -> npt.NDArray[np.float32] | None:
    """A tensor as float32; None where the file has none of its names."""
    for name, is_transposed in _SPELLINGS[meant]:
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise DocumentError(f"{name!r} is {tensor.dtype}; of an SAE {', '.join(DTYPES)} are read", where=where)
        (raw,) = transport.get_ranges(path, starts=[tensor.start], ends=[tensor.end])
        try:
            stored = np.frombuffer(raw, numpy_dtype(DTYPES[tensor.dtype])).reshape(tensor.shape)
        except ValueError as error:  # an empty one may have sizes that no array has
            raise DocumentError(f"{name!r} has shape {brief(tensor.shape)}: {error}", where=where) from None
        with np.errstate(over="ignore", invalid="ignore"):
            values = stored.astype(np.float32)
        if not np.isfinite(values).all():
            raise DocumentError(f"{name!r} has numbers that are not finite in float32", where=where)
        return np.ascontiguousarray(values.T) if is_transposed else values
    return None


def _config(transport: Transport) -> dict[str, object]:
    """The settings beside the file; empty where there are none."""
    where = full_url(transport, _CONFIG)
    try:
        nbytes = transport.size(_CONFIG)
        if nbytes > _MOST_CONFIG_NBYTES:
            raise DocumentError(f"it has {nbytes} bytes; {_MOST_CONFIG_NBYTES} are read at most", where=where)
        (raw,) = transport.get_ranges(_CONFIG, starts=[0], ends=[nbytes])
        found = cast("object", json.loads(bytes(raw)))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"it is no JSON ({error})", where=where) from None
    if not isinstance(found, dict):
        raise DocumentError("it is no JSON object", where=where)
    return cast("dict[str, object]", found)


def _checked(
    name: str, found: Mapping[str, Singles | None], config: Mapping[str, object], where: str, d_model: int | None
) -> Sae:
    """An SAE of tensors and settings that belong together."""
    encoder, decoder = found["encoder"], found["decoder"]
    if encoder is None or decoder is None or encoder.ndim != 2 or 0 in encoder.shape:
        spelled = " or ".join(
            " and ".join(_SPELLINGS[meant][at][0] for meant in ("encoder", "decoder")) for at in (0, 1)
        )
        raise DocumentError(f"it is no sparse autoencoder: it needs the matrices {spelled}", where=where)
    size, n_features = encoder.shape
    if d_model is not None and size != d_model:
        raise ArgumentError(f"the SAE takes vectors of {size} numbers, those of the store have {d_model}", where=where)
    gate = found["gate_bias"]
    bias = found["encoder_bias"] if gate is None else gate
    decoder_bias = found["decoder_bias"]
    shapes = {"decoder": (n_features, size), "encoder_bias": (n_features,), "decoder_bias": (size,)}
    shapes |= dict.fromkeys(("gate_bias", "magnitude_bias", "log_scale"), (n_features,))
    for meant, shape in shapes.items():
        values = found[meant]
        if values is not None and values.shape != shape:
            raise DocumentError(
                f"its {meant.replace('_', ' ')} has shape {list(values.shape)}, not {list(shape)}", where=where
            )
    bias = np.zeros(n_features, np.float32) if bias is None else bias
    decoder_bias = np.zeros(size, np.float32) if decoder_bias is None else decoder_bias
    architecture = _architecture(found, config, where)
    magnitude = None
    if architecture == "gated":
        if gate is None or found["log_scale"] is None or found["magnitude_bias"] is None:
            raise DocumentError("a gated SAE needs the tensors b_gate, r_mag and b_mag", where=where)
        with np.errstate(over="ignore"):
            magnitude = np.stack([np.exp(found["log_scale"]), found["magnitude_bias"]])
        if not np.isfinite(magnitude).all():
            raise DocumentError("the exponential of 'r_mag' is not finite in float32", where=where)
    scale = np.ones(1, np.float32)
    if _flag(config, "rescale_acts_by_decoder_norm", where):
        scale = np.linalg.norm(decoder, axis=1).astype(np.float32)
        scale[scale == 0] = 1
    return Sae(
        name=name, architecture=architecture, encoder=encoder, decoder=decoder, decoder_bias=decoder_bias,
        encoder_bias=bias,
        is_centred=_is_centred(config, decoder_bias, where), normalize=_normalization(config, where),
        k=_k(found, config, n_features, where) if architecture == "topk" else None,
        threshold=_threshold(found, n_features, where) if architecture == "jumprelu" else None,
        magnitude=magnitude, feature_scale=scale,
    )  # fmt: skip


def _architecture(found: Mapping[str, object], config: Mapping[str, object], where: str) -> str:
    named, function = config.get("architecture"), config.get("activation_fn_str", config.get("activation_fn"))
    if function is None:
        function = config.get("activation")  # of sparsify
    if _flag(config, "transcode", where):
        raise DocumentError(
            f"{_CONFIG} says that it is a transcoder, which gives back other vectors than it gets", where=where
        )
    if function not in (None, *_FUNCTIONS):
        raise DocumentError(
            f"{_CONFIG} names the activation function {brief(function)}; {', '.join(_FUNCTIONS)} are read", where=where
        )
    if named is not None:
        if named not in _ARCHITECTURES:
            raise DocumentError(
                f"{_CONFIG} names the architecture {brief(named)}; {', '.join(_ARCHITECTURES)} are read", where=where
            )
        # Early versions of SAELens wrote "standard" with another activation function.
        return "topk" if function == "topk" else cast("str", named)
    if found["gate_bias"] is not None:
        return "gated"
    has_k, has_threshold = found["k"] is not None or config.get("k") is not None, found["threshold"] is not None
    if has_k and has_threshold:
        raise DocumentError(
            "it has both k and a threshold",
            where=where,
            remedy=f'Write {_CONFIG} beside it: {{"architecture": "topk"}}, or "jumprelu" to use the threshold.',
        )
    return "topk" if has_k else "jumprelu" if has_threshold else "standard"


def _flag(config: Mapping[str, object], name: str, where: str) -> bool | None:
    """A setting that is true or false; None where it is not given."""
    named = config.get(name)
    if named is not None and not isinstance(named, bool):
        raise DocumentError(f"{_CONFIG}: {name} is {brief(named)}, no boolean", where=where)
    return named


def _is_centred(config: Mapping[str, object], decoder_bias: Singles, where: str) -> bool:
    named = _flag(config, "apply_b_dec_to_input", where)
    if named is not None:
        return named
    if not decoder_bias.any():
        return False
    raise DocumentError(
        "it does not say whether the bias of the decoder is subtracted from vectors before they are encoded",
        where=where,
        remedy=f'Write {_CONFIG} beside it: {{"apply_b_dec_to_input": true}}, or false.',
    )


def _normalization(config: Mapping[str, object], where: str) -> str:
    named = config.get("normalize_activations", "none")
    if named not in _NORMALIZATIONS:
        raise DocumentError(
            f"{_CONFIG}: normalize_activations is {brief(named)}; {', '.join(_NORMALIZATIONS)} are read", where=where
        )
    return cast("str", named)


def _k(found: Mapping[str, Singles | None], config: Mapping[str, object], n_features: int, where: str) -> int:
    stored, arguments = found["k"], config.get("activation_fn_kwargs")
    named = config.get("k")
    if named is None and isinstance(arguments, Mapping):
        named = cast("Mapping[str, object]", arguments).get("k")
    if named is None and stored is not None and stored.size == 1:
        number = float(stored.reshape(()))
        named = int(number) if number.is_integer() else number
    if not isinstance(named, int) or isinstance(named, bool) or not 1 <= named <= n_features:
        raise DocumentError(f"k is {brief(named)}; it must be an integer from 1 to {n_features}", where=where)
    return named


def _threshold(found: Mapping[str, Singles | None], n_features: int, where: str) -> Singles:
    values = found["threshold"]
    if values is None or values.size not in {1, n_features}:
        shape = None if values is None else list(values.shape)
        raise DocumentError(f"a jumprelu SAE needs a threshold for each feature; it has {shape}", where=where)
    return values.reshape(-1)
