"""Drafts against the target: what is kept, and that what comes out is as if there had been none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.draw
import engine.sampling
import engine.speculation.verify
from engine.request import Request
from engine.sampling import Sampler
from engine.speculation.base import Draft
from engine.speculation.verify import DraftSampler
from tests.engine.speculation.helpers import CPU, Chain, generate, nothing, request

VOCAB = 12
EOS = 2


def sampler(vocab_size: int = VOCAB) -> DraftSampler:
    return DraftSampler(vocab_size, frozenset({EOS}), CPU)


def plain(chain: Chain, prompt: list[int], count: int, **more: object) -> list[int]:
    """``count`` ids by the sampler alone, one at a time."""
    alone = Sampler(chain.vocab_size, frozenset({EOS}), CPU)
    r = request(1, prompt, max_tokens=count, **more)
    for _ in range(count):
        (token,) = alone.sample(chain.logits([r], [Draft()]), [r]).token_ids
        assert token is not None
        r.token_ids.append(token)
    return r.output_ids


def wrong(chain: Chain) -> Callable[[Request, int], Draft]:
    """A drafter that never says what a greedy target says."""

    def propose(r: Request, k: int) -> Draft:
        ids, last = [], r.token_ids[-1]
        for _ in range(k):
            last = (int(chain.table[last].argmax()) + 1) % chain.vocab_size
            ids.append(last)
        return Draft(ids)

    return propose


def oracle(text: list[int], right: int) -> Callable[[Request, int], Draft]:
    """A drafter that knows the whole text, and after ``right`` tokens says something else."""

    def propose(r: Request, k: int) -> Draft:
        ids = text[r.num_tokens : r.num_tokens + k]
        return Draft([t if i < right else (t + 1) % VOCAB for i, t in enumerate(ids)])

    return propose


def test_a_draft_that_is_always_wrong_is_never_accepted() -> None:
    """A15: not even its first token is taken unchecked; the ids are the plain greedy ones."""
    chain = Chain(VOCAB)
    r = request(1, [3, 4, 3, 4, 3, 4], max_tokens=40)
    drafted, accepted = generate(chain, sampler(), [r], wrong(chain))
    assert drafted > 100
    assert accepted == 0
    assert r.output_ids == plain(chain, [3, 4, 3, 4, 3, 4], 40)


@pytest.mark.parametrize("right", [0, 1, 2, 3, 4])
def test_a_right_start_of_a_draft_is_kept_and_nothing_after_it(right: int) -> None:
    chain = Chain(VOCAB)
    text = [5, 6, *plain(chain, [5, 6], 41)]
    r = request(1, [5, 6], max_tokens=41)
    _, accepted = generate(chain, sampler(), [r], oracle(text, right))
    assert [5, 6, *r.output_ids] == text
    assert accepted == 41 - math.ceil(41 / (right + 1))  # each step brings one token of the target's own


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_text_with_any_drafts_equals_the_text_without(data: st.DataObject) -> None:
    """Greedy and seeded requests with every setting, in one batch, each with drafts of its own length.

    Drafts are partly right, partly arbitrary; penalties must count what lies before them in the draft, and
    forget it when it is refused.
    """
    chain = Chain(VOCAB, seed=data.draw(st.integers(0, 5)))
    made, want, texts = [], [], {}
    for rid in range(1, data.draw(st.integers(1, 4)) + 1):
        more = {
            "temperature": data.draw(st.sampled_from([0.0, 0.7, 2.0])),
            "seed": data.draw(st.integers(0, 99)),
            "top_k": data.draw(st.sampled_from([0, 1, 5])),
            "top_p": data.draw(st.sampled_from([1.0, 0.6])),
            "min_p": data.draw(st.sampled_from([0.0, 0.1])),
            "repetition_penalty": data.draw(st.sampled_from([1.0, 1.6])),
            "presence_penalty": data.draw(st.sampled_from([0.0, 0.8])),
            "frequency_penalty": data.draw(st.sampled_from([0.0, 0.5])),
            "min_tokens": data.draw(st.sampled_from([0, 6])),
            "logprobs": data.draw(st.sampled_from([None, 2])),
        }
        prompt = data.draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=4))
        count = data.draw(st.integers(1, 12))
        want.append(plain(chain, prompt, count, **more))
        texts[rid] = prompt + want[-1]
        made.append(request(rid, prompt, max_tokens=count, **more))

    def propose(r: Request, k: int) -> Draft:
        right = oracle(texts[r.rid], data.draw(st.integers(0, 4)))(r, k).token_ids
        return Draft(right[: data.draw(st.integers(0, 4))])

    generate(chain, sampler(), made, propose)
    assert [r.output_ids for r in made] == want


def test_an_end_that_only_the_draft_proposes_shortens_nothing() -> None:
    """A16: a draft of EOS at once; the target ends the request where it would have ended it anyway."""
    chain = Chain(VOCAB)
    chain.table[:, EOS] = -9.0
    r = request(1, [3], max_tokens=30)
    r.stop_ids = frozenset({EOS})
    drafted, accepted = generate(chain, sampler(), [r], lambda _r, k: Draft([EOS] * k))
    assert drafted > 0
    assert accepted == 0
    assert r.finish == "length"
    assert r.output_ids == plain(chain, [3], 30)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_an_end_inside_a_draft_ends_the_request_exactly_there(at: int) -> None:
    """A16: the target agrees with EOS at each place of a draft; min_tokens hides it from the target."""
    chain = Chain(VOCAB)
    chain.table[:, EOS] = -9.0
    order = [3, 4, 5, 6, 7, 8, 9]
    for a, b in itertools.pairwise(order):
        chain.table[a, b] = 20.0
    chain.table[order[at + 1], EOS] = 30.0
    for min_tokens in (0, at + 5):
        r = request(1, [3], max_tokens=20, min_tokens=min_tokens)
        r.stop_ids = frozenset({EOS})
        chained = [3, *order[1 : at + 2], EOS, 10, 10, 10]
        # The drafter goes on after EOS; the target agrees with nothing there.
        generate(chain, sampler(), [r], lambda r, k, text=chained: Draft(text[r.num_tokens :][:k]))
        if min_tokens:
            assert EOS not in r.output_ids[: min_tokens - 1]
        else:
            assert r.output_ids == [*order[1 : at + 2], EOS]
            assert r.finish == "stop"


def test_greedy_verification_touches_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A16: every source of randomness raises; temperature 0 works, with and without probabilities."""

    def raises(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a random number was drawn")

    chain = Chain(VOCAB)
    want = plain(chain, [3], 20)
    for name in ("rand", "rand_like", "randn", "multinomial", "bernoulli"):
        monkeypatch.setattr(torch, name, raises)
    monkeypatch.setattr(torch.Tensor, "exponential_", raises)
    monkeypatch.setattr(torch.Tensor, "uniform_", raises)
    for module in (engine.draw, engine.speculation.verify):
        monkeypatch.setattr(module, "uniform", raises)
    q = torch.full((4, VOCAB), 1 / VOCAB)
    for probs in (None, q):
        r = request(1, [3], max_tokens=20, temperature=0.0)
        generate(chain, sampler(), [r], lambda r, k, probs=probs: Draft([4, 5, 6, 7], probs).first(k))
        assert r.output_ids == want
    seeded = request(2, [3], max_tokens=20, temperature=1.0)
    with pytest.raises(AssertionError, match="random number"):
        generate(chain, sampler(), [seeded], nothing)


def test_logprobs_are_given_for_accepted_tokens_too() -> None:
    """Of the model's own logits at each place, however the token was chosen."""
    chain = Chain(VOCAB)
    text = [5, *plain(chain, [5], 4)]
    own = torch.log_softmax(chain.table.double(), -1)
    q = torch.softmax(chain.table[text[:3]] / 2, -1)
    for temperature, probs in ((0.0, None), (1.0, q)):
        r = request(1, [5], temperature=temperature, seed=1, logprobs=1)
        draft = Draft(text[1:4], probs)
        (v,) = sampler().verify(chain.logits([r], [draft]), [r], [draft])
        assert len(v.token_ids) == len(v.logprobs) == v.accepted + 1
        last = 5
        for token, logprob in zip(v.token_ids, v.logprobs, strict=True):
            assert logprob is not None
            assert logprob.token == token
            assert logprob.logprob == pytest.approx(float(own[last, token]), abs=1e-5)
            assert logprob.top[0].token == int(own[last].argmax())
            last = token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_logits_that_are_not_finite_count_only_where_a_token_is_taken(temperature: float, bad: int) -> None:
    """Three drafted tokens, two of them right: places 0 to 2 count, place 3 is told to be scrubbed."""
    chain = Chain(VOCAB)
    text = [5, *plain(chain, [5], 2, temperature=temperature, seed=7)]
    probs = None
    if temperature:  # certain acceptance of the first two: the target is sure of them
        chain.table[5, text[1]] = chain.table[text[1], text[2]] = 50.0
        probs = torch.zeros(3, VOCAB)
        probs[0, text[1]] = probs[1, text[2]] = 1.0
    refused = int(chain.table[text[2]].argmin())
    if probs is not None:
        probs[2, refused] = 1.0
        chain.table[text[2], refused] = -50.0
    draft = Draft([text[1], text[2], refused], probs)
    r = request(1, [5], temperature=temperature, seed=7)
    other = request(2, [6], temperature=temperature, seed=8)
    logits = chain.logits([other, r], [Draft(), draft])
    logits[1 + bad, 4] = math.nan
    beside, v = sampler().verify(logits, [other, r], [Draft(), draft])
    assert len(beside.token_ids) == 1
    assert not beside.nonfinite
    assert v.nonfinite == (bad <= 2)
    assert v.nonfinite_beyond == (bad == 3)
    assert v.token_ids[:2] == ([] if bad <= 2 else text[1:3])


def test_rows_that_do_not_fit_the_drafts_are_refused() -> None:
    chain = Chain(VOCAB)
    r = request(1, [5])
    with pytest.raises(ValueError, match="3 rows of logits for 2 places"):
        sampler().verify(chain.table[:3], [r], [Draft([1])])
    with pytest.raises(ValueError):
        sampler().verify(chain.table[:3], [r], [Draft(), Draft()])


def test_what_the_sampler_keeps_of_a_slot_holds_verified_tokens_only() -> None:
    """Drafts refused at every step and a slot that changes hands: the counts are those of a new sampler."""
    chain = Chain(VOCAB)
    keeper = sampler()
    for rid in (1, 2):
        r = request(rid, [5, 5], max_tokens=25, frequency_penalty=1.5, repetition_penalty=1.2)
        r.slot = 3
        generate(chain, keeper, [r], wrong(chain))
        fresh = plain(chain, [5, 5], 25, frequency_penalty=1.5, repetition_penalty=1.2)
        assert r.output_ids == fresh
        assert len(set(fresh)) > 5
    seen = keeper._penalties._seen[3]
    assert seen.num_tokens <= r.num_tokens
    assert sum(seen.in_output) <= r.num_output
    keeper.release(3)
    assert not keeper._penalties._seen


def test_drafts_without_any_cost_nothing_but_the_plain_path() -> None:
    """All drafts empty: one row each, the sampler's own result."""
    chain = Chain(VOCAB)
    rows = [request(i, [i], temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(3, 9)]
    out = sampler().verify(chain.logits(rows, [Draft()] * 6), rows, [Draft()] * 6)
    want = Sampler(VOCAB, frozenset({EOS}), CPU).sample(chain.logits(rows, [Draft()] * 6), rows).token_ids
    assert [v.token_ids for v in out] == [[t] for t in want]
    assert all(v.accepted == 0 for v in out)
    assert np.unique([len(v.logprobs) for v in out]).tolist() == [1]
