"""`Recorder`: the vectors of one batch, at chosen hook points of chosen blocks.

Each hook has its position on the layer axis, so `layers=(11, 3)` gives block 11 first and block 3 second. Appending outputs in
the order in which hooks run would exchange them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import numpy as np

from saev_store.core.layout import RESID_POST
from saev_store.errors import ArgumentError, LayerNotFoundError, SaevStoreError, brief, kind_of
from saev_store.record._adapt import adapt
from saev_store.record._adapters import parameter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from saev_store.record._adapters import Adapter

T = TypeVar("T")


class Recorder:
    """Records the activations of batches; a context manager that adds hooks to the model.

    Inside the `with` block the model is in evaluation mode. On leaving, the mode of each module is restored and the hooks are
    removed.

    Args:
        model: A transformer of `transformers`, see `adapt`, or an adapter.
        layers: Labels of the blocks to record: 0 is the first block, -1 the last one. Their order is that of
            the layer axis.
        hook_points: Where in each of these blocks, such as `("resid_pre", "mlp_out")`. On the layer axis all hook points of
            the first layer come first, then those of the second.
        cls_token: For images: whether to keep the CLS token as token 0. None keeps it if the architecture has one. Register
            and distillation tokens are never kept.

    Raises:
        LayerNotFoundError: the model has no such block.
        ArgumentError: `layers` is empty or names a block twice, a hook point does not exist in this architecture, or the
            blocks of the model cannot be identified.
        MissingDependencyError: torch is not installed.

    Attributes:
        adapter: What is known of the model.
        layers: The labels as given.
        depths: Index of the block of each label, from 0.
        hook_points: The hook points as given.
        axis: (label, hook point) of each entry of the layer axis.
        cls_token: Whether the CLS token is kept.

    ```python
    with Recorder(model, layers=(-1, 3)) as recorder:
        acts = recorder(pixel_values)  # (batch, 2, tokens, d_model)
    ```
    """

    def __init__(
        self,
        model: torch.nn.Module | Adapter,
        layers: Sequence[int],
        *,
        hook_points: Sequence[str] = (RESID_POST,),
        cls_token: bool | None = None,
    ) -> None:
        self.adapter = adapt(model)
        self.layers, self.hook_points = _listed(layers, "layers"), _listed(hook_points, "hook_points")
        self.depths = _depths(self.layers, len(self.adapter.blocks))
        self.axis = tuple((label, point) for label in self.layers for point in self.hook_points)
        self._hooked = [self.adapter.hooked(depth, point) for depth in self.depths for point in self.hook_points]
        self.cls_token = self.adapter.keeps_cls(cls_token)
        self._undo: ExitStack | None = None
        self._batch: _Captured | None = None
        self._stream: torch.cuda.Stream | None = None
        self._axes_are_known = False

    def __enter__(self) -> Self:
        import torch

        model = self.adapter.model
        with ExitStack() as undo:
            for module in model.modules():
                undo.callback(setattr, module, "training", module.training)
            model.eval()
            # Encoder layers of torch run fused code if no hook is on them. It rounds differently, so the vectors of a layer
            # would depend on which others are recorded.
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            for slot, (module, side) in enumerate(self._hooked):
                undo.callback(self._add_hook(slot, module, side))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._undo is not None:
            self._undo.close()
        self._undo = None

    def __call__(self, *inputs: object) -> torch.Tensor:
        """The activations of one batch, computed without gradients.

        Args:
            inputs: NumPy or torch. For a model of images: pixels (batch, channels, height, width), normalised as the model
                requires; they are converted to its dtype. For a model of tokens: token ids (batch, tokens), and if there is
                padding, which must be on the right, a mask of the same shape, false for padding.

        Returns:
            (batch, layer, token, d_model) in the CPU's memory, in the dtype that the model computes in. Of images, token 0
            is CLS if `cls_token`, then come the patches in row-major order; of texts, all tokens of the batch are there.
            The tensor is the caller's.

        Raises:
            ArgumentError: the batch is not one of this model's, or a module did not run once on it.
        """
        return self.begin(*inputs)()

    @property
    def n_ahead(self) -> int:
        """Batches that may be begun before the vectors of an earlier one are asked for: those that a GPU runs in the meantime."""
        return int(parameter_of(self.adapter.model).device.type == "cuda")

    def begin(self, *inputs: object) -> Callable[[], torch.Tensor]:
        """Begin what a call does; the function that is returned waits for a GPU and gives the vectors."""
        import torch

        if self._undo is None:
            raise ArgumentError("the hooks are not in place; call it inside `with Recorder(…)`", where="Recorder")
        try:
            tensors = tuple(torch.as_tensor(value) for value in inputs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"the batch is not an array of numbers: {error}", where="inputs") from error
        n_special, n_content = self.adapter.content_of(*tensors)
        n_rows = len(tensors[0])
        if not self._axes_are_known and n_rows == n_special + n_content > 1:
            # Examples and tokens could be exchanged, and the shape would not show it; in a batch of one row it does.
            self(*(tensor[:1] for tensor in tensors))
        captured = _Captured(self.adapter, len(self.axis), n_rows, n_special, n_content, int(self.cls_token))
        self._batch = captured
        try:
            with torch.inference_mode():
                self.adapter.forward(*tensors)
        except (TypeError, ValueError, IndexError, RuntimeError, AssertionError) as error:
            if isinstance(error, (SaevStoreError, torch.OutOfMemoryError)):
                raise
            shape = tuple(tensors[0].shape)
            raise ArgumentError(f"the model refuses a batch of shape {shape}: {error}", where="inputs") from error
        finally:
            self._batch = None
        silent = [
            f"{point} of layer {label}" for slot, (label, point) in enumerate(self.axis) if slot not in captured.seen
        ]
        if captured.out is None or silent:
            raise ArgumentError(
                f"{', '.join(silent)} did not run in the forward pass",
                where="layers",
                remedy="Compiled code runs no hooks that are added later: record the model as it was before torch.compile.",
            )
        self._axes_are_known = True
        return self._to_host(captured.out)

    def _to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The copy of computed vectors to pinned memory, begun on a stream of its own, so that the next batch runs at the same time."""
        import torch

        if not tensor.is_cuda:
            return tensor.cpu
        if self._stream is None or self._stream.device != tensor.device:
            self._stream = torch.cuda.Stream(tensor.device)
        stream, copied = self._stream, torch.cuda.Event(blocking=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            copied.record(stream)
        tensor.record_stream(stream)  # its memory is not used again before the copy is done

        def arrived() -> torch.Tensor:
            copied.synchronize()
            return host

        return arrived

    def _add_hook(self, slot: int, module: torch.nn.Module, side: Literal["input", "output"]) -> Callable[[], None]:
        """Hook one side of a module; the function that is returned removes the hook."""

        def on_input(_module: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            self._keep(slot, args[0] if args else kwargs.get("hidden_states"))

        def on_output(_module: torch.nn.Module, _args: object, output: object) -> None:
            if isinstance(output, (tuple, list)) and output:
                output = cast("Sequence[object]", output)[0]
            self._keep(slot, cast("object", output))

        if side == "input":
            return module.register_forward_pre_hook(on_input, with_kwargs=True).remove
        return module.register_forward_hook(on_output).remove

    def _keep(self, slot: int, hidden: object) -> None:
        if self._batch is not None:  # else the model runs outside of this recorder
            label, point = self.axis[slot]
            self._batch.keep(slot, hidden, f"{point} of layer {label}")


class _Captured:
    """Vectors that hooks have captured of one batch: `out` (batch, layer, token, d_model), with the positions `seen` on its layer axis."""

    def __init__(
        self, adapter: Adapter, n_layers: int, n_rows: int, n_special: int, n_content: int, n_cls: int
    ) -> None:
        self.out: torch.Tensor | None = None
        self.seen: set[int] = set()
        self._adapter, self._n_special, self._n_cls = adapter, n_special, n_cls
        self._expected = (n_rows, n_special + n_content, adapter.d_model)
        self._shape = (n_rows, n_layers, n_cls + n_content, adapter.d_model)

    def keep(self, slot: int, hidden: object, name: str) -> None:
        """Copy what a module put out or got. It is copied at once: nothing that the model does later can reach it."""
        import torch

        shape: object = kind_of(hidden)
        if isinstance(hidden, torch.Tensor):
            hidden = hidden.transpose(0, 1) if self._adapter.batch_axis == 1 and hidden.ndim == 3 else hidden
            shape = tuple(hidden.shape)
        if not isinstance(hidden, torch.Tensor) or shape != self._expected:
            raise ArgumentError(
                f"{name} is {shape}; (examples, tokens, d_model) of this batch are {self._expected}",
                where="model",
                remedy="A module must put out a tensor, or a tuple that begins with it; an input must be the first argument or "
                "hidden_states. Make the adapter with other points=, d_model=, batch_axis= or n_special=.",
            )
        if slot in self.seen:
            raise ArgumentError(f"the module of {name} ran twice in one forward pass", where="model")
        with torch.inference_mode(mode=False):  # callers may change what they get
            if self.out is None:
                # A GPU continues while its own memory is copied; it would wait for the host's.
                device = hidden.device if hidden.is_cuda else "cpu"
                self.out = torch.empty(self._shape, dtype=hidden.dtype, device=device)
            elif self.out.dtype != hidden.dtype:
                self.out = self.out.to(torch.promote_types(self.out.dtype, hidden.dtype))
        self.seen.add(slot)
        n_cls = self._n_cls
        self.out[:, slot, :n_cls].copy_(hidden[:, :n_cls])
        self.out[:, slot, n_cls:].copy_(hidden[:, self._n_special :])


def _listed(values: Sequence[T], name: str) -> tuple[T, ...]:
    """The labels or hook points; `ArgumentError` for none, for one twice, and for a single one."""
    found = () if isinstance(values, str) or not isinstance(cast("object", values), Iterable) else tuple(values)
    if not found or len({*found}) < len(found):
        raise ArgumentError(f"{name} is {brief(values)}; it must be a list of different ones, at least one", where=name)
    return found


def _depths(layers: Sequence[int], n_blocks: int) -> tuple[int, ...]:
    """The index of the block of each label."""
    for label in layers:
        if not isinstance(label, (int, np.integer)) or isinstance(label, bool) or not -n_blocks <= label < n_blocks:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            message = f"layer {label!r} is not a block of this model: an integer from {-n_blocks} to {n_blocks - 1}"
            raise LayerNotFoundError(message, where="layers")
    return _listed([int(label) % n_blocks for label in layers], "layers")
