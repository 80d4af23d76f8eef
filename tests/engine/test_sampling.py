"""Sampling against the exact distributions, and every rule of its order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine import draw
from engine.request import Request
from engine.sampling import Sampler
from ipc.messages import Sampling
from tests.engine.driving import CPU, Driver, prompt, tiny

DRAWS = 50_000
Z_AT_1E4 = 3.719  # a standard normal variable exceeds it once in 10,000 trials


def request(sampling: Sampling, position: int = 10, slot: int = 0, rid: int = 1) -> Request:
    """A request whose next token has the given position; its prompt is token 0 over and over."""
    made = Request(rid, [0] * position, sampling)
    made.slot = slot
    return made


def draw_many(logits: Sequence[float], count: int = DRAWS, **settings: float) -> np.ndarray:
    """How often each id comes out of ``count`` draws: one seed, as many positions."""
    vocab = len(logits)
    sampler = Sampler(vocab, frozenset(), CPU)
    counts = np.zeros(vocab, dtype=np.int64)
    sampling = msgspec.convert({"seed": 11, **settings}, Sampling)
    rows = 500
    table = torch.tensor([list(logits)] * rows)
    requests = [request(sampling) for _ in range(rows)]
    for first in range(1, count, rows):
        for i, r in enumerate(requests):
            r.token_ids = _Length(first + i)
        ids = sampler.sample(table, requests).token_ids
        np.add.at(counts, [i for i in ids if i is not None], 1)
    return counts


class _Length(list):  # type: ignore[type-arg]
    """A list that only claims a length: positions are all that drawing reads of the tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    total = counts.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    want = expected[kept] / expected.sum() * total
    chi2 = float(((counts[kept] - want) ** 2 / want).sum())
    free = int(kept.sum()) - 1
    # The Wilson-Hilferty approximation of the chi-square quantile.
    limit = free * (1 - 2 / (9 * free) + Z_AT_1E4 * math.sqrt(2 / (9 * free))) ** 3 if free else 0.0
    assert chi2 <= limit, (chi2, counts[kept], want)


def softmax(logits: Sequence[float], temperature: float) -> np.ndarray:
    x = np.array(logits, dtype=np.float64) / temperature
    e = np.exp(x - x.max())
    return e / e.sum()


LOGITS = [1.0, -0.5, 2.0, 0.3, -1.0, 1.5, 0.0, 0.9]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_is_applied_exactly_once(temperature: float) -> None:
    """A28: 50,000 draws against softmax(logits / T); applied twice or never, chi-square explodes."""
    counts = draw_many(LOGITS, temperature=temperature)
    assert_distributed(counts, softmax(LOGITS, temperature))
    if temperature != 1.0:
        with pytest.raises(AssertionError):
            assert_distributed(counts, softmax(LOGITS, temperature**2))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("top_k", [4, 2000])
def test_top_k_keeps_the_k_most_likely(temperature: float, top_k: int) -> None:
    """A28: the path of small top_k and the one of large top_k alike."""
    p = softmax(LOGITS, temperature)
    expected = np.where(p >= np.sort(p)[-min(top_k, 8)], p, 0)
    assert_distributed(draw_many(LOGITS, temperature=temperature, top_k=top_k), expected)


def nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """p where those more likely do not reach top_p of all, else 0. Equal ones at the border all stay."""
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    floor = p[order][before < top_p * p.sum()].min()
    return np.where(p >= floor, p, 0)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("top_p", [0.5, 0.8])
def test_top_p_keeps_the_smallest_set_that_reaches_p(temperature: float, top_p: float) -> None:
    """A28: drawn with rejection, and still distributed as softmax(logits / T) cut to its nucleus."""
    expected = nucleus(softmax(LOGITS, temperature), top_p)
    assert 0 < (expected > 0).sum() < 8
    assert_distributed(draw_many(LOGITS, temperature=temperature, top_p=top_p), expected)


def test_top_p_in_a_long_flat_row_is_exact() -> None:
    """4,096 nearly equal tokens take many rounds of rejection. The nucleus is 5 of 8 groups."""
    n, groups = 4096, 8
    logits = [-(i * groups // n) * 1e-3 for i in range(n)]
    counts = draw_many(logits, count=5000, temperature=1.0, top_p=0.55)
    expected = nucleus(softmax(logits, 1.0), 0.55)
    assert counts[expected == 0].sum() == 0
    by_group = counts.reshape(groups, -1).sum(axis=1)
    want = expected.reshape(groups, -1).sum(axis=1)
    assert_distributed(by_group[want > 0], want[want > 0])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_min_p_keeps_what_is_near_the_most_likely(temperature: float) -> None:
    p = softmax(LOGITS, temperature)
    expected = np.where(p >= 0.3 * p.max(), p, 0)
    assert_distributed(draw_many(LOGITS, temperature=temperature, min_p=0.3), expected)


@pytest.mark.parametrize("top_k", [6, 2000])
def test_cuts_work_together_in_their_order(top_k: int) -> None:
    """top-k, then top-p of what it left, then min-p."""
    p = softmax(LOGITS, 1.0)
    left = np.where(p >= np.sort(p)[-min(top_k, 8)], p, 0)
    left = nucleus(left, 0.9)
    expected = np.where(left >= 0.2 * p.max(), left, 0)
    counts = draw_many(LOGITS, temperature=1.0, top_k=top_k, top_p=0.9, min_p=0.2)
    assert_distributed(counts, expected)


def test_a_large_vocabulary_is_drawn_from_by_segments() -> None:
    """49,152 tokens, of which 16 far apart carry nearly everything."""
    n = 49_152
    logits = torch.full((n,), -40.0)
    places = torch.arange(16) * 3001 + 7
    logits[places] = torch.linspace(0, 2, 16)
    weights = torch.softmax(logits, -1).repeat(200, 1)
    counts = np.zeros(16, dtype=np.int64)
    where = {int(place): i for i, place in enumerate(places)}
    for first in range(0, DRAWS, 200):
        u = draw.uniform(np.full(200, 5, dtype=np.uint64), np.arange(first, first + 200, dtype=np.uint64))
        for index in draw.inverse_cdf(weights, torch.from_numpy(u)).tolist():
            counts[where[index]] += 1
    assert_distributed(counts, softmax(torch.linspace(0, 2, 16).tolist(), 1.0))


def test_ends_of_the_unit_interval_hit_tokens_that_have_weight() -> None:
    weights = torch.tensor([[0.0, 0.0, 1.0, 0.0, 3.0, 0.0]] * 3)
    u = torch.tensor([0.0, 0.25, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw.inverse_cdf(weights, u).tolist() == [2, 4, 4]


KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and result of the known answers that come with Random123 for philox4x32-10."""


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_by_definition(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 in Python's own integers, as the paper writes it down."""
    a, b, c, d = counter
    for i in range(10):
        left, right = (
            k + i * grows & 0xFFFFFFFF for k, grows in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        (high_a, low_a), (high_c, low_c) = divmod(a * 0xD2511F53, 2**32), divmod(c * 0xCD9E8D57, 2**32)
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
    return [a, b, c, d]


def test_philox_gives_the_known_answers() -> None:
    counters, keys, results = (
        np.array([words(row[i]) for row in KNOWN], dtype=np.uint64).T for i in range(3)
    )
    even, odd = counters[::2].copy(), counters[1::2].copy()
    draw.philox(even, odd, keys)
    assert (even.tolist(), odd.tolist()) == (results[::2].tolist(), results[1::2].tolist())
    assert [philox_by_definition(words(c), words(k)) for c, k, _ in KNOWN] == [words(r) for _, _, r in KNOWN]


def test_a_uniform_number_is_53_bits_of_philox_by_seed_position_and_draw() -> None:
    """The key is the seed, the counter the position and the draw, low halves first, and all bits count."""
    pairs = [(0, 0), (2**64 - 1, 2**63 - 1), (2**32, 0), (0, 2**32), (0x0123456789ABCDEF, 0x1EDCBA9876543210)]
    seeds, positions = np.array(pairs, dtype=np.uint64).T.copy()
    for number in (0, 65, 2**32 - 1):
        expected = []
        for seed, position in pairs:
            counter = [position % 2**32, position >> 32, number, 0]
            low, high, _, _ = philox_by_definition(counter, [seed % 2**32, seed >> 32])
            expected.append((high << 32 | low) >> 11)
        assert (draw.uniform(seeds, positions, number) * 2.0**53).tolist() == expected
    assert draw.uniform(seeds[:0], positions[:0]).shape == (0,)


def test_uniform_numbers_are_even_and_differ_by_seed_position_and_draw() -> None:
    positions = np.arange(100_000, dtype=np.uint64)
    for seed in (0, 1, 2**53 - 1):
        seeds = np.full_like(positions, seed)
        u = draw.uniform(seeds, positions)
        assert ((u >= 0) & (u < 1)).all()
        observed, _ = np.histogram(u, bins=16, range=(0, 1))
        assert_distributed(observed, np.ones(16))
        # Neighbours in position, in seed and in draw are independent: pairs fill the square evenly.
        for other in (
            np.roll(u, 1),
            draw.uniform(seeds + np.uint64(1), positions),
            draw.uniform(seeds, positions, 1),
        ):
            pairs, _, _ = np.histogram2d(u, other, bins=4, range=((0, 1), (0, 1)))
            assert_distributed(pairs.ravel(), np.ones(16))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-30, 1e-45])
def test_a_tiny_temperature_is_the_greedy_choice(temperature: float) -> None:
    """A26: 1 / T overflows; the ids are those of temperature 0, whatever else is set."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * 50
    sampler = Sampler(5000, frozenset(), CPU)
    for more in ({}, {"top_k": 50}, {"top_p": 0.5, "seed": 3}):
        rows = [request(Sampling(temperature=temperature, **more)) for _ in range(4)]  # type: ignore[arg-type]
        assert sampler.sample(logits, rows).token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_an_impossible_temperature_is_refused_by_the_protocol(temperature: float) -> None:
    """A26: negative, NaN and infinite temperatures never reach the sampler."""
    packed = msgspec.msgpack.encode({"temperature": temperature})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=Sampling)


def test_greedy_rows_touch_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a greedy row asked for a random number")

    monkeypatch.setattr(draw, "uniform", refuse)
    sampler = Sampler(8, frozenset(), CPU)
    logits = torch.tensor([LOGITS] * 3)
    settings = [Sampling(seed=1), Sampling(repetition_penalty=2.0), Sampling(logprobs=3)]
    assert sampler.sample(logits, [request(s) for s in settings]).token_ids == [2, 2, 2]
    with pytest.raises(AssertionError, match="random number"):
        sampler.sample(logits, [request(Sampling(temperature=1.0))] * 3)


def test_a_seed_alone_fixes_the_random_stream_in_any_batch() -> None:
    """A13: alone, beside an unseeded mate, beside one seeded 7, and as first and last of 8."""
    loaded, _ = tiny("llama")
    mine = Sampling(temperature=0.8, seed=42)
    ids = prompt(20)
    want = Driver(loaded).generate(ids, 16, sampling=mine)
    mates: list[list[Sampling]] = [
        [Sampling(temperature=0.8)],
        [Sampling(temperature=0.8, seed=7)],
        [Sampling(temperature=1.5, seed=i, top_p=0.9, top_k=(0, 20)[i % 2]) for i in range(7)],
        [Sampling(), Sampling(temperature=1.0, min_p=0.1), Sampling(temperature=1.0, presence_penalty=1.0)],
    ]
    for others in mates:
        for first in (True, False):
            driver = Driver(loaded)
            requests = [driver.request(prompt(10 + i), s) for i, s in enumerate(others)]
            me = driver.request(ids, mine)
            requests.insert(0 if first else len(requests), me)
            driver.run(requests, 16)
            assert me.output_ids == want, (others, first)
    other_seed = Driver(loaded).generate(ids, 16, sampling=Sampling(temperature=0.8, seed=43))
    assert other_seed != want


def test_a_seeded_request_does_not_depend_on_chunks() -> None:
    """A13: the same stream whether the prompt comes whole, in chunks or token by token."""
    loaded, _ = tiny("qwen3")
    s = Sampling(temperature=1.0, seed=5, top_p=0.95)
    driver = Driver(loaded)
    want = driver.generate(prompt(40), 16, sampling=s)
    assert [driver.generate(prompt(40), 16, sampling=s, chunk=c) for c in (1, 7, 16)] == [want] * 3


def penalized(logits: Sequence[float], prompt_ids: list[int], output: list[int], s: Sampling) -> list[float]:
    """What the definitions say, token by token."""
    out = list(logits)
    for token in set(prompt_ids + output):
        out[token] = (
            out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        )
    for token in set(output):
        out[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    return out


def test_penalties_follow_their_definitions_and_the_border_of_the_prompt() -> None:
    """Repetition counts prompt and output, presence and frequency the output only."""
    rng = np.random.default_rng(0)
    sampler = Sampler(40, frozenset(), CPU)
    for trial in range(200):
        logits = rng.normal(size=40) * 2
        prompt_ids = rng.integers(0, 40, 6).tolist()
        output = rng.integers(0, 40, int(rng.integers(0, 8))).tolist()
        s = Sampling(
            repetition_penalty=float(rng.uniform(0.5, 3)),
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
        )
        mine = Request(trial, prompt_ids, s)
        mine.slot = trial % 3
        mine.token_ids += output
        want = int(np.argmax(np.float32(penalized(logits, prompt_ids, output, s))))
        rows = torch.tensor(np.stack((logits, logits)), dtype=torch.float32)
        plain = request(Sampling(), slot=9)
        assert sampler.sample(rows, [plain, mine]).token_ids == [int(np.argmax(logits)), want]


def test_penalties_keep_count_as_a_request_grows_and_its_slot_changes_hands() -> None:
    sampler = Sampler(8, frozenset(), CPU)
    s = Sampling(frequency_penalty=1.0)
    logits = torch.tensor([[3.0, 2.5, 2.0, 0, 0, 0, 0, 0]])
    first = Request(1, [0], s)
    first.slot = 0
    for _ in range(5):
        (token,) = sampler.sample(logits, [first]).token_ids
        assert token is not None
        first.token_ids.append(token)
    assert first.output_ids == [0, 1, 0, 2, 1]
    second = Request(2, [0], s)
    second.slot = 0
    assert sampler.sample(logits, [second]).token_ids == [0]
    # Back in another slot after a preemption: the same next token as without one.
    first.slot = 5
    moved = sampler.sample(logits, [first]).token_ids
    fresh = Sampler(8, frozenset(), CPU)
    assert fresh.sample(logits, [first]).token_ids == moved


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 100.0])
@pytest.mark.parametrize("repetition", [0.01, 100.0])
def test_the_strongest_repetition_penalties_leave_finite_scores(
    repetition: float, temperature: float
) -> None:
    """At the bounds of what is accepted, with scores that no model has. Of scores that are not finite the
    last id would come, which may not even be a token."""
    logits = [3e35, -3e35, 2e35, 1e30, 1.0, -1e30, 0.0, -2e35]
    occurred = [0, 1, 4, 6]
    s = Sampling(temperature=temperature, seed=3, repetition_penalty=repetition)
    r = Request(1, occurred, s)
    r.slot = 0
    want = int(np.argmax(penalized(logits, occurred, [], s)))
    assert want == (0 if repetition < 1.0 else 2)
    for rows in (1, 3):
        out = Sampler(len(logits), frozenset(), CPU).sample(torch.tensor([logits] * rows), [r] * rows)
        assert out.token_ids == [want] * rows


def test_the_repetition_penalty_equals_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1)) * 3
    ids = list(range(0, 100, 2))
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())
    r = Request(1, ids, Sampling(repetition_penalty=1.7))
    r.slot = 0
    assert Sampler(100, frozenset(), CPU).sample(logits, [r]).token_ids == [int(want.argmax())]


def test_ends_are_hidden_until_min_tokens() -> None:
    """EOS 2 and stop id 5 have the highest logits; they come out from the third token on."""
    sampler = Sampler(8, frozenset({2}), CPU)
    logits = torch.tensor([[0.0, 0, 9, 1, 0, 8, 0, 0]])
    for temperature in (0.0, 0.5):
        r = request(Sampling(min_tokens=2, stop_token_ids=[5], temperature=temperature, top_k=1))
        ids = []
        for _ in range(3):
            (token,) = sampler.sample(logits, [r]).token_ids
            assert token is not None
            r.token_ids.append(token)
            ids.append(token)
        assert ids == [3, 3, 2]


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    """Of the chosen token and the top n, before penalties and temperature; n 0 gives the chosen one only."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    want = torch.log_softmax(logits.double(), -1)
    sampler = Sampler(50, frozenset(), CPU)
    settings = [
        Sampling(logprobs=3),
        Sampling(logprobs=0, temperature=1.5, seed=2),
        Sampling(logprobs=20, temperature=0.7, top_p=0.5, repetition_penalty=1.5),
    ]
    before = logits.clone()
    out = sampler.sample(logits, [request(s, slot=i, rid=i + 1) for i, s in enumerate(settings)])
    assert torch.equal(logits, before)
    for row, n in enumerate((3, 0, 20)):
        found = out.logprobs[row]
        assert found is not None
        assert found.token == out.token_ids[row]
        assert found.logprob == pytest.approx(float(want[row, found.token]), abs=1e-5)
        values, ids = want[row].topk(n)
        assert [t.token for t in found.top] == ids.tolist()
        assert [t.logprob for t in found.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("search", [draw.max_of_rows, draw.max_in_two_stages])
def test_the_largest_of_rows_equals_argmax_nan_and_ties_included(
    search: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 4096, 5003, 49_152, 151_936):
        x = torch.randn(5, n, generator=generator)
        x[1] = 0.0
        x[2, n // 2] = math.nan
        x[3] = -math.inf
        values, at = search(x)
        want_values, want_at = x.max(-1)
        torch.testing.assert_close(values, want_values, equal_nan=True)
        assert at.tolist() == want_at.tolist()


def test_many_special_rows_are_worked_on_in_parts() -> None:
    """More rows than fit the scratch memory at once get the ids that each gets alone."""
    n = 150
    logits = torch.randn(n, 64, generator=torch.Generator().manual_seed(6))
    settings = [
        Sampling(temperature=(0.0, 1.0)[i % 2], seed=i, top_p=(1.0, 0.7)[i % 3 == 0]) for i in range(n)
    ]
    rows = [request(s, slot=i, rid=i + 1) for i, s in enumerate(settings)]
    together = Sampler(64, frozenset(), CPU).sample(logits, rows).token_ids
    alone = [
        Sampler(64, frozenset(), CPU).sample(logits[i : i + 1], [r]).token_ids[0] for i, r in enumerate(rows)
    ]
    assert together == alone
