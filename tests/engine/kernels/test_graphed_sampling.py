"""Tokens chosen inside graphs, by the kernels: the same, to the bit, as where the host launches them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import Batch, BatchBuilder, SampledRow
from engine.graphs import counting, switch
from engine.graphs.choosing import ENDS, GraphChooser
from engine.graphs.memory import Result
from engine.graphs.newest import NOBODY, cell_of, of_slot
from engine.graphs.shapes import GraphShape
from engine.ops.triton_sampling import TritonSampling
from engine.plan import ScheduledRequest
from engine.request import Request
from engine.sampling import Sampled, as_sampled
from engine.speculation.base import NO_DRAFT, Draft
from engine.speculation.proposals import ProposalSampler
from engine.speculation.rows import DraftRow
from engine.speculation.verify import DraftSampler
from ipc.messages import Sampling
from tests.engine.core_harness import Engine
from tests.engine.driving import CPU
from tests.engine.graphs.fakes import CAPTURABLE, FakeDriver, StaticAttention, agree
from tests.engine.oracle import tiny, told

VOCAB = 300
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.0, repetition_penalty=1.8, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=0.0, min_tokens=9),
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=1.3, top_k=20, top_p=0.6, seed=7),
    Sampling(temperature=1.0, top_k=50, min_p=0.2, seed=8, frequency_penalty=0.5),
    Sampling(temperature=1.0, top_p=0.8, seed=10, min_tokens=6, stop_token_ids=[8], presence_penalty=1.0),
]
ADJUSTED = [SETTINGS[6], *SETTINGS]  # the first row has everything, so that no word before it is left out
PLAIN = [each for each in SETTINGS if each.min_tokens == 0 and each.frequency_penalty == 0.0]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without work take the interpreter's time too."""
    monkeypatch.setattr(counting, "MOST_COUNTED", 256)


def batch_of(settings: Sequence[Sampling], drafts: Sequence[Draft] = ()) -> Batch:
    """Requests of a prompt of four tokens and an output of three, their newest token to be computed."""
    rows = []
    for i, each in enumerate(settings):
        request = Request(i + 1, [5, 6, 7, 5], each)
        request.token_ids += [8, 8, 9]
        request.slot, request.num_computed, request.block_table = i, 6, [i]
        rows.append(ScheduledRequest(request, 1, draft=drafts[i] if drafts else NO_DRAFT))
    batch = BatchBuilder(16, len(rows)).build(rows)
    batch.fill()
    return batch


def logits(rows: int) -> Tensor:
    """Scores of which the tokens that occurred, and the one that ends, are the largest of some rows."""
    out = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))
    out[:, [3, 8]] += 3.0
    return out


def sampler() -> DraftSampler:
    made = DraftSampler(VOCAB, frozenset({3}), CPU)
    made.fused = TritonSampling()
    return made


def places_of(batch: Batch) -> list[SampledRow]:
    """The request of each place that logits are wanted of."""
    both = zip(batch.sampled_rows, batch.drafts, strict=True)
    return [row for row, draft in both for _ in range(len(draft) + 1)]


def chosen_inside(batch: Batch, scores: Tensor, shape: GraphShape, padded: Tensor | None) -> Sampled:
    """What a graph of ``shape`` chooses of a step, its words full of another step's before."""
    made = sampler()
    assert made.fused is not None
    chooser = GraphChooser(made, made.fused, padded, CPU)
    assert chooser.needs_of(batch).in_shape(GraphShape(shape.rows, shape.queries)) == (shape, "")
    words = np.full(chooser.num_words(shape), 7 << 32 | 7, dtype=np.int64)  # both halves
    chooser.fill(words, shape, batch)
    chooser.send(FakeDriver())
    whole = torch.full((shape.tokens, VOCAB), float("nan"))
    whole[: len(scores)] = scores
    result = Result.of(torch.full((Result.num_words(shape),), -7), shape)
    given = torch.zeros(shape.tokens, dtype=torch.int64)
    chooser.choose(whole, torch.from_numpy(words), shape, result, given)
    top = None if result.top is None else result.top.of(places_of(batch), VOCAB)
    return as_sampled(result.ids[: len(scores)].tolist(), top)


@pytest.mark.parametrize("kind", ["tokens", "adjusted"])
def test_every_setting_gives_what_it_gives_outside(kind: str) -> None:
    """A07: in a shape with rows to spare, with ids that no token belongs to, and rows that are not finite."""
    settings = PLAIN if kind == "tokens" else ADJUSTED
    batch = batch_of([*settings, settings[0], settings[-1]])
    scores = logits(len(settings) + 2)
    scores[-2, 40], scores[-1, 3] = float("nan"), float("inf")
    padded = torch.tensor([8]) if kind == "tokens" else None
    shape = GraphShape(16, 1, kind)  # type: ignore[arg-type]
    inside = chosen_inside(batch, scores, shape, padded).token_ids
    if padded is not None:
        scores.index_fill_(1, padded, float("-inf"))
    outside = sampler().sample(scores, batch.sampled_rows)
    assert inside == outside.token_ids
    assert inside[-2:] == [None, None]
    assert len(set(inside)) > 3


@pytest.mark.parametrize("vocabulary", [VOCAB, VOCAB - 20, VOCAB + 20])
def test_a_model_drafts_inside_what_it_drafts_outside(vocabulary: int) -> None:
    """A07, A15: of as many tokens as the target has, fewer or more, never one that no token belongs to; -1
    where its logits are not finite. Rows to spare reach nobody."""
    rows = [DraftRow(i, i, each, 7 + i, 2, 30 + i, []) for i, each in enumerate(PLAIN)]
    scores = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(4)) * 3
    padded, made = torch.tensor([8, int(scores[0, :VOCAB].argmax())]), sampler()
    assert made.fused is not None
    chooser = GraphChooser(made, made.fused, padded, CPU)
    proposals = ProposalSampler(VOCAB, frozenset({3}), CPU, padded)
    proposals.fused = made.fused
    wants, _ = proposals.propose(scores[: len(rows)].clone(), rows, drawn=False)
    seeds, positions = (np.array([getattr(r, at) for r in rows], np.uint64) for at in ("seed", "num_tokens"))
    packed = torch.from_numpy(made.fused.pack(PLAIN, seeds, positions, 8).reshape(-1))
    cells = torch.tensor([cell_of(row.slot, 2) for row in rows] + [NOBODY] * (8 - len(rows)))
    for bad in (False, True):
        if bad:
            scores[1, 40] = float("nan")
            wants[1] = -1
        chooser.propose(scores.clone(), packed, cells)
        drafted = chooser.newest.drafted(2)
        assert [of_slot(drafted, row.slot, 2)[1] for row in rows] == wants
        assert of_slot(drafted, len(rows), 2) == [0, 0]
    assert not {8, int(padded[1])} & set(wants)
    assert len(set(wants)) > 2


@pytest.mark.parametrize("setting", [SETTINGS[1], Sampling(temperature=0.0, min_tokens=9)])
def test_a_row_alone_takes_nothing_from_the_step_before(setting: Sampling) -> None:
    """A07: its penalties and its hidden ends are the first of their lists."""
    batch, scores = batch_of([setting]), logits(1)
    scores[0, 8] += 3.0
    scores[0, 3] += 4.0 * bool(setting.min_tokens)
    outside = sampler().sample(scores.clone(), batch.sampled_rows)
    assert outside.token_ids != [int(scores.argmax())]
    assert chosen_inside(batch, scores, GraphShape(1, 1, "adjusted"), None).token_ids == outside.token_ids


def test_each_place_of_a_draft_is_chosen_as_outside() -> None:
    """A19: penalties count what was drafted before a place, random numbers are those of the place."""
    drafts = [Draft([8, 9, 3][: i % 4]) for i in range(len(ADJUSTED))]
    batch = batch_of(ADJUSTED, drafts)
    scores = logits(len(batch.ids))
    inside = chosen_inside(batch, scores, GraphShape(8, 5, "adjusted"), None).token_ids
    found = sampler().verify(scores, batch.sampled_rows, batch.drafts)
    first = 0
    for each, draft in zip(found, batch.drafts, strict=True):
        assert each.token_ids == inside[first : first + each.accepted + 1]
        first += len(draft) + 1


@pytest.mark.parametrize("kind", ["tokens", "adjusted"])
def test_log_probabilities_are_those_made_outside(kind: str) -> None:
    """A07: of the model's own logits, whatever penalties change; each row gets as many as it asks for, be it
    none but the chosen one's, and who asks for none, or is not finite, gets none."""
    settings = 2 * PLAIN if kind == "tokens" else ADJUSTED
    asked = [None, 0, 1, 5, 20]
    batch = batch_of([msgspec.structs.replace(s, logprobs=asked[i % 5]) for i, s in enumerate(settings)])
    scores = logits(len(settings))
    scores[2, 40] = float("nan")
    padded = torch.tensor([200, 201])
    shape = GraphShape(16, 1, kind, logprobs=True)  # type: ignore[arg-type]
    inside = chosen_inside(batch, scores, shape, padded)
    outside = sampler().sample(scores.index_fill(1, padded, float("-inf")), batch.sampled_rows)
    assert inside.token_ids == outside.token_ids
    agree(inside.logprobs, outside.logprobs)
    told = [None if each is None else len(each.top) for each in inside.logprobs]
    assert told[:6] == [None, 0, None, 5, 20, None]


def test_log_probabilities_of_each_place_of_a_draft() -> None:
    """A19: where drafts are matched."""
    drafts = [Draft([8, 9, 3][: i % 4]) for i in range(len(ADJUSTED))]
    batch = batch_of([msgspec.structs.replace(each, logprobs=2) for each in ADJUSTED], drafts)
    scores = logits(len(batch.ids))
    inside = chosen_inside(batch, scores, GraphShape(8, 5, "adjusted", logprobs=True), None)
    found = sampler().verify(scores, batch.sampled_rows, batch.drafts)
    first = 0
    for each, draft in zip(found, batch.drafts, strict=True):
        agree(inside.logprobs[first : first + each.accepted + 1], each.logprobs)
        first += len(draft) + 1


@pytest.mark.parametrize(("changes", "why"), [
    ({"presence_penalty": 1.0}, "penalties"),
    ({"min_tokens": 9, "stop_token_ids": list(range(ENDS))}, "min_tokens"),
])  # fmt: skip
def test_what_has_no_room_is_chosen_outside(
    changes: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MOST_COUNTED", 4)  # of 5 distinct ones
    made = sampler()
    assert made.fused is not None
    batch = batch_of([Sampling(**changes)])  # type: ignore[arg-type]
    shape = GraphShape(1, 1)
    assert GraphChooser(made, made.fused, None, CPU).needs_of(batch).in_shape(shape) == (shape, why)


def test_drawn_drafts_have_shapes_of_their_own() -> None:
    made = sampler()
    assert made.fused is not None
    chooser = GraphChooser(made, made.fused, None, CPU)
    drawn = Draft([8], torch.full((1, VOCAB), 1 / VOCAB))
    shape, drawn_shape = GraphShape(1, 2), GraphShape(1, 2, "tokens", drawn=True)
    for settings, found in (
        (Sampling(temperature=1.0), (drawn_shape, "")),
        (Sampling(temperature=0.0), (GraphShape(1, 2, "tokens"), "")),
        (Sampling(temperature=1.0, logprobs=1), (replace(drawn_shape, logprobs=True), "")),
    ):
        assert chooser.needs_of(batch_of([settings], [drawn])).in_shape(shape) == found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver(lazy=True)
    monkeypatch.setattr(switch, "probe", lambda device: None)
    monkeypatch.setattr(switch, "make_driver", lambda device: made)
    yield made
    assert not made.pending, "launched, and nobody waited for it"


def answers(
    settings: Sequence[Sampling], *, graphs: bool, **options: object
) -> tuple[Engine, list[list[int]]]:
    """What requests get, all at once, and the engine that answered."""
    expected = tiny("llama")
    engine = Engine(expected.loaded, **options)  # type: ignore[arg-type]
    runner = engine.core.runner
    runner._attention, runner.decoder.ops = StaticAttention(), CAPTURABLE
    runner.sampler.fused = TritonSampling()
    runner.graphs.switch(graphs)
    rids = [engine.submit(expected.prompts[i % 4], each) for i, each in enumerate(settings)]
    engine.run()
    engine.core.pipeline.stop()  # the thread, if steps overlap
    return engine, [engine.ids(rid) for rid in rids]


@pytest.mark.parametrize("overlap", [False, True])
def test_texts_are_those_without_graphs(driver: FakeDriver, overlap: bool) -> None:
    """A07: plain rows alone at last, and others before; nothing is read before it has come."""
    settings = [
        Sampling(max_tokens=3, ignore_eos=True, temperature=1.0, seed=1, frequency_penalty=0.7),
        Sampling(max_tokens=4, ignore_eos=True),
        Sampling(max_tokens=6, ignore_eos=True, temperature=0.8, top_k=9, seed=3),
    ]
    _, without = answers(settings, graphs=False, overlap=overlap)
    engine, found = answers(settings, graphs=True, overlap=overlap)
    assert found == without
    shapes = [step.kernels.rpartition("graph=")[2] for step in engine.heard.steps]
    assert {"4x1+penalties+sample", "2x1+sample", "1x1+sample"} <= set(shapes)
    assert not engine.core.runner.graphs.counts.logits


def test_drafts_are_matched_with_what_the_graph_chose(driver: FakeDriver) -> None:
    """A03: texts are those of the reference, and drafts were accepted in replayed steps."""
    expected = tiny("llama")
    settings = [Sampling(max_tokens=10, ignore_eos=True)] * 3
    engine, found = answers(
        settings, graphs=True, drafter=told(expected), speculation="ngram", spec_adaptive=False
    )
    assert found == [expected.ids[i][:10] for i in range(3)]
    replayed = [step for step in engine.heard.steps if step.kernels.endswith("+sample")]
    assert sum(step.accepted_tok for step in replayed) > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_clients_get_the_log_probabilities_of_steps_that_are_replayed(
    driver: FakeDriver, overlap: bool
) -> None:
    """A07: beside requests that ask for none."""
    settings = [
        Sampling(max_tokens=3, ignore_eos=True, logprobs=1),
        Sampling(max_tokens=4, ignore_eos=True),
        Sampling(max_tokens=4, ignore_eos=True, logprobs=3, temperature=1.0, seed=2, presence_penalty=1.0),
    ]
    others, without = answers(settings, graphs=False, overlap=overlap)
    engine, found = answers(settings, graphs=True, overlap=overlap)
    assert found == without
    for mine, other in zip(engine.heard.done, others.heard.done, strict=True):
        agree(engine.logprobs(mine), others.logprobs(other))
    shapes = [step.kernels.rpartition("graph=")[2] for step in engine.heard.steps]
    assert {"4x1+penalties+sample+logprobs"} <= set(shapes)
    assert not engine.core.runner.graphs.counts.logits


def test_penalties_on_many_tokens_take_the_logits_out_of_the_graph(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted with the reason, step by step, and told to clients."""
    driver.lazy = False
    monkeypatch.setattr(counting, "MOST_COUNTED", 1)
    settings = [Sampling(max_tokens=3, ignore_eos=True, presence_penalty=1.0)]
    engine, found = answers(settings, graphs=True)
    assert found == answers(settings, graphs=False)[1]
    use = engine.core.state().graphs
    assert use is not None
    assert use.logits_n == {"penalties": use.replayed_n}
