"""Kernels that compute wrongly are not used, and the reason is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from engine.attention.base import probe
from engine.layers.linear import candidates
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


@pytest.mark.parametrize("part", ["_products", "_norm", "_activation", "_attention"])
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
