"""Kept answers: given again only to an equal request, and then to the letter."""

from __future__ import annotations

import random
import threading
from typing import Any

import msgspec
import pytest

from engine import result_cache
from engine.door import RequestRefused
from engine.knob import KnobContext
from engine.knob_store import KnobStore
from engine.knobs import BY_ID, KNOBS
from engine.models.loader import LoadedModel
from engine.request import Request
from engine.result_cache import ENTRY_BYTES, NEUTRAL_KNOBS, Answer, ResultCache, Ticket, is_deterministic
from ipc.messages import KnobValue, RequestRow, Sampling, TokenLogprob, Tokens, TopLogprob
from tests.engine.core_harness import Engine, load, tiny_folder

GREEDY = Sampling(max_tokens=12, ignore_eos=True)
DEFAULTS = KnobStore(KnobContext(), {}).values


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


def prompt(seed: int, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 300) for _ in range(length)]


def cache(identity: str = "model", **values: KnobValue) -> ResultCache:
    made = ResultCache(identity)
    made.configure({**DEFAULTS, "result_cache": True, **values})
    return made


def key(
    sampling: Sampling = GREEDY,
    *,
    ids: tuple[int, ...] = (5, 6, 7),
    salt: str = "",
    in_: ResultCache | None = None,
) -> bytes:
    ticket = (in_ or cache()).ticket(Request(1, ids, sampling, cache_salt=salt))
    assert ticket is not None
    return ticket.key


def answer(number: int, size: int = 3) -> Answer:
    return Answer(ids=[number] * size, logprobs=None, finish="length", stop_reason=None)


# --- the key -------------------------------------------------------------------------------------

OTHER_VALUES: dict[str, Any] = {
    "temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": 0.2, "seed": 8, "logprobs": 2, "max_tokens": 13,
    "min_tokens": 1, "ignore_eos": False, "stop_token_ids": [9], "stop": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("field", Sampling.__struct_fields__)
def test_each_field_of_the_sampling_settings_is_part_of_the_key(field: str) -> None:
    """Fields are taken from the struct, so a new one needs a value here and cannot be forgotten."""
    base = msgspec.structs.replace(GREEDY, seed=7)
    assert getattr(base, field) != OTHER_VALUES[field]
    changed = msgspec.structs.replace(base, **{field: OTHER_VALUES[field]})
    assert key(changed) != key(base)
    assert key(changed) == key(msgspec.structs.replace(base, **{field: OTHER_VALUES[field]}))


def test_prompt_salt_and_model_are_part_of_the_key() -> None:
    base = key()
    others = [
        key(ids=(5, 6, 8)), key(ids=(5, 6)), key(ids=(6, 5, 7)), key(salt="a"), key(salt="b"),
        key(in_=cache("another model")),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1
    assert key() == base


def test_texts_that_blend_at_their_border_have_keys_of_their_own() -> None:
    assert key(msgspec.structs.replace(GREEDY, stop=["ab", "c"])) != key(
        msgspec.structs.replace(GREEDY, stop=["a", "bc"])
    )
    blended = [
        result_cache._key(context, Request(1, [5], GREEDY, cache_salt=salt))
        for context, salt in ((b"ab", "c"), (b"a", "bc"))
    ]
    assert blended[0] != blended[1]


def another(knob_id: str) -> KnobValue:
    knob = BY_ID[knob_id]
    if knob.type == "bool":
        return not knob.default
    if knob.type == "choice":
        return next(choice for choice in knob.choices if choice != knob.default)
    return (knob.default or 0) + 1  # type: ignore[operator]


@pytest.mark.parametrize("knob_id", [knob.id for knob in KNOBS])
def test_every_knob_is_part_of_the_key_or_named_as_neutral(knob_id: str) -> None:
    """A new knob is part of the key unless somebody says that no answer depends on it."""
    if knob_id == "result_cache":
        assert cache(result_cache=False).ticket(Request(1, [5], GREEDY)) is None
        return
    changed = cache(**{knob_id: another(knob_id)})
    assert (key(in_=changed) == key()) == (knob_id in NEUTRAL_KNOBS)


def test_no_lossy_knob_and_none_that_is_not_there_counts_as_neutral() -> None:
    assert {knob.id for knob in KNOBS} >= NEUTRAL_KNOBS
    assert not [knob.id for knob in KNOBS if knob.lossy and knob.id in NEUTRAL_KNOBS]


@pytest.mark.parametrize(("sampling", "kept"), [
    (Sampling(), True), (Sampling(temperature=0.8, seed=0), True), (Sampling(temperature=0.8), False),
    (Sampling(temperature=0.8, top_k=1), True), (Sampling(temperature=1e-9), True),
    (Sampling(temperature=0.01), False),
])  # fmt: skip
def test_only_deterministic_requests_are_kept(sampling: Sampling, kept: bool) -> None:
    assert is_deterministic(sampling) == kept
    assert (cache().ticket(Request(1, [5], sampling)) is not None) == kept


# --- what is kept --------------------------------------------------------------------------------


def test_an_answer_comes_back_as_it_was() -> None:
    kept = cache()
    ticket = kept.ticket(Request(1, [5], GREEDY))
    assert ticket is not None
    assert kept.get(ticket) is None
    whole = Answer(
        ids=[1, 2, 3],
        logprobs=[
            TokenLogprob(token=n, logprob=-0.5 * n, top=[TopLogprob(token=9, logprob=float("-inf"))])
            for n in (1, 2, 3)
        ],
        finish="stop",
        stop_reason="\n\n",
    )
    kept.put(ticket, whole)
    assert kept.get(ticket) == whole
    assert (kept.num_answers, kept.hits) == (1, 1)


def test_bytes_are_bounded_and_the_least_used_goes_first() -> None:
    kept = cache()
    kept._max_bytes = 10 * (ENTRY_BYTES + 20)
    tickets = [kept.ticket(Request(n, [n], GREEDY)) for n in range(1, 40)]
    assert all(tickets)
    first = tickets[0]
    assert first is not None
    most = 0
    for n, ticket in enumerate(tickets):
        assert ticket is not None
        kept.put(ticket, answer(n))
        assert kept.get(first) is not None, "it is used all the time"
        most = max(most, kept.nbytes)
    assert most <= kept._max_bytes
    assert 5 < kept.num_answers < 15
    assert kept.nbytes == sum(len(body) + ENTRY_BYTES for body in kept._answers.values())
    before = kept.num_answers
    last = tickets[-1]
    assert last is not None
    kept.put(last, answer(1, size=10_000))
    assert kept.num_answers == before, "what is larger than everything is not kept"
    kept.put(last, answer(2))
    assert kept.nbytes == sum(len(body) + ENTRY_BYTES for body in kept._answers.values())


def test_switched_off_everything_is_dropped() -> None:
    kept = cache()
    ticket = kept.ticket(Request(1, [5], GREEDY))
    assert ticket is not None
    kept.put(ticket, answer(1))
    kept.configure({**DEFAULTS, "result_cache": False})
    assert (kept.num_answers, kept.nbytes) == (0, 0)
    kept.put(ticket, answer(1))
    assert kept.num_answers == 0
    kept.configure({**DEFAULTS, "result_cache": True})
    assert kept.get(ticket) is None


def test_an_answer_that_saw_a_change_is_not_kept_even_if_it_was_undone() -> None:
    kept = cache()
    ticket = kept.ticket(Request(1, [5], GREEDY))
    assert ticket is not None
    for value in (16, 0):
        kept.configure({**DEFAULTS, "result_cache": True, "sliding_window": value})
    kept.put(ticket, answer(1))
    assert kept.num_answers == 0
    again = kept.ticket(Request(1, [5], GREEDY))
    assert again is not None
    assert again.key == ticket.key
    kept.configure({**DEFAULTS, "result_cache": True, "max_num_seqs": 3})
    kept.put(again, answer(1))
    assert kept.num_answers == 1, "a knob that no answer depends on"


def test_several_threads_leave_the_count_of_bytes_right() -> None:
    kept = cache()
    kept._max_bytes = 20 * (ENTRY_BYTES + 30)

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2000):
            ticket = Ticket(bytes([rng.randrange(60)]), kept._generation)
            if rng.random() < 0.5:
                kept.put(ticket, answer(rng.randrange(9), rng.randrange(1, 20)))
            else:
                kept.get(ticket)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert kept.nbytes == sum(len(body) + ENTRY_BYTES for body in kept._answers.values()) <= kept._max_bytes


# --- in the engine -------------------------------------------------------------------------------


def told(engine: Engine, rid: int) -> dict[str, Any]:
    """All that a client has of an answer, but for times."""
    done, streamed = engine.heard.done[rid], engine.heard.tokens[rid]
    streamed_logprobs = [logprob for tokens in streamed for logprob in tokens.logprobs or []]
    return {
        "ids": engine.ids(rid),
        "text": engine.text(rid),
        "logprobs": done.logprobs or streamed_logprobs or None,
        "finish": done.finish,
        "stop_reason": done.stop_reason,
        "usage": (done.row.prompt_tok, done.row.output_tok),
    }


def samplings(model: LoadedModel) -> list[Sampling]:
    """Every way to end, with the answer's own text and ids in them."""
    engine = Engine(model)
    [ids] = engine.generate([prompt(3)], Sampling(max_tokens=20, ignore_eos=True))
    text = model.tokenizer.decode(ids)
    return [
        GREEDY,
        Sampling(max_tokens=20, ignore_eos=True, logprobs=3),
        Sampling(max_tokens=20, ignore_eos=True, stop=[text[9:12], text[5:7]], logprobs=1),
        Sampling(max_tokens=20, ignore_eos=True, stop=[text[9:12]], min_tokens=6),
        Sampling(max_tokens=20, stop_token_ids=[ids[5]]),
        Sampling(max_tokens=20, temperature=0.9, seed=4, ignore_eos=True, logprobs=2),
        Sampling(max_tokens=1, ignore_eos=True),
    ]


@pytest.mark.parametrize("batched", [False, True])
def test_a_hit_is_the_same_answer_streamed_or_not(model: LoadedModel, batched: bool) -> None:
    kinds = samplings(model)
    engine = Engine(model, result_cache=True, batched_detokenize=batched)
    for first_streamed in (True, False):
        for sampling in kinds:
            sampling = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens + first_streamed)
            first = engine.submit(prompt(3), sampling, stream=first_streamed)
            engine.run()
            steps = len(engine.heard.steps)
            hits = [
                engine.submit(prompt(3), sampling, stream=stream, tag="again") for stream in (True, False)
            ]
            engine.run()
            assert len(engine.heard.steps) == steps, "nothing was computed"
            assert not engine.heard.done[first].row.result_cached
            for rid in hits:
                assert told(engine, rid) == told(engine, first)
                row = engine.heard.done[rid].row
                assert row.result_cached
                assert engine.heard.rows[rid] == [row]
                assert row.first_ns == row.last_ns == row.end_ns is not None
                assert row.arrive_ns <= row.first_ns
                assert (row.sched_ns, row.computed_tok, row.cached_tok, row.tag) == (None, 0, 0, "again")
    assert engine.core.results.hits == 4 * len(kinds)
    state = engine.core.state()
    assert (state.result_n, state.result_hits) == (2 * len(kinds), 4 * len(kinds))
    assert state.result_bytes > 0


def test_a_hit_is_no_query_of_the_prefix_cache_and_joins_no_queue(model: LoadedModel) -> None:
    """A full queue refuses others; a known answer needs no place in it."""
    engine = Engine(model, result_cache=True, max_num_queued=2)
    first = engine.submit(prompt(1), GREEDY)
    engine.run()
    queries = sum(step.query_tok for step in engine.heard.steps)
    for n in range(2):
        engine.submit(prompt(50 + n), GREEDY)
    with pytest.raises(RequestRefused):
        engine.submit(prompt(60), GREEDY)
    hit = engine.submit(prompt(1), GREEDY)
    engine.run()
    assert engine.heard.done[hit].row.result_cached
    assert told(engine, hit) == told(engine, first)
    assert sum(step.query_tok for step in engine.heard.steps) == queries + 2 * 20


def test_long_answers_come_in_several_messages(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, result_cache=True)
    first = engine.submit(prompt(1), Sampling(max_tokens=30, ignore_eos=True, logprobs=1))
    engine.run()
    monkeypatch.setattr("engine.delivery.MAX_IDS_A_MESSAGE", 8)
    hit = engine.submit(prompt(1), Sampling(max_tokens=30, ignore_eos=True, logprobs=1))
    engine.run()
    assert [len(tokens.ids) for tokens in engine.heard.tokens[hit]] == [8, 8, 8, 6]
    assert told(engine, hit) == told(engine, first)


def rows_of(engine: Engine, rid: int) -> RequestRow:
    return engine.heard.done[rid].row


def test_other_tenants_and_unseeded_requests_are_computed(model: LoadedModel) -> None:
    engine = Engine(model, result_cache=True)
    for _ in range(2):
        for salt in ("a", "b"):
            engine.submit(prompt(1), GREEDY, cache_salt=salt)
            engine.run()
        engine.submit(prompt(1), Sampling(max_tokens=4, temperature=0.9, ignore_eos=True))
        engine.run()
    assert [rows_of(engine, rid).result_cached for rid in range(1, 7)] == [False] * 3 + [True, True, False]


def test_what_did_not_end_well_is_not_kept(model: LoadedModel, monkeypatch: Any) -> None:
    """Cancelled, failed and non-finite requests are computed anew."""
    engine = Engine(model, result_cache=True)
    cancelled = engine.submit(prompt(1), GREEDY)
    for _ in range(4):
        engine.core.step()
    engine.core.cancel([cancelled])
    engine.run()
    forward = engine.core.runner.decoder.forward
    calls = 0

    def poisoned(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        logits = forward(*args)
        if calls == 3:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(engine.core.runner.decoder, "forward", poisoned)
    broken = engine.submit(prompt(2), GREEDY)
    engine.run()
    monkeypatch.undo()
    assert [engine.heard.done[rid].finish for rid in (cancelled, broken)] == ["cancelled", "error"]
    assert engine.core.results.num_answers == 0
    for seed in (1, 2):
        rid = engine.submit(prompt(seed), GREEDY)
        engine.run()
        assert not rows_of(engine, rid).result_cached
        assert [engine.ids(rid)] == Engine(model).generate([prompt(seed)], GREEDY)


def test_flips_while_running_keep_only_what_saw_one_configuration(model: LoadedModel) -> None:
    engine = Engine(model, result_cache=True)
    engine.submit(prompt(1), GREEDY)
    engine.core.step()
    engine.set(attention="naive")
    engine.run()
    assert engine.core.results.num_answers == 0
    engine.submit(prompt(1), GREEDY)
    engine.core.step()
    engine.set(max_num_seqs=7)
    engine.run()
    assert engine.core.results.num_answers == 1
    engine.set(attention="sdpa")
    engine.core.step()
    other = engine.submit(prompt(1), GREEDY)
    engine.run()
    assert not rows_of(engine, other).result_cached, "it was computed by another kernel"
    engine.set(result_cache=False)
    engine.core.step()
    assert engine.core.state().result_n == 0
    assert not rows_of(engine, other).result_cached
    again = engine.submit(prompt(1), GREEDY)
    engine.run()
    assert not rows_of(engine, again).result_cached


def test_a_preempted_request_is_kept_like_any_other(model: LoadedModel) -> None:
    engine = Engine(model, result_cache=True, pool_tokens=12 * 16)
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    rids = [engine.submit(prompt(n, 40), sampling) for n in range(4)]
    engine.run()
    assert sum(rows_of(engine, rid).preempt_n for rid in rids) >= 1
    hits = [engine.submit(prompt(n, 40), sampling) for n in range(4)]
    engine.run()
    for hit, first in zip(hits, rids, strict=True):
        assert rows_of(engine, hit).result_cached
        assert told(engine, hit) == told(engine, first)


def test_hits_from_another_thread_while_the_engine_runs(model: LoadedModel) -> None:
    engine = Engine(model, result_cache=True)
    stop = threading.Event()
    loop = threading.Thread(target=engine.core.run, args=(stop,))
    loop.start()
    rids: list[int] = []

    def submit(seed: int) -> None:
        for n in range(40):
            rids.append(engine.submit(prompt((seed + n) % 4), GREEDY, stream=n % 2 == 0))

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    while len(engine.heard.done) < 80:
        assert loop.is_alive()
        stop.wait(0.005)
    more = [engine.submit(prompt(n), GREEDY) for n in range(4)]
    stop.set()
    engine.core.wake()
    loop.join(30)
    assert set(engine.heard.done) == {*rids, *more}
    expected = Engine(model).generate([prompt(n) for n in range(4)], GREEDY)
    for rid in engine.heard.done:
        if engine.heard.done[rid].finish == "length":
            assert engine.ids(rid) in expected
    assert engine.core.results.hits >= 4
    assert all(isinstance(t, Tokens) for tokens in engine.heard.tokens.values() for t in tokens)
