"""Which threads launch where."""

from __future__ import annotations

import pytest
import torch

from engine.current_device import make_current
from tests.engine.driving import CPU


def test_a_thread_is_moved_to_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second GPU is not the current one of a thread that nobody moved; a CPU needs no moving,
    and torch moves to no GPU without a number."""
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    make_current(CPU)
    make_current(torch.device("cuda"))
    make_current(torch.device("cuda", 1))
    assert seen == [torch.device("cuda", 1)]
