"""How much memory may still be taken: a card's, the machine's, or less in a container that has a limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from engine.config import GIB

MAX_CPU_POOL_BYTES = 2 * GIB
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated without swapping or hitting the control group's limit.

    cgroup: the mount of the process's control group, of version 2 (Linux kernel, cgroup-v2.rst) or 1. What
    it takes includes the pages of files that were read, a model's among them; of these the kernel gives back
    what was not used lately before it refuses anything.
    """
    free = int(psutil.virtual_memory().available)
    for limit, used, stat, pages in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        allowed, taken = _number(cgroup / limit), _number(cgroup / used)
        if allowed is not None and taken is not None:
            taken -= min(taken, _line(cgroup / stat, pages))
            free = min(free, max(0, allowed - taken))
    return free


def free_bytes(device: torch.device) -> int:
    """Memory in bytes that an allocation on the device could take now.

    torch keeps what was freed, gigabytes after a long prompt, and gives it back when an allocation would
    fail otherwise. So it is given back here first: counting it would count what the memory of graphs and
    blocks in use hold too, which nothing else can have. It costs the steps that follow some allocations.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def host_pool_bytes() -> int:
    """Memory for the KV pool of a model that runs on the CPU, once the weights are in place."""
    return min(MAX_CPU_POOL_BYTES, available_bytes() // 8)


def _number(file: Path) -> int | None:
    """The number in a file; None without one, which is also how the kernel says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _line(file: Path, name: str) -> int:
    """The number behind a name in a file of such lines; 0 without one."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, number = line.partition(" ")
        if key == name and number.isdecimal():
            return int(number)
    return 0
