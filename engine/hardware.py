"""The device an engine runs on: choosing it, and measuring what it can do.

The figures are what a torch program reaches here and now, not the maker's: they are the ceilings that a
step's modelled traffic is compared with.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

from engine.cards import GPU, MIG, part_in_use
from engine.layers.linear import candidates
from engine.memory import free_bytes
from engine.sizes import counted
from ipc.messages import DeviceInfo

log = logging.getLogger("engine.hardware")

CPU_BUFFER_BYTES = 64 << 20  # well above the last-level caches of most CPUs
GPU_BUFFER_BYTES = 1 << 30
CPU_PRODUCT = 1024  # rows, columns and depth of the measured matrix product
GPU_PRODUCT = 8192
MEASURE_S = 0.1  # for each figure
ALLOWED = "auto, cpu, cuda, cuda:N, GPU-<uuid>, MIG-<uuid>"


class DeviceError(ValueError):
    """A device that was asked for cannot be used. Says which, why, and what can."""


def choose_device(name: str = "auto", environ: MutableMapping[str, str] = os.environ) -> torch.device:
    """The device for ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or a UUID. Raises `DeviceError`.

    ``auto`` takes the first GPU that can run a kernel of this torch build, else the CPU, and the log says why
    a GPU that is there was passed over. A UUID is the start of one as ``nvidia-smi -L`` lists it, ``GPU-...``
    or, for a part of a card, ``MIG-...``. CUDA shows a part only to a process whose ``CUDA_VISIBLE_DEVICES``
    names it, so that is set where it is not: call this before anything asks CUDA for its devices.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name.startswith(MIG):
        return _choose_part(name, environ)
    if name.startswith(GPU):
        return _choose_card(name)
    if name == "auto":
        return _first_that_works()
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number == "" or number.isdecimal()):
        raise DeviceError(f"unknown device {name!r}; allowed: {ALLOWED}")
    index = int(number or 0)
    reason = _cuda_reason(index)
    if reason is not None:
        raise DeviceError(f"device {name} cannot be used: {reason}; use auto or cpu")
    return torch.device("cuda", index)


def _num_cards() -> int:
    return torch.cuda.device_count() if torch.version.cuda is not None else 0


def _first_that_works() -> torch.device:
    for index in range(_num_cards()):
        reason = _cuda_reason(index)
        if reason is None:
            return torch.device("cuda", index)
        log.warning("device cuda:%d cannot be used: %s; another one is looked for", index, reason)
    if _num_cards():
        log.warning("no GPU can be used, for the reasons above: the CPU is")
    else:
        log.info("the CPU is used: %s", _cuda_reason(0))
    return torch.device("cpu")


def _choose_card(uuid: str) -> torch.device:
    there = [f"{GPU}{torch.cuda.get_device_properties(i).uuid}" for i in range(_num_cards())]
    fitting = [i for i, each in enumerate(there) if each.startswith(uuid)]
    if len(fitting) != 1:
        what = f"{len(fitting)} GPUs" if fitting else "no GPU that CUDA shows here"
        raise DeviceError(
            f"device {uuid} cannot be used: {what} by that name; there are: {', '.join(there) or 'none'}"
        )
    return choose_device(f"cuda:{fitting[0]}")


def _choose_part(uuid: str, environ: MutableMapping[str, str]) -> torch.device:
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        environ["CUDA_VISIBLE_DEVICES"] = uuid
    elif not (part_in_use(environ) or "").startswith(uuid):
        raise DeviceError(
            f"device {uuid} cannot be used: CUDA_VISIBLE_DEVICES={shown} shows this process something else; "
            "leave it unset, or name the part of the card there first"
        )
    reason = _cuda_reason(0)
    if reason is not None:
        raise DeviceError(f"device {uuid} cannot be used: {reason}; see nvidia-smi -L for what there is")
    return torch.device("cuda", 0)


def _cuda_reason(index: int) -> str | None:
    """Why GPU ``index`` cannot be used, or None if a kernel runs on it."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "no working NVIDIA driver or GPU was found"
    if index >= torch.cuda.device_count():
        return f"this machine shows {counted(torch.cuda.device_count(), 'GPU')}, numbered from 0"
    try:
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except RuntimeError as error:  # a card that this build has no kernels for, or one that is taken
        return str(error).splitlines()[0]
    return None


def describe(device: torch.device, *, dtype: torch.dtype, measure: bool = True) -> DeviceInfo:
    """What the device is and, measured in about half a second unless ``measure`` is False, what it reaches.

    ``flops_per_s`` is of a large product of weights of ``dtype``, by the fastest implementation that linear
    layers have here: for bfloat16 on a CPU without bfloat16 units that is one in float32.
    """
    figures: tuple[float | None, float | None, float | None] = (None, None, None)
    if measure:
        with torch.inference_mode():
            figures = (*_bandwidth(device), _product_flops(device, dtype))
    copy, read, flops = figures
    if device.type == "cpu":
        return DeviceInfo(
            kind="cpu",
            name=cpu_name(),
            memory_bytes=int(psutil.virtual_memory().total),
            copy_bytes_per_s=copy,
            read_bytes_per_s=read,
            flops_per_s=flops,
            threads=torch.get_num_threads(),
        )
    properties = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        kind="cuda",
        name=properties.name,
        uuid=part_in_use(os.environ) or f"{GPU}{properties.uuid}",
        memory_bytes=int(properties.total_memory),
        copy_bytes_per_s=copy,
        read_bytes_per_s=read,
        flops_per_s=flops,
        driver=f"CUDA {torch.version.cuda}",
        threads=torch.get_num_threads(),
    )


def cpu_name() -> str:
    """The CPU's name as the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass  # not a Linux, or one without /proc: the architecture has to do
    return platform.processor() or platform.machine()


def _bandwidth(device: torch.device) -> tuple[float, float]:
    """Bytes per second of a copy (read and write counted) and of reading alone."""
    wanted = GPU_BUFFER_BYTES if device.type == "cuda" else CPU_BUFFER_BYTES
    size = max(1 << 20, min(wanted, free_bytes(device) // 8)) // 4
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _best_s(lambda: target.copy_(source), device)
    # A maximum over the last dimension of a matrix streams; a full sum would add in several passes.
    rows = source.view(-1, 1 << 10) if size % (1 << 10) == 0 else source.unsqueeze(0)
    read = source.nbytes / _best_s(lambda: rows.amax(dim=-1), device)
    return copy, read


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the fastest linear implementation for weights of this dtype."""
    n = GPU_PRODUCT if device.type == "cuda" else CPU_PRODUCT
    weight = torch.ones(n, n, dtype=dtype, device=device)
    if device.type == "cuda":
        x = torch.ones_like(weight)
        return 2 * n**3 / _best_s(lambda: F.linear(x, weight), device)
    best = 0.0
    x = torch.ones(n, n)
    # The likeliest winner first; one call tells whether another deserves its time.
    for form in reversed(candidates(dtype, device)):
        apply, inputs = form.build(weight, None, form.weight_dtype), x.to(form.weight_dtype)
        start = time.perf_counter()
        apply(inputs)
        if 2 * n**3 / (time.perf_counter() - start) > best / 2:
            best = max(best, 2 * n**3 / _best_s(partial(apply, inputs), device))
    return best


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some runs of ``work``."""
    best, end, runs = float("inf"), time.perf_counter() + MEASURE_S, 0
    while runs < 3 or (time.perf_counter() < end and runs < 100):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if runs:  # the first one pays for page faults and set-up
            best = min(best, time.perf_counter() - start)
        runs += 1
    return best
