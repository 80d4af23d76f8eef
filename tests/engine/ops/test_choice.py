"""Which implementation a part gets, and what is said where there is none."""

from __future__ import annotations

import pytest
import torch

from engine.ops import choice
from engine.ops.base import AddNorm, Gate, StoreQKV
from engine.ops.plain import PLAIN, TorchAddNorm, TorchGate, TorchStoreQKV
from tests.engine.driving import CPU, tiny

SPEC = tiny("llama")[0].spec


class Fused:
    """A source that can serve some knobs."""

    def __init__(self, name: str, *knobs: str) -> None:
        self.NAME = name
        self._knobs = knobs

    def probe(self, knob: str, spec: object, device: torch.device, dtype: torch.dtype) -> str | None:
        return None if knob in self._knobs else f"{self.NAME} has no {knob}"

    def _named(self, part: type) -> object:
        made = part()
        made.name = self.NAME
        return made

    def add_norm(self) -> AddNorm:
        return self._named(TorchAddNorm)  # type: ignore[return-value]

    def store_qkv(self) -> StoreQKV:
        return self._named(TorchStoreQKV)  # type: ignore[return-value]

    def gate(self) -> Gate:
        return self._named(TorchGate)  # type: ignore[return-value]


def test_the_first_source_that_can_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knob on its own; what nobody can serve has the reason of the preferred one."""
    found = (Fused("a", "fused_norm"), Fused("b", "fused_norm", "fused_mlp"))
    monkeypatch.setattr(choice, "sources", lambda device: found)
    reasons = choice.reasons(SPEC, CPU, torch.float32)
    assert {knob: reasons.get(knob) for knob in choice.FUSED} == {
        "fused_norm": None, "fused_rope_kv": "a has no fused_rope_kv", "fused_mlp": None,
    }  # fmt: skip
    ops = choice.make_ops({"fused_norm": True, "fused_mlp": True}, SPEC, CPU, torch.float32)
    assert choice.kernels(ops) == "norm=a,mlp=b"
    assert ops.store is PLAIN.store
    with pytest.raises(ValueError, match="fused_rope_kv cannot be switched on: a has no fused_rope_kv"):
        choice.make_ops({"fused_rope_kv": True}, SPEC, CPU, torch.float32)


def test_nothing_is_fused_unless_it_is_asked_for() -> None:
    ops = choice.make_ops({"fused_norm": False}, SPEC, CPU, torch.float32)
    assert ops == PLAIN
    assert choice.kernels(ops) == ""


def test_a_device_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever device this is: never silence, and never torch under another name."""
    monkeypatch.setattr(choice, "sources", lambda device: ())
    reasons = choice.reasons(SPEC, CPU, torch.float32)
    assert {reasons[knob] for knob in choice.FUSED} == {"there are no fused kernels for cpu"}


def test_sampling_kernels_say_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU needs a compiler, and none are used unless they are asked for."""
    assert "fused_sampling" not in choice.reasons(SPEC, CPU, torch.float32)
    assert choice.make_sampling(False, CPU) is None
    made = choice.make_sampling(True, CPU)
    assert made is not None
    assert made.name == "native"
    assert choice.probe_sampling(torch.device("mps")) == "there are no sampling kernels for mps"
    monkeypatch.setattr(choice, "unavailable", lambda: "there is no C++ compiler")
    assert choice.reasons(SPEC, CPU, torch.float32)["fused_sampling"] == "there is no C++ compiler"
    with pytest.raises(
        ValueError, match="fused_sampling cannot be switched on: there is no C\\+\\+ compiler"
    ):
        choice.make_sampling(True, CPU)
