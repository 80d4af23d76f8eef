"""Rows moved on the device by the drafts that the step before accepted: to where the host would put them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.paged_triton import PagedAttention
from engine.batch import Batch, BatchBuilder
from engine.graphs.choosing import CHOICE_WORDS, POSITION_WORD, GraphChooser
from engine.graphs.moving import PLACES, Judged, Moves
from engine.graphs.newest import BEFORE, NOBODY, Newest, awaited
from engine.graphs.shapes import NO_SLOT, GraphShape
from engine.plan import ScheduledRequest
from engine.request import Request
from engine.sampling import as_sampled
from engine.speculation.base import MAX_DRAFT, Draft
from engine.speculation.verify import DraftSampler, match_drafts
from ipc.messages import Sampling
from tests.engine.driving import CPU
from tests.engine.graphs.fakes import TorchSampling

VOCAB = 4  # so that drafts often hold


def requests_of(rng: random.Random, count: int, size: int) -> list[Request]:
    """Requests that have everything but their newest token computed, in blocks for the longest draft more."""
    out = []
    blocks = list(range(1000))
    rng.shuffle(blocks)
    for slot in rng.sample(range(NOBODY), count):
        request = Request(slot + 1, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], Sampling())
        request.slot, request.num_computed = slot, request.num_tokens - 1
        covered = -(-(request.num_tokens + MAX_DRAFT + 1) // size)
        request.block_table = [blocks.pop() for _ in range(covered)]
        out.append(request)
    return out


def build(requests: list[Request], size: int, drafts: list[Draft] | None = None) -> Batch:
    each = drafts or [Draft()] * len(requests)
    rows = [ScheduledRequest(r, 1, draft=draft) for r, draft in zip(requests, each, strict=True)]
    return BatchBuilder(size, 1000).build(rows)


def chooser() -> GraphChooser:
    return GraphChooser(DraftSampler(VOCAB, frozenset(), CPU), TorchSampling(), None, CPU)


def verified(moves: Moves, batch: Batch, ids: Tensor, shape: GraphShape, judged: Judged | None) -> None:
    """Let a verification leave what it came to, its words full of another step's before."""
    leaves, none = (torch.full((n,), 7) for n in moves.num_words(shape))
    moves.fill(leaves.numpy(), none.numpy(), shape, batch)
    given = torch.full((shape.tokens,), -1)
    given[: len(batch.ids)] = torch.from_numpy(batch.ids)
    moves.leave(ids, given, leaves, shape, judged)


@pytest.mark.parametrize("seed", range(20))
def test_a_verification_leaves_what_the_host_finds(seed: int) -> None:
    """A18: of matched drafts and drawn ones, as many tokens as the host keeps and the one that follows these;
    of places that are not finite nothing goes on, and nothing that was drafted from such holds. Beside it the
    token before that one, for who drafts."""
    rng = random.Random(seed)
    count, queries = rng.randint(1, 8), rng.choice([2, 3, 5, 9, 17])
    shape = GraphShape(8, queries, "tokens", drawn=seed % 2 == 1)
    requests = requests_of(rng, count, 4)
    least = 0 if shape.drawn else -1
    drafts = [Draft([rng.randrange(least, VOCAB) for _ in range(rng.randrange(queries))]) for _ in requests]
    batch = build(requests, 4, drafts)
    ids = torch.tensor([rng.randrange(-1 if rng.random() < 0.2 else 0, VOCAB) for _ in range(shape.tokens)])
    found = match_drafts(as_sampled(ids[: len(batch.ids)].tolist(), None), batch.drafts)
    drawn = torch.zeros(8, dtype=torch.bool)
    accepted, own = torch.zeros(8, dtype=torch.int64), torch.full((8,), VOCAB)
    judged = Judged(drawn, accepted, own) if shape.drawn else None
    for i in rng.sample(range(count), count // 2 if shape.drawn else 0):
        drawn[i], accepted[i] = True, rng.randint(0, len(batch.drafts[i]))
    newest = Newest(CPU)
    moves = Moves(newest, CPU)
    verified(moves, batch, ids, shape, judged)
    for i, (row, one) in enumerate(zip(batch.sampled_rows, found, strict=True)):
        got = int(moves.accepted[row.slot]), int(newest.known(torch.tensor([awaited(row.slot)])))
        if drawn[i]:
            assert got == (int(accepted[i]), VOCAB)
        elif not one.nonfinite:
            assert got == (one.accepted, one.token_ids[-1])
        if drawn[i] or not one.nonfinite:
            text = [*requests[batch.sampled[i]].token_ids, *batch.drafts[i].token_ids[: got[0]]]
            assert int(newest.known(torch.tensor([awaited(row.slot, BEFORE)]))) == text[-1]
    assert moves.accepted[NOBODY] == 0
    others = set(range(NOBODY)) - {row.slot for row in batch.sampled_rows}
    assert not moves.accepted[sorted(others)].any()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_rows_lie_where_the_host_would_put_them(size: int) -> None:
    """A18: positions, slots, random numbers and what attention looks at, of a step that is built before the
    tokens are known and of one that is built when they are. Beside rows that do not follow a draft, in a
    shape with rows to spare."""
    rng = random.Random(size)
    for _ in range(10):
        count = rng.randint(1, 7)
        requests = requests_of(rng, count, size)
        maybe = [rng.choice([0, 1, 4, MAX_DRAFT]) for _ in requests]
        for request, most in zip(requests, maybe, strict=True):
            request.num_computed += 1
            request.num_pending, request.num_maybe = 1, most
        accepted = {r.rid: rng.randint(0, most) for r, most in zip(requests, maybe, strict=True)}
        early = build(requests, size)
        assert early.may_move == any(maybe)
        positions, slots, drawn, lengths = moved(early, accepted)
        for request in requests:
            request.token_ids += [0] * (accepted[request.rid] + 1)
            request.num_computed += accepted[request.rid]
            request.num_pending = request.num_maybe = 0
        late = build(requests, size)
        at = {request: row for row, request in enumerate(late.order)}
        same = [at[request] for request in early.order]  # the longest first, so rows may change places
        assert positions[:count].tolist() == late.positions[same].tolist()
        assert slots[:count].tolist() == late.slots[same].tolist()
        assert lengths[:count].tolist() == late.rows.lengths[same].tolist()
        numbers = [row.num_tokens for row in late.sampled_rows]
        assert drawn[:count].tolist() == [numbers[row] for row in same]
        assert slots[count:].tolist() == [NO_SLOT] * (8 - count)
        assert not lengths[count:].any()
        early.move(accepted)
        assert not early.may_move
        assert early.rows.lengths.tolist() == lengths[:count].tolist()
        assert [row.num_tokens for row in early.sampled_rows] == drawn[:count].tolist()
        assert [early.blocks_of(i) for i in range(count)] == [late.blocks_of(i) for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_drafts_lie_where_the_host_would_put_them(size: int) -> None:
    """A15, A18: all tokens of a row that follows a draft are moved by what holds of that, whatever the row
    beside it has."""
    rng = random.Random(size)
    for _ in range(10):
        count, queries = rng.randint(1, 7), rng.choice([2, 5, 17])
        requests = requests_of(rng, count, size)
        maybe = [rng.choice([0, 1, 4, MAX_DRAFT]) for _ in requests]
        drafts = [drafted(request.slot, rng.randrange(queries)) for request in requests]
        for request, most, draft in zip(requests, maybe, drafts, strict=True):
            request.num_computed += 1
            request.num_pending, request.num_maybe = 1, most
            lacking = -(-(request.num_known + most + len(draft)) // size) - len(request.block_table)
            request.block_table += [1000 - request.slot] * max(0, lacking)
        accepted = {r.rid: rng.randint(0, most) for r, most in zip(requests, maybe, strict=True)}
        early = build(requests, size, drafts)
        positions, slots, drawn, lengths = moved(early, accepted, queries)
        for request in requests:
            request.token_ids += [0] * (accepted[request.rid] + 1)
            request.num_computed += accepted[request.rid]
            request.num_pending = request.num_maybe = 0
        late = build(requests, size, drafts)
        at = {request: row for row, request in enumerate(late.order)}
        for row, entry in enumerate(early.order):
            starts = early.rows.starts[row], late.rows.starts[at[entry]]
            mine, theirs = (slice(start, start + len(drafts[entry]) + 1) for start in starts)
            assert positions[mine].tolist() == late.positions[theirs].tolist()
            assert slots[mine].tolist() == late.slots[theirs].tolist()
            assert early.ids[mine][1:].tolist() == late.ids[theirs][1:].tolist()
            first = late.sampled_rows[at[entry]].num_tokens
            assert drawn[mine].tolist() == [first + i for i in range(len(drafts[entry]) + 1)]
            assert int(lengths[row]) == late.rows.lengths[at[entry]]
        assert set(slots[len(early.ids) :].tolist()) <= {NO_SLOT}
        assert not lengths[count:].any()
        early.move(accepted)
        assert [early.blocks_of(i) for i in range(count)] == [late.blocks_of(i) for i in range(count)]


class Launched:
    """Drafts on their way."""

    taken = False

    def take(self) -> None:
        raise AssertionError("nobody waits for them here")


def drafted(slot: int, count: int) -> Draft:
    return Draft([awaited(slot, place + 1) for place in range(count)], source=Launched() if count else None)


def moved(batch: Batch, accepted: dict[int, int], queries: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, slots, numbers to draw and lengths of a step that is moved, of eight rows in its shape."""
    made, tokens = chooser(), 8 * queries
    shape, why = made.needs_of(batch).in_shape(GraphShape(8, queries))
    assert why == ""
    assert shape == GraphShape(8, queries, "tokens", moved=batch.may_move)
    for row in batch.sampled_rows:  # whoever has no draft in flight is not moved by an older one
        made.moves.accepted[row.slot] = accepted[row.rid] if row.num_maybe else MAX_DRAFT
    words = np.full(made.num_words(shape), 7 << 32 | 7, dtype=np.int64)
    made.fill(words, shape, batch)
    choice = torch.from_numpy(words)
    positions, slots = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), NO_SLOT)
    positions[: len(batch.ids)] = torch.from_numpy(batch.positions)
    slots[: len(batch.ids)] = torch.from_numpy(batch.slots)
    attention, width = PagedAttention(CPU), batch.rows.tables.shape[1] + 3
    packed = torch.from_numpy(attention.pack(batch.rows, 8, width))
    before = packed.clone()
    if shape.moved:
        attention.move(packed, made.move(positions, slots, choice, shape))
    numbers = choice[: CHOICE_WORDS * tokens].view(CHOICE_WORDS, tokens)[POSITION_WORD]
    lengths, other = packed.view(torch.int32)[9:17], before.view(torch.int32)
    other[9:17] = lengths
    assert torch.equal(other, packed.view(torch.int32))  # nothing else was changed
    return positions, slots, numbers, lengths


@pytest.mark.parametrize(("blocks", "reach"), [(1, 0), (2, 4), (5, 9)])
def test_who_is_moved_beyond_his_blocks_writes_nothing(blocks: int, reach: int) -> None:
    """He has ended, by length, and looks at no block that is not his."""
    request = Request(1, [1, 2, 3], Sampling())
    request.slot, request.num_computed, request.num_pending, request.num_maybe = 5, 3, 1, 9
    request.block_table = list(range(blocks))
    batch = build([request], 4)
    assert batch.reach.tolist() == [reach]
    assert batch.blocks_of(0) == list(range(-(-(4 + reach) // 4)))
    for accepted in range(10):
        positions, slots, _, lengths = moved(batch, {1: accepted})
        by = min(accepted, reach)
        assert (int(positions[0]), int(lengths[0])) == (3 + by, 4 + by)
        assert int(slots[0]) == (3 + accepted if accepted <= reach else NO_SLOT)
        known = build([request], 4)
        known.move({1: accepted})
        assert known.rows.lengths.tolist() == [4 + by]


def test_while_it_is_captured_nothing_is_written() -> None:
    made, shape = chooser(), GraphShape(4, 1, "tokens", moved=True)
    words = torch.zeros(made.num_words(shape), dtype=torch.int64)
    made.clear(words, shape)
    positions, slots = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    assert made.move(positions, slots, words, shape).tolist() == [0] * 4
    assert slots.tolist() == [NO_SLOT] * 4
    assert made.num_words(shape) == made.num_words(GraphShape(4, 1, "tokens")) + 4 * (3 + PLACES)


@pytest.mark.parametrize("sampling", [
    Sampling(presence_penalty=1.0), Sampling(min_tokens=9, stop_token_ids=[3]),
])  # fmt: skip
def test_what_depends_on_the_tokens_waits_for_them(sampling: Sampling) -> None:
    """Penalties count them, and ends are hidden until there are enough: then the host chooses, unless the
    draft is another request's."""
    requests = [Request(i + 1, [1, 2, 3], each) for i, each in enumerate((sampling, Sampling()))]
    for slot, request in enumerate(requests):
        request.slot, request.num_computed, request.num_pending = slot, 3, 1
        request.block_table = [slot]
    for drafted, outside in ((0, "drafts"), (1, "")):
        requests[drafted].num_maybe, requests[1 - drafted].num_maybe = 1, 0
        assert chooser().needs_of(build(requests, 16)).outside == outside
