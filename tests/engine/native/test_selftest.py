"""Kernels that compute wrongly are not used, and the reason is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.base import probe
from engine.bringup import bring_up
from engine.config import EngineConfig
from engine.layers.linear import candidates
from engine.native import build as build_module
from engine.native import kernels, selftest, unavailable
from engine.native import kernels as function
from engine.ops import choice
from tests.engine.core_harness import load, tiny_folder

module = __import__("sys").modules[function.__module__]
CPU = torch.device("cpu")


def test_what_was_compiled_here_is_right() -> None:
    found = kernels()
    assert found is not None, unavailable()
    assert selftest.wrong(found) == ""
    assert found.vector_width in (4, 8, 16)


@pytest.mark.parametrize(
    "part", ["_products", "_codes", "_norm", "_activation", "_attention", "_distributions"]
)
def test_a_part_that_is_wrong_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels()
    assert found is not None, unavailable()
    real = getattr(selftest, part)

    def spoilt(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        got, expected = real(*arguments)
        got[0].view(-1)[0] = float("nan") if part == "_norm" else got.abs().max() * 2
        return got, expected

    monkeypatch.setattr(selftest, part, spoilt)
    assert "are off by" in selftest.wrong(found)


def test_without_kernels_everything_runs_in_torch_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_found", None)
    monkeypatch.setattr(selftest, "wrong", lambda _: "products are off by 1")
    with caplog.at_level(logging.WARNING):
        assert function() is None
    assert "torch's own are" in caplog.text
    assert "products are off by 1" in caplog.text
    spec = load(tiny_folder("llama")).spec
    assert all(form.layout != "native" for form in candidates(torch.float32, CPU))
    for reason in (
        probe("paged", spec, CPU, torch.float32),
        *(choice.probe(knob, spec, CPU, torch.float32) for knob in choice.FUSED),
    ):
        assert "compute wrongly here" in (reason or "")


@pytest.mark.parametrize("compiled", [True, False])
def test_an_engine_starts_with_the_kernels_that_there_are(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling is a stage of the start, and without it torch's operations stay the defaults."""
    stages: list[str] = []
    real = build_module.build

    def build(**arguments: Any) -> Path:
        arguments["announce"]()
        if not compiled:
            raise build_module.NotBuilt("there is no C++ compiler")
        return real()

    monkeypatch.setattr(module, "_found", None)
    monkeypatch.setattr(module, "build", build)
    config = EngineConfig(model=tiny_folder("llama"), device="cpu", knobs={"kv_pool_gib": 0.001})
    core, knobs, _ = bring_up(config, lambda _: None, lambda stage, *_: stages.append(stage), lambda _: None)
    assert "compiling kernels for this CPU" in stages
    assert [knobs[knob] for knob in choice.FUSED] == [compiled] * 3
    reason = {info.id: info.reason for info in knobs.infos()}["fused_norm"]
    assert reason == ("" if compiled else "there is no C++ compiler")
    assert knobs["attention"] == "auto"
    assert core.runner.attention_name == ("paged" if compiled else "sdpa")
