"""Copies between the memory of a GPU and that of the host that run beside the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class HostCopy:
    """A tensor on its way to the CPU's memory.

    From a CUDA device it is copied over a stream of its own into pinned memory, while the model runs the next batch. A tensor
    of the CPU is there already; from other devices it is copied at once.

    Args:
        tensor: Computed, or about to be computed on the current stream of its device.
        stream: A stream of that device; None where it is no CUDA device.
    """

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        import torch

        self._done: torch.cuda.Event | None = None
        if stream is None:
            self._tensor = tensor.cpu()
            return
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            self._tensor.copy_(tensor, non_blocking=True)
            self._done.record(stream)
        tensor.record_stream(stream)  # its memory is not used again before the copy is done

    def result(self) -> torch.Tensor:
        """The tensor in the CPU's memory; waits for the copy. The memory is the caller's."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU in memory that a GPU copies from while the host goes on; other tensors as they are."""
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
