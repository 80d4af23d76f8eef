"""The CUDA device that a thread launches on."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Let this thread launch on ``device``. On a CPU there is nothing to do.

    Operations of torch go where their tensors are, but kernels of Triton go to the calling thread's current
    device, which is the first one in a new thread.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
