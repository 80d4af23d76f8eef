"""Choosing a device, and that what is measured of it is a figure of this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine import hardware
from engine.hardware import DeviceError, choose_device, cpu_name, describe


def test_the_cpu_can_always_be_chosen() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "mps", ""])
def test_unknown_devices_are_refused_by_name(name: str) -> None:
    with pytest.raises(DeviceError, match=r"unknown device .*; allowed: auto, cpu, cuda, cuda:N, GPU-<uuid>"):
        choose_device(name)


def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(DeviceError, match=r"device cuda:99 cannot be used: .*; use auto or cpu"):
        choose_device("cuda:99")


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda with two cards that work."""
    uuids = ["aaaa1111-0000", "aabb2222-0000"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    monkeypatch.setattr(hardware, "_cuda_reason", lambda index: None)


@pytest.mark.usefixtures("two_cards")
def test_a_card_is_chosen_by_its_uuid() -> None:
    assert choose_device("GPU-aabb") == torch.device("cuda", 1)
    assert choose_device("GPU-aaaa1111-0000") == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match=r"GPU-aa cannot be used: 2 GPUs by that name"):
        choose_device("GPU-aa")
    with pytest.raises(DeviceError, match=r"no GPU .*; there are: GPU-aaaa1111-0000, GPU-aabb"):
        choose_device("GPU-ff")


@pytest.mark.parametrize(
    ("broken", "chosen"),
    [((), "cuda:0"), (("cuda:0",), "cuda:1"), (("cuda:0", "cuda:1"), "cpu")],
)
def test_auto_looks_at_each_card_and_says_why_one_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: tuple[str, ...], chosen: str
) -> None:
    """Kernels are slow on the CPU: nobody may find themselves there without being told why."""

    def ones(size: int, *, device: str) -> torch.Tensor:
        if device in broken:
            raise RuntimeError(f"CUDA error: {device} is busy or unavailable\nmore of it")
        return torch.zeros(size)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "ones", ones)
    caplog.set_level("WARNING", "engine.hardware")
    assert choose_device("auto") == torch.device(chosen)
    expected = [
        f"device {name} cannot be used: CUDA error: {name} is busy or unavailable; another one is looked for"
        for name in broken
    ]
    if chosen == "cpu":
        expected.append("no GPU can be used, for the reasons above: the CPU is")
    assert caplog.messages == expected


def test_auto_without_any_card_takes_the_cpu_and_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    caplog.set_level("INFO", "engine.hardware")
    assert choose_device("auto") == torch.device("cpu")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "the CPU is used: this torch is built without CUDA")
    ]


@pytest.mark.usefixtures("two_cards")
def test_a_part_of_a_card_is_chosen_by_its_uuid() -> None:
    """CUDA shows a process a part of a card only where CUDA_VISIBLE_DEVICES names it."""
    environ: dict[str, str] = {}
    assert choose_device("MIG-1111", environ) == torch.device("cuda", 0)
    assert environ == {"CUDA_VISIBLE_DEVICES": "MIG-1111"}
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-11112222,GPU-1"}
    assert choose_device("MIG-1111", environ) == torch.device("cuda", 0)
    assert environ == {"CUDA_VISIBLE_DEVICES": "MIG-11112222,GPU-1"}, "what the person set stays"
    for shown in ("0", "MIG-3333", ""):
        with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES={shown} shows this process something"):
            choose_device("MIG-1111", {"CUDA_VISIBLE_DEVICES": shown})


def test_a_uuid_without_cuda_is_refused_with_the_reason() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    with pytest.raises(DeviceError, match="no GPU that CUDA shows here by that name; there are: none"):
        choose_device("GPU-1")
    with pytest.raises(DeviceError, match="MIG-1 cannot be used: this torch is built without CUDA"):
        choose_device("MIG-1", {})


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
