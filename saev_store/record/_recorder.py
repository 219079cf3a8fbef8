"""`Recorder`: the vectors of one batch, at chosen hook points of chosen blocks.

Each hook has its position on the layer axis, so `layers=(11, 3)` gives block 11 first and block 3 second. Appending outputs in
the order in which hooks run would exchange them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from saev_store.core.layout import RESID_POST
from saev_store.errors import ArgumentError, SaevStoreError, brief, kind_of
from saev_store.record._adapt import adapt
from saev_store.record._adapters import TextAdapter, VisionAdapter, parameter_of, resolve_layers
from saev_store.record._checks import check_loaded, check_not_compiled, check_padding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import torch
    from torch.utils.hooks import RemovableHandle

    from saev_store.record._adapters import Adapter


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
        ArgumentError: `layers` is empty or names a block twice, a hook point does not exist in this architecture, the
            blocks of the model cannot be identified, or it is compiled or on the meta device.
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
        check_not_compiled(self.adapter.model)
        check_loaded(self.adapter.model)
        if not isinstance(cast("object", layers), Iterable):
            raise ArgumentError(f"layers is {brief(layers)}; it must be a list of integers", where="layers")
        self.layers = tuple(layers)
        self.depths = resolve_layers(self.layers, len(self.adapter.blocks))
        self.hook_points = _checked_points(hook_points)
        self.axis = tuple((label, point) for label in self.layers for point in self.hook_points)
        self._hooked = [self.adapter.hooked(depth, point) for depth in self.depths for point in self.hook_points]
        self.cls_token = self.adapter.keeps_cls(cls_token)
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._handles: list[RemovableHandle] = []
        self._batch: _Captured | None = None
        self._stream: torch.cuda.Stream | None = None
        self._axes_are_known = False
        self._padding_is_hidden = False

    def __enter__(self) -> Self:
        if self._handles:
            raise ArgumentError("this recorder is already entered; it hooks its model once", where="Recorder")
        model = self.adapter.model
        self._modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            for slot, (module, side) in enumerate(self._hooked):
                if side == "input":
                    self._handles.append(module.register_forward_pre_hook(self._on_input(slot), with_kwargs=True))
                else:
                    self._handles.append(module.register_forward_hook(self._on_output(slot)))
        except BaseException:  # nobody will leave what was not entered
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._batch = None
        for module, is_training in self._modes:
            module.training = is_training

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
        """Batches that may be begun before the vectors of an earlier one are asked for: those that a GPU runs meanwhile."""
        return int(parameter_of(self.adapter.model).device.type == "cuda")

    def begin(self, *inputs: object) -> Callable[[], torch.Tensor]:
        """As a call, but returns a function that waits for a GPU and gives the vectors.

        Args:
            inputs: As of a call.

        Raises:
            ArgumentError: as of a call.
        """
        import torch

        if not self._handles:
            raise ArgumentError(
                "the hooks are not in place", where="Recorder", remedy="Call it inside `with Recorder(…) as recorder:`."
            )
        tensors = tuple(_as_tensor(value) for value in inputs)
        n_special, n_content = self.adapter.content_of(*tensors)
        n_rows = len(tensors[0])
        if not self._axes_are_known and n_rows == n_special + n_content > 1:
            # Examples and tokens could be exchanged, and the shape would not show it; in a batch of one row it does.
            self(*(tensor[:1] for tensor in tensors))
        captured = _Captured(self.adapter, len(self.axis), n_rows, n_special, n_content, int(self.cls_token))
        self._batch = captured
        try:
            with torch.inference_mode(), _without_fast_path(self.adapter.model):
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
            raise ArgumentError(f"{', '.join(silent)} did not run in the forward pass", where="layers")
        self._axes_are_known = True
        if len(tensors) == 2 and not self._padding_is_hidden and isinstance(self.adapter, TextAdapter):
            self._padding_is_hidden = True  # to the two calls of the check
            self._padding_is_hidden = check_padding(self, *tensors)
        return self._to_host(captured.out)

    def _to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The copy of computed vectors to pinned memory, begun on a stream of its own, so that it runs beside the next batch."""
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

    def _on_input(self, slot: int) -> Callable[[torch.nn.Module, tuple[object, ...], Mapping[str, object]], None]:
        def keep(_module: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            self._keep(slot, args[0] if args else kwargs.get("hidden_states"))

        return keep

    def _on_output(self, slot: int) -> Callable[[torch.nn.Module, object, object], None]:
        def keep(_module: torch.nn.Module, _args: object, output: object) -> None:
            if isinstance(output, (tuple, list)) and output:
                output = cast("Sequence[object]", output)[0]
            self._keep(slot, cast("object", output))

        return keep

    def _keep(self, slot: int, hidden: object) -> None:
        if self._batch is not None:  # else the model runs outside of this recorder
            label, point = self.axis[slot]
            self._batch.keep(slot, hidden, f"{point} of layer {label}")


class _Captured:
    """What hooks have captured of one batch.

    Attributes:
        out: (batch, layer, token, d_model); None before the first hook has run.
        seen: Positions on the layer axis that are there.
    """

    def __init__(
        self, adapter: Adapter, n_layers: int, n_rows: int, n_special: int, n_content: int, n_cls: int
    ) -> None:
        self.out: torch.Tensor | None = None
        self.seen: set[int] = set()
        self._adapter, self._n_layers, self._n_rows = adapter, n_layers, n_rows
        self._n_special, self._n_content, self._n_cls = n_special, n_content, n_cls

    def keep(self, slot: int, hidden: object, name: str) -> None:
        """Copy what a module put out or got. It is copied at once: nothing that the model does later can reach it."""
        import torch

        if not isinstance(hidden, torch.Tensor):
            raise ArgumentError(
                f"{name} is {kind_of(hidden)}, no tensor",
                where="model",
                remedy="A module must put out a tensor, or a tuple that begins with it; an input must be the first "
                "argument or hidden_states. Name another module: points={…: HookPoint(…)}.",
            )
        if self._adapter.batch_axis == 1 and hidden.ndim == 3:
            hidden = hidden.transpose(0, 1)
        d_model = self._adapter.d_model
        expected = (self._n_rows, self._n_special + self._n_content, d_model)
        shape = tuple(hidden.shape)
        if shape != expected:
            raise ArgumentError(
                f"{name} has the shape {shape}; (examples, tokens, d_model) of this batch are {expected}",
                where="model",
                remedy=self._remedy(shape, expected),
            )
        if slot in self.seen:
            raise ArgumentError(f"the module of {name} ran twice in one forward pass", where="model")
        with torch.inference_mode(mode=False):  # callers may change what they get
            if self.out is None:
                shape = (self._n_rows, self._n_layers, self._n_cls + self._n_content, d_model)
                # A GPU goes on while its own memory is copied; it would wait for the host's.
                device = hidden.device if hidden.is_cuda else "cpu"
                self.out = torch.empty(shape, dtype=hidden.dtype, device=device)
            elif self.out.dtype != hidden.dtype:
                self.out = self.out.to(torch.promote_types(self.out.dtype, hidden.dtype))
        self.seen.add(slot)
        n_cls = self._n_cls
        self.out[:, slot, :n_cls].copy_(hidden[:, :n_cls])
        self.out[:, slot, n_cls:].copy_(hidden[:, self._n_special :])

    def _remedy(self, shape: tuple[int, ...], expected: tuple[int, int, int]) -> str | None:
        """What could make the shape fit."""
        rows, tokens, d_model = expected
        if shape == (tokens, rows, d_model):
            other = 1 - self._adapter.batch_axis
            return f"Examples and tokens are exchanged: make the adapter with batch_axis={other}."
        if len(shape) == 3 and shape[:2] == (rows, tokens):
            return f"Make the adapter with d_model={shape[2]}, or name another module: all vectors have one length."
        if len(shape) == 3 and shape[0] == rows and shape[2] == d_model and isinstance(self._adapter, VisionAdapter):
            n_more = shape[1] - self._n_content
            if n_more < 0:
                return "A model that leaves patches out, such as a masked autoencoder, cannot be recorded."
            return f"If {n_more} tokens come before the patches, make the adapter with n_special={n_more}."
        return None


@contextmanager
def _without_fast_path(model: torch.nn.Module) -> Generator[None]:
    """Keeps encoder layers of torch from fused code that they run where no hook is.

    It rounds differently, so the vectors of a layer would depend on which others are recorded.
    """
    import torch

    mha = torch.backends.mha
    was_enabled = mha.get_fastpath_enabled()
    if not was_enabled or not any(isinstance(module, torch.nn.TransformerEncoderLayer) for module in model.modules()):
        yield
        return
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(True)


def _as_tensor(value: object) -> torch.Tensor:
    """A tensor of what was given as a batch; `ArgumentError` for what is none."""
    import torch

    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"the batch is no array of numbers: {error}", where="inputs") from error


def _checked_points(hook_points: Sequence[str]) -> tuple[str, ...]:
    """The hook points; `ArgumentError` for none, for one twice, and for what is no list of names."""
    if isinstance(hook_points, str) or not isinstance(cast("object", hook_points), Iterable) or not hook_points:
        raise ArgumentError(
            f"hook_points is {brief(hook_points)}; it must be a list of at least one name", where="hook_points"
        )
    names = tuple(hook_points)
    for at, name in enumerate(names):
        if not isinstance(cast("object", name), str):
            raise ArgumentError(f"{brief(name)} is no name of a hook point", where="hook_points")
        if name in names[:at]:
            raise ArgumentError(f"{brief(name)} is named twice", where="hook_points", remedy="Name it once.")
    return names
