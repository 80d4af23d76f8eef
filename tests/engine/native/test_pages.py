"""Memory in large pages: what is put there stays as it is, lies where it should, and is given back."""

from __future__ import annotations

import errno
import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.native import pages
from engine.native.pages import LINE, PAGE, SLAB, in_large_pages, zeros_in_large_pages


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_slab", None)


def test_copies_are_whole_and_apart() -> None:
    """Of every dtype and stride, beside each other, larger than what is asked of the system at once, and
    empty."""
    given = [
        torch.randn(7, 5).bfloat16(),
        torch.randint(-9, 9, (3, 1001), dtype=torch.int8),
        torch.randn(300, 70).t(),
        torch.tensor(4.0),
        torch.empty(0, 4),
        torch.randint(0, 255, (SLAB + 100,), dtype=torch.uint8),
        torch.randn(2, 3, 4).permute(2, 0, 1),
    ]
    copies = [in_large_pages(each) for each in given]
    for copy, each in zip(copies, given, strict=True):
        assert torch.equal(copy, each)
        assert copy.dtype == each.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % LINE == 0
    copies[0].fill_(0)
    assert all(map(torch.equal, copies[1:], given[1:]))


def test_memory_begins_with_a_page() -> None:
    assert in_large_pages(torch.ones(3)).data_ptr() % PAGE == 0


def test_zeros_are_apart_and_freed_together() -> None:
    """Of sizes beside lines and pages."""
    for shape, dtype in (((5, 3, 7), torch.bfloat16), ((1, 1, 1), torch.int8), ((1 << 20, 3), torch.float32)):
        made = zeros_in_large_pages(3, shape, dtype)
        assert all(not each.any() and each.shape == shape and each.dtype == dtype for each in made)
        assert all(each.is_contiguous() and each.data_ptr() % LINE == 0 for each in made)
        made[1].fill_(1)
        assert not made[0].any()
        assert not made[2].any()
        last = made.pop()
        made.clear()
        assert not last.any()


@pytest.mark.parametrize("zeros", [False, True])
def test_it_is_in_large_pages_where_the_system_has_them(zeros: bool) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives no large pages")

    def held() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")) << 10

    before = held()
    if zeros:
        kept = zeros_in_large_pages(3, (8, 1 << 20), torch.uint8)[-1]
    else:
        kept = in_large_pages(torch.ones(24 << 20, dtype=torch.uint8))
    assert held() - before >= 12 << 20  # there may not be enough free ones that lie together
    assert kept.view(-1)[-1] == (not zeros)


def test_memory_is_freed_with_the_last_that_lies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = mmap.mmap

    class Watched(real):  # type: ignore[misc, valid-type]
        def __init__(self, *_: Any, **__: Any) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(pages.mmap, "mmap", Watched)
    first, second = in_large_pages(torch.ones(1000)), in_large_pages(torch.ones(1000))
    assert len(made) == 1
    del first
    gc.collect()
    assert made[0]() is not None
    assert second.sum() == 1000
    del second
    gc.collect()
    assert made[0]() is None
    in_large_pages(torch.ones(10))
    assert len(made) == 2


def test_a_kernel_without_large_pages_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", 1 << 20)  # no such advice
    assert in_large_pages(torch.ones(5)).sum() == 5


def test_no_memory_is_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of weights that has no room is undone; another error of the system would end the engine."""

    def none(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pages.mmap, "mmap", none)
    with pytest.raises(MemoryError, match=r"0\.03 GiB are needed: .*Cannot allocate memory"):
        in_large_pages(torch.ones(5))
