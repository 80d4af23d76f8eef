"""Text off the step thread: however late it comes, it is what a check after every token would have given."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import delivery
from engine.answer import Answers, Event
from engine.delivery import FAULT, Batch, NewToken
from engine.knob import KnobContext
from engine.knob_store import KnobStore
from engine.metrics import Meters, StageTotals
from engine.models.loader import LoadedModel
from engine.plan import StepPlan
from engine.publisher import Publisher
from engine.request import Request
from engine.result_cache import ResultCache
from engine.runner import StepOutput
from engine.scheduler import Scheduler, SchedulerKnobs
from engine.text import Detokenizer, Tokenizer
from ipc.messages import Done, Preempted, RequestRow, Sampling, TokenLogprob, TopLogprob
from tests.engine.core_harness import Engine, Heard, load, tiny_folder

EOS = 2
STEP_NS = 1_000_000
NO_TOKEN = -1  # in a script: the logits were not finite


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


@functools.cache
def tokenizer() -> Tokenizer:
    return load(tiny_folder("llama")).tokenizer


@functools.cache
def alphabet() -> list[int]:
    """Ids of words and letters, of the pieces of two characters of several bytes, and of a special token."""
    text = tokenizer().encode("the quick dog é🙂", add_special=False)
    return [*dict.fromkeys([*text, *tokenizer().encode("a e", add_special=False)]), 1]


# --- the reference: a check after every token ------------------------------------------------------


@dataclass
class Answer:
    """What a client has of a request at its end."""

    text: str
    ids: list[int]
    logprobs: list[TokenLogprob] | None
    times: list[int]
    finish: str
    stop_reason: str | int | None
    code: str | None
    first_ns: int | None
    last_ns: int | None
    end_ns: int | None


def logprob_of(token: int, place: int) -> TokenLogprob:
    return TokenLogprob(token=token, logprob=-0.5 * place, top=[TopLogprob(token=token, logprob=-0.25)])


def checked_after_every_token(
    script: Sequence[int], sampling: Sampling, begin_step: int, cancel_step: int | None
) -> Answer:
    """The answer to a request whose n-th token comes in step ``begin_step`` + n."""
    detokenizer = Detokenizer(tokenizer(), [] if sampling.min_tokens else sampling.stop)
    parts: list[str] = []
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    times: list[int] = []
    finish, stop_reason, code, end_ns = "", None, None, 0

    for place, token in enumerate(script, 1):
        now = (begin_step + place) * STEP_NS
        if cancel_step is not None and begin_step + place > cancel_step:
            finish, code, end_ns = "cancelled", "cancelled", cancel_step * STEP_NS
            break
        if token == NO_TOKEN:
            finish, code, end_ns = "error", "internal", now
            break
        ids.append(token)
        times.append(now)
        if sampling.logprobs is not None:
            logprobs.append(logprob_of(token, place))
        end_ns = now
        if token in (EOS, *sampling.stop_token_ids) and place > sampling.min_tokens:
            finish, stop_reason = "stop", token
            break
        parts.append(detokenizer.push((token,)))
        if detokenizer.matched is not None:
            finish, stop_reason = "stop", detokenizer.matched
            break
        if place == sampling.min_tokens:
            detokenizer.watch(sampling.stop)
        if place == sampling.max_tokens:
            finish = "length"
            break
    parts.append(detokenizer.flush())
    return Answer(
        text="".join(parts),
        ids=ids,
        logprobs=logprobs if sampling.logprobs is not None and ids else None,
        times=times,
        finish=finish,
        stop_reason=stop_reason,
        code=code,
        first_ns=times[0] if times else None,
        last_ns=times[-1] if times else None,
        end_ns=end_ns,
    )


# --- a step thread whose tokens are written down ---------------------------------------------------


@dataclass
class Case:
    """One request: its tokens by script, and after which step it is cancelled."""

    script: list[int]
    sampling: Sampling
    stream: bool = True
    cancel_step: int | None = None


@dataclass
class Stepper:
    """Real scheduler, answers and delivery; a script instead of a model, and text that may come late."""

    batched: bool = False
    heard: Heard = field(default_factory=Heard)
    events: list[Event] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        values = KnobStore(KnobContext(), {}).values
        self.scheduler = Scheduler(
            SchedulerKnobs.of(values),
            num_blocks=256,
            block_size=4,
            identity="script",
            release_slot=lambda _: None,
        )
        self.results = ResultCache("script")
        self.results.configure(values)
        self.meters, self.stages = Meters(), StageTotals()
        self.stopped: list[int] = []
        self.cases: dict[int, Case] = {}
        self.answers = Answers(
            self.scheduler,
            tokenizer(),
            self.sink,
            on_stop=self.stopped.append,
            on_end=lambda _: None,
            results=self.results,
            meters=self.meters,
            stages=self.stages,
        )
        delivery = self.answers.delivery
        delivery.batched = self.batched
        self.is_late = False
        flush = delivery.flush
        delivery.flush = lambda: None if self.is_late else flush()  # type: ignore[method-assign]

    def sink(self, events: list[Event]) -> None:
        self.events += events
        self.heard.sink(events)

    def add(self, case: Case) -> int:
        rid = len(self.cases) + 1
        self.cases[rid] = case
        request = Request(rid, [10 + rid, 7], case.sampling, stream=case.stream, arrive_ns=1)
        request.stop_ids = frozenset(case.sampling.stop_token_ids) | {EOS}
        assert not self.answers.enter(request)
        self.answers.begin(request)
        return rid

    def run_step(self, *, deliver: bool = True) -> None:
        """One step, in the order of the loop. ``deliver=False``: its text comes with a later one."""
        before = self.step * STEP_NS
        for rid in self.stopped:
            self.answers.stopped(rid, before)
        self.stopped.clear()
        for rid, request in list(self.answers.live.items()):
            if self.cases[rid].cancel_step == self.step:
                self.answers.finish(request, "cancelled", before, code="cancelled", message="cancelled")
        self.step += 1
        plan = self.scheduler.plan(self.step * STEP_NS)
        self.answers.note_plan(plan)
        self.scheduler.advance(plan)
        self.answers.accept(plan, self.compute(plan), self.step * STEP_NS)
        self.is_late = not deliver
        self.answers.flush()
        self.is_late = False

    def compute(self, plan: StepPlan) -> StepOutput:
        out = StepOutput.of(len(plan.scheduled))
        for index, scheduled in enumerate(plan.scheduled):
            request = scheduled.request
            if request.num_computed < request.num_tokens:
                continue
            case = self.cases[request.rid]
            token = case.script[request.num_output % len(case.script)]
            if token == NO_TOKEN:
                out.nonfinite[index] = True
                continue
            out.token_ids[index], out.logprobs[index] = [token], [None]
            if case.sampling.logprobs is not None:
                out.logprobs[index] = [logprob_of(token, request.num_output + 1)]
        return out

    def run(self, lags: Sequence[bool] = ()) -> None:
        """Until nothing is live. ``lags`` says, in turn, whether a step's text comes late."""
        for step in range(500):
            if not self.answers.live:
                self.answers.flush()
                return
            self.run_step(deliver=not (lags and lags[step % len(lags)]))
        raise AssertionError("not finished")

    def answer(self, rid: int) -> Answer:
        """What the client has."""
        done, streamed = self.heard.done[rid], self.heard.tokens[rid]
        row = done.row
        times = [t for tokens in streamed for t in tokens.t_ns]
        ids, logprobs = done.ids, done.logprobs
        if self.cases[rid].stream:
            assert ids is None
            ids = []
            for tokens in streamed:
                assert tokens.index == len(ids), "a gap or a repeat"
                assert len(tokens.ids) == len(tokens.t_ns)
                ids += tokens.ids
            parts = [tokens.logprobs for tokens in streamed if tokens.logprobs is not None]
            logprobs = [logprob for part in parts for logprob in part] if parts else None
        assert ids is not None
        assert row.output_tok == len(ids)
        assert (row.finish, row.code) == (done.finish, done.code)
        return Answer(
            text="".join(tokens.text for tokens in streamed) + done.text,
            ids=ids,
            logprobs=logprobs,
            times=times,
            finish=done.finish,
            stop_reason=done.stop_reason,
            code=done.code,
            first_ns=row.first_ns,
            last_ns=row.last_ns,
            end_ns=row.end_ns,
        )


def compare(stepper: Stepper, rid: int, begin_step: int = 0) -> None:
    case = stepper.cases[rid]
    want = checked_after_every_token(case.script, case.sampling, begin_step, case.cancel_step)
    got = stepper.answer(rid)
    if not case.stream:
        assert got.times == []
        got.times = want.times  # which a whole answer does not carry
    assert got == want
    row = stepper.heard.done[rid].row
    assert row.itl_us == [STEP_NS // 1000] * max(0, len(want.ids) - 1)


# --- stop strings that are found late --------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ids = alphabet()
    script = draw(st.lists(st.sampled_from([*ids, *ids, EOS]), min_size=24, max_size=24))
    text = tokenizer().decode(script[:12])
    pieces = [text[a:b] for a in range(len(text)) for b in range(a + 1, min(a + 8, len(text)) + 1)]
    stop = st.one_of(
        st.sampled_from(pieces or ["x"]),  # one that comes, over a token or several
        st.text(alphabet="the qu�é", min_size=1, max_size=4),
    )
    max_tokens = draw(st.integers(1, 20))
    if draw(st.integers(0, 5)) == 0:
        script[draw(st.integers(0, 11))] = NO_TOKEN
    return Case(
        script=script,
        sampling=Sampling(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0,
            stop=draw(st.lists(stop, max_size=3)),
            stop_token_ids=draw(st.lists(st.sampled_from(ids), max_size=1)),
            logprobs=draw(st.sampled_from([None, 1])),
        ),
        stream=draw(st.booleans()),
        cancel_step=draw(st.one_of(st.none(), st.integers(0, 14))),
    )


@given(
    requests=st.lists(cases(), min_size=1, max_size=4),
    batched=st.booleans(),
    lags=st.lists(st.booleans(), min_size=1, max_size=7).filter(lambda lags: not all(lags)),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_text_that_comes_late_ends_where_a_check_after_every_token_ends(
    requests: list[Case], batched: bool, lags: list[bool]
) -> None:
    """A20, A21, A40: ids, text, log-probabilities, times, counts and reason of the end."""
    stepper = Stepper(batched=batched)
    rids = [stepper.add(case) for case in requests]
    stepper.run(lags)
    for rid in rids:
        compare(stepper, rid)
    assert not stepper.answers.live
    assert stepper.scheduler.pool.num_used == 0


def words(text: str, *more: int) -> list[int]:
    return [*tokenizer().encode(text, add_special=False), *more]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("script", "sampling", "finish", "text"), [
    (words("the quick", EOS), {"stop": ["quick"]}, "stop", "the "),
    (words("the quick"), {"stop": ["qz", "k qu"], "max_tokens": 99}, "error", "the quick"),
    (words("the q", EOS), {"stop": ["quick"]}, "stop", "the q"),
    (words("the q"), {"stop": ["quick"], "max_tokens": len(words("the q"))}, "length", "the q"),
    (words("the dog"), {"stop": ["dog"], "max_tokens": len(words("the dog"))}, "stop", "the "),
    (words("dog dog dog"), {"stop": ["dog"], "min_tokens": len(words("dog"))}, "stop", "dog "),
    (words("é🙂x"), {"stop": ["🙂"]}, "stop", "é"),
    (words("é🙂")[:-1], {"max_tokens": len(words("é🙂")) - 1}, "length", "é�"),
], ids=["eos after it", "never complete", "held at eos", "held at length", "at the length",
        "after min_tokens", "of several bytes", "half a character"])  # fmt: skip
def test_ends_of_every_kind(
    script: list[int], sampling: dict[str, Any], finish: str, text: str, late: bool, batched: bool
) -> None:
    """A20, A21: what is held back comes out at the end, and what was computed too much does not."""
    stepper = Stepper(batched=batched)
    case = Case([*script, NO_TOKEN], Sampling(**{"max_tokens": 50, **sampling}))
    rid = stepper.add(case)
    stepper.run([late, late, late, False])
    compare(stepper, rid)
    answer = stepper.answer(rid)
    assert (answer.finish, answer.text) == (finish, text)


def test_a_cancel_or_an_error_behind_a_complete_stop_string_comes_too_late() -> None:
    """A fault in a token that nobody asked for does not turn a whole answer into an error."""
    for script, cancel_step in ((words("the dog x x x x"), 6), ([*words("the dog"), NO_TOKEN], None)):
        stepper = Stepper()
        rid = stepper.add(Case(script, Sampling(stop=["dog"], max_tokens=50), cancel_step=cancel_step))
        stepper.run([True] * 9 + [False])
        done = stepper.heard.done[rid]
        assert (done.finish, done.stop_reason, done.code, done.message) == ("stop", "dog", None, "")
        assert (done.row.finish, done.row.code, done.row.message) == ("stop", None, "")


def test_a_change_behind_a_complete_stop_string_is_not_the_requests() -> None:
    """The row says which configurations the request ran under: those of the tokens that it kept."""
    stepper = Stepper()
    rid = stepper.add(Case(words("the dog x x x x"), Sampling(stop=["dog"], max_tokens=50)))
    for step in range(6):
        stepper.answers.cfg_rev = 0 if step < len(words("the dog")) else 1
        stepper.run_step(deliver=False)
    stepper.run()
    row = stepper.heard.done[rid].row
    assert (row.finish, row.rev_first, row.rev_last) == ("stop", 0, 0)


def test_a_cancelled_answer_holds_the_text_until_then() -> None:
    stepper = Stepper()
    rid = stepper.add(
        Case(words("the quick dog " * 3), Sampling(stop=["quiz"], max_tokens=50), cancel_step=4)
    )
    stepper.run([True, True, False])
    answer = stepper.answer(rid)
    assert (answer.finish, len(answer.ids)) == ("cancelled", 4)
    assert answer.text == tokenizer().decode(answer.ids)


# --- messages --------------------------------------------------------------------------------------


def test_what_waits_of_a_request_is_one_message_when_batched_and_one_a_token_otherwise() -> None:
    for batched, messages in ((False, 12), (True, 3)):
        stepper = Stepper(batched=batched)
        script = words("the quick dog " * 4)
        rid = stepper.add(Case(script, Sampling(max_tokens=12)))
        stepper.run([True, True, True, False])
        assert len(stepper.heard.tokens[rid]) == messages
        compare(stepper, rid)


def test_long_answers_are_split_into_messages_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_IDS_A_MESSAGE", 5)
    stepper = Stepper(batched=True)
    script = [*words("the quick dog " * 6)[:16], EOS]
    rid = stepper.add(Case(script, Sampling(max_tokens=50, stop=["zz"], logprobs=1)))
    stepper.run([True] * 18 + [False])
    assert [len(tokens.ids) for tokens in stepper.heard.tokens[rid]] == [5, 5, 5, 2]
    compare(stepper, rid)


def test_the_last_row_comes_after_all_others_and_with_the_end() -> None:
    """Whoever keeps the newest row of each request keeps none of an ended one as live."""
    stepper = Stepper()
    for n in range(6):
        stepper.add(Case(words("the dog"), Sampling(max_tokens=1 + n % 3)))
    stepper.run()
    publisher = Publisher(lambda frames: None)
    for event, after in zip(stepper.events, [*stepper.events[1:], None], strict=True):
        if isinstance(event, RequestRow):
            publisher.request(event, 0.0)
            if event.state == "finished":
                assert isinstance(after, Done)
                assert after.row == event
    publisher.flush()
    assert publisher.live == {}
    assert len(publisher.ended) == 6


def test_tokens_that_cannot_be_made_text_end_their_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    stepper = Stepper()
    good = stepper.add(Case(words("the quick dog " * 3), Sampling(max_tokens=5)))
    bad = stepper.add(Case([*words("the"), 99_999, *words("dog dog dog")], Sampling(max_tokens=9)))
    with caplog.at_level(logging.CRITICAL):
        stepper.run()
    compare(stepper, good)
    done = stepper.heard.done[bad]
    assert (done.finish, done.code, done.message) == ("error", "internal", FAULT)
    assert (done.row.finish, done.row.message) == ("error", FAULT)


def test_time_for_text_is_counted_once_and_shared_by_tokens() -> None:
    stepper = Stepper()
    for n in range(5):
        stepper.add(Case(words("the quick dog " * 4), Sampling(max_tokens=4 + n)))
    stepper.run([True, False])
    spent = stepper.meters.detokenize_ns
    shares = [done.row.detokenize_us * 1000 for done in stepper.heard.done.values()]
    assert 0 < sum(shares) <= spent
    assert sum(shares) > spent - 5 * 2000, "whole microseconds and rests of the division are lost, no more"


def test_stages_are_counted_while_a_request_runs_and_not_while_it_waits() -> None:
    """A request's share is what the engine spent between its begin and its end, less its preempted time."""
    stepper = Stepper()

    def spend(amount: int) -> None:
        stepper.stages.add(
            plan_ns=amount, prepare_ns=2 * amount, copy_ns=3 * amount, forward_ns=4 * amount, sample_ns=0
        )

    spend(7000)
    rid = stepper.add(Case(words("the quick dog " * 4), Sampling(max_tokens=6)))
    stepper.run_step()
    spend(1000)
    request = stepper.answers.live[rid]
    preemption = stepper.scheduler.preempt(request, stepper.step * STEP_NS)
    stepper.answers.note_preempted([preemption])
    spend(50_000)
    stepper.run_step()
    spend(2000)
    stepper.run()
    row = stepper.heard.done[rid].row
    assert (row.plan_us, row.prepare_us, row.copy_us, row.forward_us, row.sample_us) == (3, 6, 9, 12, 0)
    assert [event.rid for event in stepper.events if isinstance(event, Preempted)] == [rid]


# --- the thread ------------------------------------------------------------------------------------


def test_the_thread_delivers_everything_and_stop_leaves_nobody_without_an_end() -> None:
    """A36: each request ends once, with all its tokens before, though the thread is stopped at once."""
    stepper = Stepper()
    stepper.answers.delivery.start()
    rids = [stepper.add(Case(words("the quick dog " * 3), Sampling(max_tokens=9))) for _ in range(40)]
    for _ in range(12):
        stepper.run_step()
    assert not stepper.answers.live
    stepper.answers.delivery.stop()
    for rid in rids:
        compare(stepper, rid)
    late = stepper.add(Case(words("the"), Sampling(max_tokens=1)))
    stepper.run()
    assert late in stepper.heard.done


def test_what_is_put_while_the_thread_ends_is_delivered() -> None:
    """Answers from the result cache are put by another thread than the one that stops the delivery."""
    for _ in range(30):
        stepper = Stepper()
        stepper.answers.delivery.start()
        began = threading.Event()

        def put(stepper: Stepper = stepper, began: threading.Event = began) -> None:
            for rid in range(1, 41):
                request = Request(rid, [5], Sampling(max_tokens=2))
                stepper.cases[rid] = Case([], request.sampling)
                assert not stepper.answers.enter(request)
                assert request.outlet is not None
                request.token_ids += [11, 12]
                request.token_ns = [5, 5]
                request.first_ns = request.last_ns = request.end_ns = 5
                request.state, request.finish = "finished", "length"
                rows = [NewToken(request.outlet, token, 5) for token in (11, 12, None)]
                stepper.answers.delivery.put(Batch(0, rows))
                began.set()

        thread = threading.Thread(target=put)
        thread.start()
        assert began.wait(30)
        stepper.answers.delivery.stop()
        thread.join(30)
        assert set(stepper.heard.done) == set(range(1, 41))


def test_a_failed_engine_ends_each_stream_after_its_tokens(model: LoadedModel, monkeypatch: Any) -> None:
    """A36: the delivery is emptied before whoever runs the engine hears of its failure."""
    engine = Engine(model)
    core = engine.core
    rids = [engine.submit([5 + n, 9], Sampling(max_tokens=400, ignore_eos=True)) for n in range(4)]
    accept = core.answers.accept
    calls = 0

    def fail(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyError("a fault of the engine")
        return accept(*args)

    monkeypatch.setattr(core.answers, "accept", fail)
    with pytest.raises(KeyError):
        core.run(threading.Event())
    for rid in rids:
        done = engine.heard.done[rid]
        assert (done.finish, done.code) == ("error", "internal")
        assert done.row.output_tok == len(engine.ids(rid)) > 0
        assert engine.text(rid) == model.tokenizer.decode(engine.ids(rid))


def test_a_running_engine_with_a_slow_reader_of_text_gives_the_same_answers(
    model: LoadedModel, monkeypatch: Any
) -> None:
    """Stop strings are found many steps late here, and the steps go on meanwhile."""
    prompts = [[5 + n, 9, 30 + n] for n in range(4)]
    plain = Engine(model)
    texts = []
    for ids in plain.generate(prompts, Sampling(max_tokens=40, ignore_eos=True)):
        texts.append(model.tokenizer.decode(ids))
    stops = [[text[10:12], text[4:6]] for text in texts]
    want = []
    for prompt, stop in zip(prompts, stops, strict=True):
        rid = plain.submit(prompt, Sampling(max_tokens=40, ignore_eos=True, stop=stop))
        plain.run()
        want.append((plain.ids(rid), plain.text(rid), plain.heard.done[rid].stop_reason))

    slow = Engine(model)
    deliver = slow.core.answers.delivery._deliver

    def slowly(batches: Any) -> None:
        time.sleep(0.05)
        deliver(batches)

    monkeypatch.setattr(slow.core.answers.delivery, "_deliver", slowly)
    stop_event = threading.Event()
    loop = threading.Thread(target=slow.core.run, args=(stop_event,))
    loop.start()
    rids = [
        slow.submit(prompt, Sampling(max_tokens=40, ignore_eos=True, stop=stop))
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
    while len(slow.heard.done) < len(rids):
        time.sleep(0.005)
    stop_event.set()
    slow.core.wake()
    loop.join(30)
    got = [(slow.ids(rid), slow.text(rid), slow.heard.done[rid].stop_reason) for rid in rids]
    assert got == want
    too_much = [done.row.computed_tok - done.row.output_tok - 3 for done in slow.heard.done.values()]
    assert max(too_much) > 1, "no step was faster than the text: this test shows nothing"


def test_a_lag_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LAG_STEPS", 3)
    stepper = Stepper()
    for _ in range(2):
        for _ in range(8):
            stepper.answers.delivery.put(Batch(0, []))
        stepper.answers.delivery.start()
        stepper.answers.delivery.stop()
        stepper.answers.delivery._is_stopped = False
    lines = [record.message for record in caplog.records if "lags" in record.message]
    assert len(lines) == 1
    assert "8 steps" in lines[0]
