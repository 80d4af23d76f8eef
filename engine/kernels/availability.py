"""Whether Triton kernels can run on a device. Imports no triton, so that it can say that there is none."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from engine.out_of_memory import kind_of

MIN_CAPABILITY = (8, 0)  # bfloat16 tensor cores and asynchronous copies came with Ampere


def probe(device: torch.device) -> str | None:
    """Why no kernel can run on ``device``, or None if they can.

    On a CPU they run only in Triton's interpreter, which needs TRITON_INTERPRET=1 before triton is imported
    and is meant for tests: it takes seconds for what a GPU does in microseconds.
    """
    if find_spec("triton") is None:
        return "the package triton is not installed here; it comes with torch's builds for CUDA"
    from engine.kernels.launch import INTERPRETED

    if INTERPRETED:
        return None if device.type == "cpu" else f"Triton's interpreter runs on the cpu, not on {device}"
    if device.type != "cuda":
        return f"Triton kernels run on an NVIDIA GPU, not on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, "
            f"Triton kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later"
        )
    return _cannot_launch(device)


@functools.cache
def _cannot_launch(device: torch.device) -> str | None:
    """Why a kernel of one element does not come about, or None: a first launch needs more than triton.

    It compiles a few lines of C against Python's headers, writes to a cache on the disk and loads the driver.
    """
    from engine.kernels import trial

    try:
        trial.run(device)
    # Whatever it is, of triton, a compiler or the driver: it is what every other launch would fail with.
    except Exception as error:
        if kind_of(error) != "own":  # which says nothing of kernels
            raise
        return (
            f"a kernel of one element cannot be launched: {error} ({type(error).__name__}); Triton needs "
            "a C compiler, Python's headers and a writable cache folder (TRITON_CACHE_DIR)"
        )
    return None
