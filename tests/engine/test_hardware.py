"""Choosing a device, and that what is measured of it is a figure of this machine."""

from __future__ import annotations

import pytest
import torch

from engine.hardware import DeviceError, choose_device, cpu_name, describe


def test_the_cpu_can_always_be_chosen() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "mps", ""])
def test_unknown_devices_are_refused_by_name(name: str) -> None:
    with pytest.raises(DeviceError, match=r"unknown device .*; allowed: auto, cpu, cuda, cuda:N"):
        choose_device(name)


def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(DeviceError, match=r"device cuda:99 cannot be used: .*; use auto or cpu"):
        choose_device("cuda:99")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_cpu_reaches_is_measured(dtype: torch.dtype) -> None:
    info = describe(torch.device("cpu"), dtype=dtype)
    assert info.name == cpu_name() != ""
    assert info.memory_bytes > 1 << 28
    assert info.threads == torch.get_num_threads()
    # Any machine that runs this lies between these, and none by accident.
    for figure, low, high in (
        (info.copy_bytes_per_s, 1e8, 1e13),
        (info.read_bytes_per_s, 1e8, 1e13),
        (info.flops_per_s, 1e8, 1e15),
    ):
        assert figure is not None
        assert low < figure < high


def test_without_measuring_figures_are_unknown_not_zero() -> None:
    info = describe(torch.device("cpu"), dtype=torch.float32, measure=False)
    assert (info.copy_bytes_per_s, info.read_bytes_per_s, info.flops_per_s) == (None, None, None)
