"""Whether kernels can run, and why not, also where there is no triton at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine.kernels import availability
from tests.engine.kernels.conftest import HAS_TRITON

CPU = torch.device("cpu")


def test_without_triton_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    assert "triton is not installed" in str(availability.probe(CPU))


def test_the_engine_does_not_load_triton_by_itself() -> None:
    code = "import sys, engine.runner, engine.kernels.availability; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: the tests of kernels are not collected")
def test_a_cpu_only_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import launch

    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert availability.probe(CPU) is None
    assert "not on cuda" in str(availability.probe(torch.device("cuda")))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert "NVIDIA GPU, not on cpu" in str(availability.probe(CPU))


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: the tests of kernels are not collected")
def test_a_card_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import launch

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = str(availability.probe(torch.device("cuda")))
    assert "Tesla T4 has compute capability 7.5" in reason
    assert "8.0 or later" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(availability, "_cannot_launch", lambda device: None)
    assert availability.probe(torch.device("cuda")) is None


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: the tests of kernels are not collected")
def test_what_a_first_launch_lacks_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C compiler, no header of Python: found before a knob is offered, once for each device."""
    from engine.kernels import launch, trial

    asked: list[torch.device] = []

    def without_compiler(device: torch.device) -> None:
        asked.append(device)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(trial, "run", without_compiler)
    availability._cannot_launch.cache_clear()
    card = torch.device("cuda", 3)
    for _ in range(2):
        reason = str(availability.probe(card))
        assert "Failed to find C compiler (RuntimeError)" in reason
        assert "TRITON_CACHE_DIR" in reason
    assert asked == [card]
    availability._cannot_launch.cache_clear()


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: the tests of kernels are not collected")
def test_the_trial_reads_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import trial
    from engine.kernels.launch import Launch
    from tests.engine.kernels.support import DEVICE

    trial.run(DEVICE)
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    with pytest.raises(RuntimeError, match=r"it wrote 0\.0, not 7\.0"):
        trial.run(DEVICE)
