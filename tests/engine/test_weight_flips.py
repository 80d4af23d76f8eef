"""Flips of the weights' precision under running requests: what was said stands, and the rest is the new
weights' own.

The other side is an engine that had the new weights all along and is given what was said before the flip as
its prompt: float32, greedy, so every id must be the same.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.models.loader import LoadedModel
from ipc.messages import KnobValue, Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.oracle import tiny_prompts

NEW_TOKENS = 40
Precision = dict[str, KnobValue]
MODEL: Precision = {"weight_dtype": "model"}
INT8: Precision = {"weight_dtype": "int8", "high_precision": "head"}
AWQ: Precision = {"weight_dtype": "int4", "int4_method": "awq", "high_precision": "head"}
RTN: Precision = {"weight_dtype": "int4", "int4_method": "rtn", "high_precision": "none"}
NGRAM: dict[str, Any] = {"speculation": "ngram", "spec_adaptive": False}


def model() -> LoadedModel:
    return load(tiny_folder("qwen3"))


@functools.cache
def other_side(**precision: KnobValue) -> Engine:
    """An engine that had these weights all along."""
    return Engine(model(), **precision)


def greedy(count: int) -> Sampling:
    return Sampling(max_tokens=count, ignore_eos=True)


def repetitive() -> list[list[int]]:
    """Prompts that a drafter finds much in, whatever the model makes of them."""
    rng = random.Random(2)
    return [[rng.randrange(4, 300) for _ in range(n)] * 6 for n in (3, 7, 2, 12)]


class Flipped:
    """An engine whose requests live through a series of flips.

    ``said[i]``: the ids of each request, by its number, when flip i began to convert the weights.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        precisions: Sequence[Precision],
        count: int = NEW_TOKENS,
        **knobs: Any,
    ) -> None:
        self.prompts, self.precisions, self.count = prompts, precisions, count
        self.engine = engine = Engine(model(), **precisions[0], **knobs)
        self.said: list[dict[int, list[int]]] = []
        runner = engine.core.runner
        runner.set_precision = self._noting(runner.set_precision)  # type: ignore[method-assign]
        self.rids = [engine.submit(prompt, greedy(count)) for prompt in prompts]
        for number, precision in enumerate(precisions[1:]):
            wanted = (number + 1) * count // len(precisions)
            while max(map(len, self.streamed())) < wanted:
                engine.core.step()
            engine.set(**precision)
            while len(self.said) <= number:
                engine.core.step()
        engine.run()
        self.answers = [engine.ids(rid) for rid in self.rids]  # checks that no id is missing or repeated

    def streamed(self) -> list[list[int]]:
        heard = self.engine.heard
        return [[token for part in heard.tokens[rid] for token in part.ids] for rid in self.rids]

    def _noting(self, convert: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            live = self.engine.core.answers.live
            self.said.append({
                number: list(live[rid].token_ids[live[rid].num_prompt :])
                for number, rid in enumerate(self.rids) if rid in live
            })  # fmt: skip
            for number, ids in self.said[-1].items():
                assert ids[: len(self.streamed()[number])] == self.streamed()[number]
            return convert(*args)

        return noting

    def check(self) -> None:
        """Each stretch between two flips is what its weights continue what was said before with."""
        starts = [{number: list[int]() for number in range(len(self.prompts))}, *self.said]
        for turn, precision in enumerate(self.precisions):
            weights = {
                name: value
                for name, value in precision.items()
                if name not in ("speculation", "spec_adaptive")
            }
            fresh = other_side(**weights)
            later = self.said[turn] if turn < len(self.said) else dict(enumerate(self.answers))
            for number, before in starts[turn].items():
                after = later.get(number, self.answers[number])
                assert after[: len(before)] == before, "what was said has changed"
                if len(after) > len(before):
                    prompt = [*self.prompts[number], *before]
                    count = len(after) - len(before)
                    assert [*before, *fresh.generate([prompt], greedy(count))[0]] == after, (turn, number)
        assert [len(ids) for ids in self.answers] == [self.count] * len(self.prompts)
        assert [applied.result for applied in self.engine.heard.applies] == ["ok"] * (
            len(self.precisions) - 1
        )


@pytest.mark.parametrize(("precisions", "knobs"), [
    ([AWQ, MODEL], {}),
    ([MODEL, INT8], {"overlap": True, "prefill_chunk_tokens": 7}),
    ([INT8, MODEL], {"preemption": "swap", "block_size": 4, "swap_space_gib": 0.002}),
    ([MODEL, AWQ], {"max_num_seqs": 2}),
    ([INT8, RTN, MODEL, AWQ], {"overlap": True, "preemption": "swap", "swap_space_gib": 0.002}),
], ids=["int4 to model", "model to int8", "int8 to model", "model to int4", "three flips"])  # fmt: skip
def test_what_was_said_stands_and_the_rest_is_of_the_new_weights(
    precisions: list[Precision], knobs: dict[str, Any]
) -> None:
    """A08: nothing is lost, said twice or said otherwise, whoever is still in its prompt."""
    flipped = Flipped(tiny_prompts(13), precisions, **knobs)
    flipped.check()
    assert all(any(ids for ids in said.values()) for said in flipped.said)
    plain = other_side(**precisions[0]).generate(flipped.prompts, greedy(NEW_TOKENS))
    assert plain != flipped.answers  # the new weights do say something else


@pytest.mark.parametrize("precisions", [
    [AWQ, MODEL], [MODEL, INT8], [AWQ, INT8, MODEL],
], ids=["int4 to model", "model to int8", "two flips"])  # fmt: skip
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_of_the_old_weights_are_no_tokens_of_the_new(
    precisions: list[Precision], overlap: bool
) -> None:
    """A15, A41: with drafts on. The other side never drafts."""
    flipped = Flipped(repetitive(), precisions, count=60, **NGRAM, overlap=overlap)
    flipped.check()
    last = flipped.engine.core.knobs.rev
    steps = flipped.engine.heard.steps
    for rev in (0, last):
        taken = sum(step.accepted_tok for step in steps if step.cfg_rev == rev)
        assert taken > 0, f"no draft was taken at revision {rev}"


def test_speculation_and_precision_change_together() -> None:
    flipped = Flipped(repetitive(), [AWQ, {**RTN, **NGRAM}, {**INT8, "speculation": "off"}])
    flipped.check()
    taken = {step.cfg_rev: step.accepted_tok for step in flipped.engine.heard.steps if step.accepted_tok}
    assert len(taken) == 1
