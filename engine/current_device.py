"""The CUDA device that a thread launches on."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Let this thread launch on ``device``. On a CPU there is nothing to do, nor for a GPU without a number,
    which is the current one, whichever that is.

    Operations of torch go where their tensors are, but kernels of Triton go to the calling thread's current
    device, which is the first one in a new thread.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
