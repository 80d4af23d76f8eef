"""How much memory may still be taken: a card's, the machine's, or less where a limit holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from engine.config import GIB

MAX_CPU_POOL_BYTES = 2 * GIB
CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MACHINE = "on this machine"
GROUP = "within the limit of this control group"
ADDRESSES = "within the limit of address space (ulimit -v)"


def available_bytes(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """Bytes that can be allocated without swapping or hitting a limit of this process; see `available`."""
    return available(cgroup, own)[0]


def available(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> tuple[int, str]:
    """Bytes that can be allocated, and what leaves no more: `MACHINE`, `GROUP` or `ADDRESSES`.

    cgroup: where control groups of version 2 (Linux kernel, cgroup-v2.rst) or 1 are mounted; own: the file
    that names this process's. The limits of a group and of all groups that it is in hold. What a group takes
    includes the pages of files that were read, a model's among them; of these the kernel gives back what was
    not used lately before it refuses anything.

    The limit of address space (getrlimit(2), RLIMIT_AS) counts what was reserved and never touched too.
    """
    free, why = int(psutil.virtual_memory().available), MACHINE
    for limit, used, stat, pages in _groups(cgroup, own):
        allowed, taken = _number(limit), _number(used)
        if allowed is not None and taken is not None:
            taken -= min(taken, _line(stat, pages))
            if allowed - taken < free:
                free, why = max(0, allowed - taken), GROUP
    addresses = _free_addresses()
    return (addresses, ADDRESSES) if addresses is not None and addresses < free else (free, why)


def _groups(cgroup: Path, own: Path) -> Iterator[tuple[Path, Path, Path, str]]:
    """Files of each group this process may be in, inner ones first: limit, use, statistics, and the line of
    these that counts pages to be given back.

    A container may see its own group as the mount's root while ``own`` names it from outside: a folder that
    is not there limits nothing.
    """
    paths = {"": "/", "memory": "/"}
    for line in _text(own).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            paths["" if number == "0" else "memory"] = path
    for mount, path in ((cgroup, paths[""]), (cgroup / "memory", paths["memory"])):
        inner = mount.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        for group in (inner, *inner.parents):
            if not group.is_relative_to(mount):
                break
            if mount == cgroup:
                names, pages = ("memory.max", "memory.current"), "inactive_file"
            else:
                names, pages = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
            yield group / names[0], group / names[1], group / "memory.stat", pages


def _free_addresses() -> int | None:
    """Bytes that this process may still map; None where that has no limit."""
    if sys.platform == "win32":
        return None
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if allowed == resource.RLIM_INFINITY else max(0, allowed - psutil.Process().memory_info().vms)


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
    for line in _text(file).splitlines():
        key, _, number = line.partition(" ")
        if key == name and number.isdecimal():
            return int(number)
    return 0


def _text(file: Path) -> str:
    """What is in a file; nothing where it is not there."""
    try:
        return file.read_text()
    except OSError:
        return ""
