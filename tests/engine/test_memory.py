"""What may still be allocated, with and without a container's limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from engine.layout import Layout, NoRoom, check_room
from engine.memory import ADDRESSES, GROUP, available, available_bytes, free_bytes
from tests.engine.fake_card import GIB, FakeCard, card

__all__ = ["card"]


def test_a_limit_below_the_machines_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("300000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert available_bytes(tmp_path) == 200_000
    (tmp_path / "memory.current").write_text("300001\n")
    assert available_bytes(tmp_path) == 0


def test_the_older_kind_of_control_group_counts_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000")
    assert available_bytes(tmp_path) == 4000


@pytest.mark.parametrize("older", [False, True])
def test_pages_of_files_that_can_be_given_back_are_not_taken(tmp_path: Path, older: bool) -> None:
    """A model that was read fills a container's memory with pages that nobody needs."""
    (tmp_path / "memory").mkdir()
    prefix = "memory/memory." if older else "memory."
    limit, used = ("limit_in_bytes", "usage_in_bytes") if older else ("max", "current")
    (tmp_path / (prefix + limit)).write_text("200000\n")
    (tmp_path / (prefix + used)).write_text("199000\n")
    stat = "anon 10000\nfile 189000\ninactive_anon 7\ninactive_file 180000\nactive_file 5000\n"
    if older:
        stat = f"inactive_file 1\nactive_file 2\n{stat.replace('inactive_file', 'total_inactive_file')}"
    (tmp_path / (prefix + "stat")).write_text(stat)
    assert available_bytes(tmp_path) == 181_000
    (tmp_path / (prefix + "stat")).write_text("inactive_file max\ntotal_inactive_file\n")
    assert available_bytes(tmp_path) == 1000
    (tmp_path / (prefix + "stat")).write_text("inactive_file 300000\ntotal_inactive_file 300000\n")
    assert available_bytes(tmp_path) == 200_000, "counted at another moment: never more than the limit"


def test_without_a_limit_it_is_the_machines_memory(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 0 < available_bytes(tmp_path) <= total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert 1 << 20 < available_bytes(tmp_path) <= total


@pytest.mark.parametrize("older", [False, True])
def test_the_limits_of_all_groups_that_this_one_is_in_hold(tmp_path: Path, older: bool) -> None:
    """Started with ``systemd-run -p MemoryMax=``, the limit lies in a folder below the mount."""
    mount = tmp_path / "memory" if older else tmp_path
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if older else ("memory.max", "memory.current")
    )
    inner = mount / "user.slice" / "run-1.scope"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text(
        "9:name=systemd:/elsewhere\n" + ("4:cpu,memory:" if older else "0::") + "/user.slice/run-1.scope\n"
    )
    (inner / limit).write_text("5000\n")
    (inner / used).write_text("1000\n")
    assert available(tmp_path, own) == (4000, GROUP)
    (inner.parent / limit).write_text("9000\n")
    (inner.parent / used).write_text("8000\n")
    assert available(tmp_path, own) == (1000, GROUP), "another one beside it has taken most of both"
    own.write_text("0::/../../gone\n4:memory:/gone/too\n")
    assert available(tmp_path, own)[1] != GROUP, "named from outside: nothing of it is here"


def test_a_limit_of_address_space_counts(tmp_path: Path) -> None:
    """``ulimit -v``: what is mapped counts, and the text of a refusal names the limit."""
    code = (
        "import pathlib, resource, psutil, torch\n"
        "from engine.memory import available\n"
        "from engine.out_of_memory import shortage\n"
        "mapped = psutil.Process().memory_info().vms\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20), resource.RLIM_INFINITY))\n"
        "here = pathlib.Path('{here}')\n"
        "before = available(here, here / 'none')\n"
        "held = bytearray(16 << 20)\n"
        "after = available(here, here / 'none')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped // 2, resource.RLIM_INFINITY))\n"
        "none = available(here, here / 'none')\n"
        "text = shortage(torch.device('cpu'), 1 << 30)\n"
        "print(before[0], before[1], after[0], none[0], text, sep='|')\n"
    ).replace("{here}", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, why, after, none, text = done.stdout.strip().split("|")
    assert why == ADDRESSES
    assert 48 << 20 < int(before) <= 64 << 20
    assert 16 << 20 <= int(before) - int(after) < 24 << 20
    assert none == "0"
    assert text == "1.00 GiB are needed, 0.00 GiB can be had within the limit of address space (ulimit -v)"


def test_what_torch_keeps_and_does_not_use_is_not_taken(card: FakeCard) -> None:
    """After a long prompt most of what torch holds may be unused: the pool may grow by it."""
    device = torch.device("cuda", 0)
    card.free, card.reserved, card.allocated, card.kept = GIB, 70 * GIB, 60 * GIB, 2 * GIB
    now = Layout(1, 16, "model", 0, GIB, 0, 0)
    check_room(device, now, Layout(9, 16, "model", 0, GIB, 0, 0))
    assert free_bytes(device) == 9 * GIB, "but not what is held for graphs"
    with pytest.raises(NoRoom, match=r"the pool would take 11\.00 GiB, 10\.00 GiB can be had"):
        check_room(device, now, Layout(11, 16, "model", 0, GIB, 0, 0))
    with pytest.raises(NoRoom, match=r"the pool would take 9\.00 GiB, 7\.00 GiB can be had"):
        check_room(device, now, Layout(9, 16, "model", 0, GIB, 0, 0), kept=3 * GIB)
