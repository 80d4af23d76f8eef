"""Drafts of a language model, asked for by hand: what it says, when it has caught up, where it stops."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import get_backend
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.linears import LinearMaker, WeightStore
from engine.request import Request
from engine.speculation.model_drafter import ModelDrafter
from engine.speculation.proposals import DraftFailed, ProposalSampler
from ipc.messages import Sampling
from tests.engine.driving import CPU, Driver, prompt, tiny

BLOCK = 16
GREEDY = Sampling(max_tokens=64)


def drafter(vocab_size: int = 320, max_len: int = 512, catch_up: int = 256) -> ModelDrafter:
    loaded, _ = tiny()
    store = WeightStore(loaded.spec, dict(loaded.weights), {}, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        decoder = Decoder(store, LinearMaker(store, measure=False), max_len=512)
    pool = KVCache.allocate(loaded.spec, num_blocks=64, block_size=BLOCK, dtype=torch.float32, device=CPU)
    return ModelDrafter(
        decoder,
        loaded.spec,
        pool,
        lambda: get_backend("sdpa", CPU),
        ProposalSampler(vocab_size, loaded.eos_token_ids, CPU, None),
        torch.from_numpy,
        max_len=max_len,
        catch_up=catch_up,
    )


def requests(lengths: Sequence[int], sampling: Sampling = GREEDY, room: int = 64) -> list[Request]:
    """Requests in slots and blocks of their own."""
    blocks = iter(range(64))
    made = []
    for i, length in enumerate(lengths):
        request = Request(i + 1, prompt(length, seed=i), sampling)
        request.slot = i
        request.block_table = list(itertools.islice(blocks, -(-(length + room) // BLOCK)))
        made.append(request)
    return made


def continuation(ids: Sequence[int], count: int, sampling: Sampling, seed: int) -> list[int]:
    """What the model itself says, alone and without drafts."""
    driver = Driver(tiny()[0])
    request = driver.request(ids, sampling)
    request.seed = seed
    return driver.run([request], count)[0]


@pytest.mark.parametrize("sampling", [
    GREEDY, Sampling(temperature=0.8, seed=3), Sampling(temperature=1.0, seed=4, top_p=0.9, logprobs=2),
    Sampling(seed=1, repetition_penalty=1.4, frequency_penalty=0.5),
    Sampling(temperature=1.1, seed=9, presence_penalty=1.0, min_tokens=20, min_p=0.02),
], ids=str)  # fmt: skip
def test_a_draft_is_what_the_draft_model_would_say(sampling: Sampling) -> None:
    """In a batch of drafts of different lengths, by each request's settings, seed and places."""
    asked = requests([5, 30, 17, 1], sampling)
    counts = [3, 7, 1, 5]
    for request, draft, count in zip(asked, drafter().propose(asked, counts), counts, strict=True):
        assert draft.token_ids == continuation(request.token_ids, count, sampling, request.seed)
        assert draft.probs is None


def test_drafts_go_on_from_what_was_verified() -> None:
    """Accepted in part, wholly, not at all, or not asked for in between: the draft is a new drafter's."""
    rng, kept = random.Random(1), drafter()
    asked = requests([12, 40, 7])
    for _ in range(12):
        some = [r for r in asked if rng.random() < 0.7]
        counts = [rng.randrange(0, 6) for _ in some]
        drafts = kept.propose(some, counts)
        again = drafter().propose(some, counts)
        assert [d.token_ids for d in drafts] == [d.token_ids for d in again]
        for request, draft in zip(some, drafts, strict=True):
            request.token_ids += draft.token_ids[: rng.randrange(0, len(draft) + 1)]
        for request in asked:
            request.token_ids += [rng.randrange(4, 300)]
    assert kept.num_followed == 3


@pytest.mark.parametrize(("plan", "lacking"), [(4, 2), (5, 5)])
def test_what_was_drafted_in_lent_blocks_counts_in_the_next_plan_alone(
    plan: int, lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a draft was accepted: its last token and the target's own are lacking then. Later the blocks
    may have been taken back, and be there again."""
    made, computed = drafter(), list[int]()
    (asked,) = requests([BLOCK - 1])
    made.plan = 3
    draft = made.propose([asked], [5])[0]  # the block that was needed anyway holds one token more
    asked.token_ids += [*draft.token_ids, 7]
    made.plan = plan
    forward = made._decoder.forward

    def counted(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        computed.append(len(ids))
        return forward(ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(made._decoder, "forward", counted)
    assert made.propose([asked], [2])[0].token_ids == drafter().propose([asked], [2])[0].token_ids
    assert computed == [lacking, 1]


def test_catching_up_takes_a_bounded_number_of_tokens_a_call() -> None:
    """Who has caught up is served meanwhile, and the rest proposes nothing until it has."""
    made = drafter(catch_up=32)
    asked = requests([100, 4, 50])
    rounds = []
    while True:
        drafts = made.propose(asked, [2, 2, 2])
        assert made.caught_up <= 32
        rounds.append([bool(draft) for draft in drafts])
        assert len(drafts[1]) == 2
        if all(rounds[-1]):
            break
    assert rounds == [[False, True, False]] * 3 + [[True, True, False], [True, True, True]]
    assert [d.token_ids for d in drafts] == [d.token_ids for d in drafter().propose(asked, [2, 2, 2])]
    made.propose(asked, [2, 2, 2])
    assert made.caught_up == 0


def test_a_slot_that_another_request_took_is_begun_anew() -> None:
    made = drafter()
    first, second = requests([40, 40])
    made.propose([first], [4])
    second.slot, second.block_table = first.slot, first.block_table
    second.token_ids[-1] = first.token_ids[-1]  # which looks like more of the same
    second.sampling = Sampling(temperature=3.0, seed=5)
    second.seed = 5
    want = drafter().propose([second], [4])
    assert made.propose([second], [4])[0].token_ids == want[0].token_ids
    made.release(second.slot)
    assert made.num_followed == 0
    made.propose([first], [4])
    made.clear()
    assert made.num_followed == 0


@pytest.mark.parametrize(("length", "count"), [(56, 5), (60, 5), (62, 3), (64, 1), (65, 0), (70, 0)])
def test_drafts_end_where_the_draft_models_context_ends(length: int, count: int) -> None:
    """A draft model's context may be shorter than the target's: the last draft token needs no place in it."""
    (draft,) = drafter(max_len=64).propose(requests([length]), [5])
    assert len(draft) == count


def test_other_numbers_of_embedding_rows_are_no_matter() -> None:
    """Rows that pad a vocabulary belong to no token: those of the draft model are never proposed, and a
    target that has more gives them no probability."""
    drawn = Sampling(temperature=5.0, seed=2)
    for vocab_size in (250, 400):
        made = drafter(vocab_size=vocab_size)
        made.drawn = True
        drafts = made.propose(requests([20, 9, 3], drawn), [12, 12, 12])
        assert all(token < min(320, vocab_size) for draft in drafts for token in draft.token_ids)
        for draft in drafts:
            assert draft.probs is not None
            assert draft.probs.shape == (12, vocab_size)
            torch.testing.assert_close(draft.probs.sum(-1), torch.ones(12))


def test_drawn_drafts_come_with_what_they_were_drawn_from() -> None:
    """But those of greedy requests, which are the most likely tokens."""
    made = drafter()
    made.drawn = True
    greedy, drawn = requests([20, 20])
    drawn.sampling = Sampling(temperature=0.9, top_k=5, seed=8)
    found = made.propose([greedy, drawn], [4, 4])
    assert found[0].probs is None
    assert found[0].token_ids == continuation(greedy.token_ids, 4, GREEDY, 0)
    probs = found[1].probs
    assert probs is not None
    assert ((probs > 0).sum(-1) == 5).all()
    assert (probs[torch.arange(4), torch.tensor(found[1].token_ids)] > 0).all()


def test_greedy_drafts_touch_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A16: temperature 0 never touches a generator, in whichever way drafts of others are made."""

    def never(*_args: object, **_options: object) -> None:
        raise AssertionError("a random number was drawn")

    for name in ("engine.draw.uniform", "engine.speculation.distribution.uniform", "torch.rand"):
        monkeypatch.setattr(name, never)
    for free in (False, True):
        made = drafter()
        made.drawn = free
        assert len(made.propose(requests([20]), [4])[0]) == 4


@pytest.mark.parametrize("free", [False, True])
def test_logits_that_are_not_finite_are_said(free: bool) -> None:
    """A25"""
    made = drafter()
    made.drawn = free
    made._decoder.embed = made._decoder.embed.clone()
    request = requests([20], Sampling(temperature=1.0, seed=1))[0]
    made._decoder.embed[request.token_ids[-1]] = float("nan")
    with pytest.raises(DraftFailed, match="request 1 are not finite"):
        made.propose([request], [2])
