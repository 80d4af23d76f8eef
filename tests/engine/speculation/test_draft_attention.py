"""A draft model's own sizes decide whether it runs with the target's attention."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from engine.attention import paged
from engine.speculation import draft_attention
from engine.speculation.draft_attention import DraftAttention
from engine.speculation.rounds import RoundDrafter
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.graphs.fakes import StaticAttention
from tests.engine.oracle import draft_model, tiny

CPU = torch.device("cpu")
GREEDY = Sampling(max_tokens=10, ignore_eos=True)


class Kernels:
    """A kernel that cannot serve heads of 8."""

    def __init__(self, head_dim: int = 8) -> None:
        self.head_dim = head_dim

    def probe(self, spec: object, device: torch.device, dtype: torch.dtype) -> str | None:
        size = getattr(spec, "head_dim", 0)
        return f"it cannot serve heads of {size}" if size == self.head_dim else None

    def make(self, device: torch.device) -> StaticAttention:
        return StaticAttention()


@pytest.mark.parametrize(("refused", "runs"), [(8, "sdpa"), (64, "paged")])
def test_paged_is_asked_for_the_draft_models_sizes(
    refused: int, runs: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is told once, whichever way it goes; other attentions of the target are not followed."""
    monkeypatch.setattr(paged, "source", lambda device: Kernels(refused))
    caplog.set_level(logging.INFO, draft_attention.__name__)
    made = DraftAttention(load(tiny_folder("llama")).spec, CPU, torch.float32)
    found = [made.beside(target).name for target in ("paged", "paged", "flash_attn2", "naive", "paged")]
    assert found == [runs, runs, "sdpa", "sdpa", runs]
    said = [record.getMessage() for record in caplog.records]
    if runs == "paged":
        names = ["paged", "sdpa", "paged"]
        assert said == [f"the draft model runs with attention={name}" for name in names]
    else:
        assert said == [
            "the draft model runs with attention=sdpa, as it cannot with paged: it cannot serve heads of 8"
        ]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "runs"),
    [
        (20, torch.bfloat16, "naive"),
        (20, torch.float32, "sdpa_efficient"),
        (64, torch.bfloat16, "sdpa_efficient_flash"),
    ],
)
def test_what_its_sizes_forbid_is_not_taken_instead(
    head_dim: int,
    dtype: torch.dtype,
    runs: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a GPU whose kernels take no heads of 20 in 16 bits, the log says why; names are of what runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(paged, "source", lambda device: Kernels(head_dim))
    caplog.set_level(logging.INFO, draft_attention.__name__)
    spec = replace(load(tiny_folder("llama")).spec, head_dim=head_dim)
    made = DraftAttention(spec, torch.device("cuda"), dtype)
    assert [made.beside(target).name for target in ("paged", "sdpa_efficient_flash")] == [runs, runs]
    [said] = [record.getMessage() for record in caplog.records]
    assert f"as it cannot with paged: it cannot serve heads of {head_dim}" in said
    assert ("as it cannot with sdpa: torch's efficient attention needs heads of a" in said) == (
        runs == "naive"
    )


def test_a_draft_model_follows_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A03: drafts are right with either, and a flip while requests run changes both."""
    monkeypatch.setattr(paged, "source", lambda device: Kernels(0))
    expected = tiny("llama")
    engine = Engine(
        expected.loaded, draft_model=draft_model("llama"), speculation="draft", spec_adaptive=False,
        attention="paged",
    )  # fmt: skip
    drafter = engine.core.speculator._drafter
    assert isinstance(drafter, RoundDrafter)
    for name in ("paged", "sdpa", "paged"):
        engine.set(attention=name)
        ids = engine.generate([expected.prompts[i] for i in (2, 3)], GREEDY)
        assert ids == [expected.ids[i][:10] for i in (2, 3)]
        assert drafter._attention().name == name
    assert sum(step.accepted_tok for step in engine.heard.steps) > 20
