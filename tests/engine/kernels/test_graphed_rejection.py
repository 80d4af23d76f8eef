"""Drawn drafts, judged inside graphs by the kernels: to the bit as where the host launches them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.graphs import counting, switch
from engine.graphs.choosing import GraphChooser
from engine.graphs.memory import Result
from engine.graphs.newest import awaited
from engine.graphs.rejecting import place_proposals
from engine.graphs.shapes import GraphShape
from engine.ops.triton_sampling import TritonSampling
from engine.sampling import as_sampled
from engine.speculation.base import Draft
from engine.speculation.verify import Verified, judge_drafts
from ipc.messages import Sampling
from tests.engine.core_harness import Engine
from tests.engine.driving import CPU
from tests.engine.graphs.alternating import drafts_every_other_step, watch
from tests.engine.graphs.fakes import CAPTURABLE, FakeDriver, StaticAttention, agree
from tests.engine.kernels.test_graphed_sampling import VOCAB, batch_of, logits, places_of, sampler
from tests.engine.oracle import draft_model, tiny

DRAWN = Sampling(temperature=1.0, seed=3)
SETTINGS = [
    DRAWN,
    Sampling(),  # its draft is matched, though it comes with probabilities
    Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=4),
    Sampling(temperature=1.2, seed=6),  # without a draft
    Sampling(temperature=1.0, min_p=0.05, seed=5),
    Sampling(temperature=0.9, seed=8),  # a draft of no known probabilities
]
ADJUSTED = [
    *SETTINGS,
    Sampling(temperature=1.0, seed=9, presence_penalty=0.5, frequency_penalty=0.4),
    Sampling(temperature=1.1, seed=10, min_tokens=9),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "MOST_COUNTED", 256)


def drafts(settings: list[Sampling], scores: Tensor) -> list[Draft]:
    """Likely tokens mostly, so that some stay, with the probabilities that a flatter model gave them."""
    generator = torch.Generator().manual_seed(11)
    out = []
    first = 0
    for i, _ in enumerate(settings):
        length = 0 if i == 3 else (2, 2, 1, 1)[i % 4]
        probs = (scores[first : first + length].nan_to_num() / 2).softmax(-1)
        ids = torch.multinomial(probs, 1, generator=generator).squeeze(1).tolist() if length else []
        out.append(Draft(ids, None if i in (3, 5) else probs))
        first += length + 1
    return out


def judged_inside(batch: Batch, scores: Tensor, shape: GraphShape) -> list[Verified]:
    """A step as a graph of ``shape`` judges it, its memory full of another step's before."""
    made = sampler()
    assert made.fused is not None
    chooser = GraphChooser(made, made.fused, None, CPU)
    assert chooser.needs_of(batch).in_shape(GraphShape(shape.rows, shape.queries)) == (shape, "")
    words = np.full(chooser.num_words(shape), 7 << 32 | 7, dtype=np.int64)  # both halves
    chooser.fill(words, shape, batch)
    chooser.send(FakeDriver())
    whole = torch.full((shape.tokens, VOCAB), float("nan"))
    whole[: len(scores)] = scores
    proposals = torch.full((shape.tokens, VOCAB), float("nan"))
    for at, probs in place_proposals(batch):
        proposals[at : at + len(probs)] = probs
    result = Result.of(torch.full((Result.num_words(shape),), -7), shape)
    given = torch.zeros(shape.tokens, dtype=torch.int64)
    given[: len(scores)] = torch.from_numpy(batch.ids)
    chooser.choose(whole, torch.from_numpy(words), shape, result, given, proposals)
    ids, places = result.ids[: len(scores)].tolist(), places_of(batch)
    top = None if result.top is None else result.top.of(places, VOCAB)
    found = judge_drafts(as_sampled(ids, top), batch.sampled_rows, batch.drafts, *result.judged.tolist())
    for row, one in zip(batch.sampled_rows, found, strict=True):  # what the next step is fed
        if not one.nonfinite:
            assert chooser.newest.known(torch.tensor([awaited(row.slot)])).tolist() == one.token_ids[-1:]
            assert int(chooser.moves.accepted[row.slot]) == one.accepted
    return found


@pytest.mark.parametrize(("kind", "settings"), [("tokens", SETTINGS), ("adjusted", ADJUSTED)])
def test_drawn_drafts_are_judged_as_outside(kind: str, settings: list[Sampling]) -> None:
    """A19: beside drafts that are matched and requests without, in a shape with rows to spare; where logits
    are not finite a draft ends, and who reaches such a place fails."""
    total = sum(len(d) + 1 for d in drafts(settings, logits(40)))
    scores = logits(total)
    made = drafts(settings, scores)
    scores[1, 5], scores[-1, 7] = float("nan"), float("inf")
    batch = batch_of(settings, made)
    inside = judged_inside(batch, scores, GraphShape(8, 3, kind, drawn=True))  # type: ignore[arg-type]
    outside = sampler().verify(scores, batch.sampled_rows, batch.drafts)
    assert inside == outside
    kept = [found.accepted for found in inside]
    assert any(kept), "nothing was accepted"
    assert any(n < len(draft) for n, draft in zip(kept, made, strict=True)), "nothing was refused"
    assert any(found.nonfinite or found.nonfinite_beyond for found in inside)


def test_log_probabilities_are_of_the_tokens_that_stand() -> None:
    """A19: of those that stay of a drawn draft and of the one that follows, of a matched one, and with
    penalties of the model's own logits."""
    settings = [msgspec.structs.replace(each, logprobs=2) for each in ADJUSTED]
    scores = logits(sum(len(d) + 1 for d in drafts(settings, logits(40))))
    made = drafts(settings, scores)
    batch = batch_of(settings, made)
    inside = judged_inside(batch, scores, GraphShape(8, 3, "adjusted", drawn=True, logprobs=True))
    outside = sampler().verify(scores, batch.sampled_rows, batch.drafts)
    assert [each.token_ids for each in inside] == [each.token_ids for each in outside]
    assert len({each.accepted for each in inside}) > 1
    for mine, other in zip(inside, outside, strict=True):
        agree(mine.logprobs, other.logprobs)


def test_a_draft_like_the_target_stays_whole() -> None:
    """p = q: every token is accepted, and one more is drawn from p, whoever decides."""
    scores = logits(5)
    probs = sampler().fused.probabilities(scores[:4], [DRAWN] * 4)  # type: ignore[union-attr]
    batch = batch_of([DRAWN], [Draft(probs.argmax(-1).tolist(), probs)])
    inside = judged_inside(batch, scores, GraphShape(1, 5, "tokens", drawn=True))
    assert inside == sampler().verify(scores, batch.sampled_rows, batch.drafts)
    assert inside[0].accepted == 4


def test_proposals_lie_where_their_tokens_are() -> None:
    """One copy for each run of drawn drafts; between them there is room for those that are matched."""
    batch = batch_of(SETTINGS, drafts(SETTINGS, logits(40)))
    place = torch.full((len(batch.ids), VOCAB), -1.0)
    runs = list(place_proposals(batch))
    for at, probs in runs:
        place[at : at + len(probs)] = probs
    at = 0
    for row, draft in zip(batch.sampled_rows, batch.drafts, strict=True):
        here = place[at : at + len(draft)]
        at += len(draft)
        drawn = draft.probs is not None and row.sampling.temperature > 0.0
        assert torch.equal(here, draft.probs if drawn else torch.full_like(here, -1.0))  # type: ignore[arg-type]
    assert bool((place[at:] == -1.0).all())
    assert 1 < len(runs) < len([draft for draft in batch.drafts if draft.probs is not None])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver(lazy=True)
    monkeypatch.setattr(switch, "probe", lambda device: None)
    monkeypatch.setattr(switch, "make_driver", lambda device: made)
    yield made
    assert not made.pending, "launched, and nobody waited for it"


def answers(
    settings: list[Sampling], *, graphs: bool, watched: list[int] | None = None, **options: object
) -> tuple[Engine, list[list[int]]]:
    """What requests get whose drafts a model draws, and the engine that answered. See `watch`."""
    expected = tiny("llama")
    engine = Engine(
        expected.loaded, draft_model=draft_model("llama"), speculation="draft", spec_tokens=3,
        spec_sampling="rejection", spec_adaptive=False, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    runner = engine.core.runner
    runner._attention, runner.decoder.ops = StaticAttention(), CAPTURABLE
    runner.sampler.fused = TritonSampling()
    runner.graphs.switch(graphs)
    found = watch(engine)
    rids = [engine.submit(expected.prompts[i % 4], each) for i, each in enumerate(settings)]
    engine.run()
    engine.core.pipeline.stop()
    if watched is not None:
        watched += found
    return engine, [engine.ids(rid) for rid in rids]


def test_what_is_launched_behind_drawn_drafts_says_the_same(driver: FakeDriver) -> None:
    """A03, A19: token by token, as where each step waits for the one before it."""
    settings = [Sampling(max_tokens=9, ignore_eos=True, temperature=1.0, seed=1)]
    with drafts_every_other_step():
        _, waited = answers(settings, graphs=False, watched=[], overlap=True)
        behind = list[int]()
        engine, found = answers(settings, graphs=True, watched=behind, overlap=True)
    assert found == waited
    assert len(behind) > 1
    assert sum(step.accepted_tok for step in engine.heard.steps) > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_texts_of_a_draft_model_are_those_without_graphs(driver: FakeDriver, overlap: bool) -> None:
    """A03, A19: token by token, and no replayed step leaves the choice to the host. The rounds that draw are
    left to it, and counted."""
    settings = [
        Sampling(max_tokens=5, ignore_eos=True, temperature=1.0, seed=1),
        Sampling(max_tokens=4, ignore_eos=True, temperature=0.7, seed=2),
        Sampling(max_tokens=3, ignore_eos=True),
    ]
    _, without = answers(settings, graphs=False, overlap=overlap)
    engine, found = answers(settings, graphs=True, overlap=overlap)
    assert found == without
    shapes = [step.kernels.rpartition("graph=")[2] for step in engine.heard.steps]
    assert any(shape.endswith("+sample+rejection") for shape in shapes)
    assert sum(step.accepted_tok for step in engine.heard.steps) > 0
    assert not engine.core.runner.graphs.counts.logits
    assert engine.core.runner.graphs.counts.drafts_missed["rejection"] > 0
    assert engine.core.runner.graphs.counts.drafted == 0


def test_proposals_count_in_the_budget(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: a shape whose probabilities would not fit runs by itself, which is counted, and says the same."""
    settings = [Sampling(max_tokens=6, ignore_eos=True, temperature=1.0, seed=1)]
    vocab_size = tiny("llama").loaded.spec.vocab_size
    # 4 tokens: 6 bytes for scores as everywhere, 4 for the target's probabilities and 4 for the proposals.
    monkeypatch.setattr(switch, "BUDGET_BYTES", 4 * 13 * vocab_size)
    engine, found = answers(settings, graphs=True)
    assert engine.core.runner.graphs.counts.misses["budget"] > 0
    assert not any("rejection" in step.kernels for step in engine.heard.steps)
    monkeypatch.setattr(switch, "BUDGET_BYTES", 1 << 30)
    engine, again = answers(settings, graphs=True)
    assert found == again
    assert any("rejection" in step.kernels for step in engine.heard.steps)
    use = engine.core.state().graphs
    forward = engine.core.runner.graphs._forward
    assert use is not None
    assert forward is not None
    assert use.graph_bytes >= 4 * 8 * vocab_size  # of proposals, of a shape of 5 tokens
