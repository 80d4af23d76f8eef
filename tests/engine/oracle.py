"""What transformers answers: prompts, greedy ids, and the gap of the two best logits at each of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.loader import LoadedModel
from tests import demo_model as demo_files
from tests import tiny_models
from tests.engine.core_harness import load, tiny_folder
from tests.engine.speculation.told import Told

NEAR_TIE = 2e-4
NEW_TOKENS = 24
PROMPT_SEEDS = {"llama": 11, "mistral": 12, "qwen2": 11, "qwen3": 13}  # no near tie in 120 places
CHANGES: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 32}}
MODELS = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Expected:
    """What transformers says: prompts, the ids after each, and the gap of the two best logits at each id."""

    loaded: LoadedModel
    prompts: list[list[int]]
    ids: list[list[int]]
    gaps: list[list[float]]

    def compare(self, got: Sequence[Sequence[int]], which: Sequence[int] | None = None) -> None:
        for answer, index in zip(got, which or range(len(self.prompts)), strict=True):
            want = self.ids[index]
            place = next((i for i, (a, b) in enumerate(zip(answer, want, strict=False)) if a != b), None)
            if place is None:
                assert len(answer) == len(want), f"prompt {index}: {len(answer)} ids, expected {len(want)}"
                continue
            gap = self.gaps[index][place]
            kind = "a near tie, choose other prompts" if gap < NEAR_TIE else "a fault"
            pytest.fail(
                f"prompt {index} differs at output {place}: {answer[place]} for {want[place]}; the two best "
                f"logits lie {gap:.2e} apart: {kind}"
            )


def reference(loaded: LoadedModel, model: Any, prompts: list[list[int]], count: int) -> Expected:
    ids = [tiny_models.greedy(model, prompt, count) for prompt in prompts]
    gaps = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, ids, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
            top = logits.topk(2, dim=-1).values
            gaps.append((top[:, 0] - top[:, 1]).tolist())
    return Expected(loaded, prompts, ids, gaps)


def tiny_prompts(seed: int) -> list[list[int]]:
    """Two that share 40 tokens, one of block lengths, one of a single token, one long."""
    rng = random.Random(seed)
    draw = [[rng.randrange(4, 300) for _ in range(n)] for n in (40, 9, 16, 1, 100)]
    return [draw[0] + draw[1], draw[0] + [17], draw[2], draw[3], draw[4]]


def told(expected: Expected) -> Told:
    """A drafter that is right about two tokens of three, and wrong about what nobody told it."""
    answers = [prompt + ids for prompt, ids in zip(expected.prompts, expected.ids, strict=True)]
    return Told(answers, expected.loaded.spec.vocab_size, mistakes=0.3, silent=0.1)


def draft_model(architecture: str) -> Path:
    """A model that agrees with the tiny one of this architecture, and for a while with its window."""
    return tiny_folder(architecture, **CHANGES.get(architecture, {}))


@functools.cache
def tiny(architecture: str) -> Expected:
    folder = tiny_folder(architecture, **CHANGES.get(architecture, {}))
    prompts = tiny_prompts(PROMPT_SEEDS[architecture])
    expected = reference(load(folder), tiny_models.reference(folder), prompts, NEW_TOKENS)
    assert min(map(min, expected.gaps)) > NEAR_TIE, "these prompts hold a near tie"
    return expected


@functools.cache
def demo() -> Expected:
    from tests.bench.peer_transformers import hf_model

    path = demo_files.path()
    loaded = load(path)
    tokenizer = loaded.tokenizer
    story = "The lighthouse stood at the end of the bay, and every evening its keeper climbed the stairs to"
    prompts = [
        tokenizer.apply_chat_template([("user", "Name three rivers in Europe.")]),
        tokenizer.encode(story, add_special=True),
        tokenizer.encode(story + " light the lamp. One night", add_special=True),
    ]
    return reference(loaded, hf_model(path, torch.float32), prompts, 12)
