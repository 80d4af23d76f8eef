"""The figures that runs are judged by, each made of one `Outcome`.

TTFT counts from the moment a request was meant to be sent until its first token reached the client. Gaps
between tokens (ITL) are the engine's own stamps, so that several tokens in one message are not one gap. What
is about steps comes from the engine's step rows. Percentiles are numpy's, method "linear".
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ipc import messages as m
from tests.bench.knob_run import Answer, Outcome
from tests.bench.paired import Better


@dataclass(frozen=True, slots=True)
class Figure:
    """A named number of a run; ``of`` gives None where the run does not have it."""

    name: str
    unit: str
    better: Better
    of: Callable[[Outcome], float | None]


def percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(np.asarray(values), percent, method="linear")) if values else None


def _answers(outcome: Outcome, kind: str | None) -> list[Answer]:
    return [answer for answer in outcome.answers if kind is None or answer.kind == kind]


def _rows(outcome: Outcome, kind: str | None = None) -> list[m.RequestRow]:
    return [answer.row for answer in _answers(outcome, kind) if answer.row is not None]


def _out_tok_s(outcome: Outcome) -> float | None:
    tokens = sum(answer.tokens for answer in outcome.answers)
    return tokens / outcome.wall_s if tokens else None


OUT_TOK_S = Figure("output", "tok/s", "higher", _out_tok_s)


def ttft(kind: str | None = None, percent: float = 50) -> Figure:
    def of(outcome: Outcome) -> float | None:
        values = [
            1e3 * (answer.first_s - answer.intended_s)
            for answer in _answers(outcome, kind)
            if answer.first_s is not None
        ]
        return percentile(values, percent)

    whose = f" of {kind}" if kind else ""
    return Figure(f"p{percent:g} TTFT{whose}", "ms", "lower", of)


def itl(kind: str | None = None, percent: float = 99) -> Figure:
    def of(outcome: Outcome) -> float | None:
        return percentile([gap / 1e3 for row in _rows(outcome, kind) for gap in row.itl_us], percent)

    whose = f" of {kind}" if kind else ""
    return Figure(f"p{percent:g} ITL{whose}", "ms", "lower", of)


def tpot(kind: str | None = None) -> Figure:
    """By each request's first and last token, as several may come at one instant."""

    def of(outcome: Outcome) -> float | None:
        values = [
            (row.last_ns - row.first_ns) / (row.output_tok - 1) / 1e6
            for row in _rows(outcome, kind)
            if row.first_ns is not None and row.last_ns is not None and row.output_tok > 1
        ]
        return percentile(values, 50)

    return Figure(f"p50 TPOT{f' of {kind}' if kind else ''}", "ms", "lower", of)


def e2e(kind: str | None = None) -> Figure:
    def of(outcome: Outcome) -> float | None:
        values = [
            1e3 * (answer.last_s - answer.intended_s)
            for answer in _answers(outcome, kind)
            if answer.last_s is not None
        ]
        return percentile(values, 50)

    return Figure(f"p50 end to end{f' of {kind}' if kind else ''}", "ms", "lower", of)


def total(name: str, unit: str, better: Better, field: str, scale: float = 1.0) -> Figure:
    """The sum of a field of the step rows."""
    return Figure(name, unit, better, lambda o: scale * sum(getattr(row, field) or 0 for row in o.steps))


def of_rows(name: str, unit: str, better: Better, field: str, scale: float = 1.0) -> Figure:
    """The sum of a field of the requests' own rows."""
    return Figure(name, unit, better, lambda o: scale * sum(getattr(row, field) for row in _rows(o)))


def most(name: str, unit: str, better: Better, field: str) -> Figure:
    """The greatest value of a field of the step rows."""
    return Figure(name, unit, better, lambda o: max((getattr(r, field) for r in o.steps), default=None))


def _wasted(outcome: Outcome) -> float | None:
    """Tokens that used blocks have room for and do not hold, the mean over time."""
    spans = [(row.dur_us, row.used_blk * outcome.block_size - row.used_tok) for row in outcome.steps]
    time_us = sum(us for us, _ in spans)
    return sum(us * tokens for us, tokens in spans) / time_us if time_us else None


def idle_seats(seats: int) -> Figure:
    """Seats of ``seats`` that no request sits on, the mean over time while requests were unfinished."""

    def of(outcome: Outcome) -> float | None:
        time_us = sum(row.dur_us for row in outcome.steps)
        idle = sum(row.dur_us * (seats - row.prefill_reqs - row.decode_reqs) for row in outcome.steps)
        return idle / time_us if time_us else None

    return Figure(f"idle of {seats} seats", "seats", "lower", of)


def _batch_fill(outcome: Outcome) -> float | None:
    """Requests that started together: a static batch admits its members at one instant."""
    starts = [row.sched_ns for row in _rows(outcome) if row.sched_ns is not None]
    return len(starts) / len(set(starts)) if starts else None


def steady(steps: Sequence[m.StepRow]) -> list[tuple[m.StepRow, float]]:
    """Steps that only decode, followed by one alike, with the ms from the one's start to the next's."""
    return [
        (row, (after.t_ns - row.t_ns) / 1e6)
        for row, after in itertools.pairwise(steps)
        if after.step == row.step + 1
        and row.prefill_reqs == after.prefill_reqs == 0
        and row.decode_reqs == after.decode_reqs
        and row.cfg_rev == after.cfg_rev
    ]


def _decode_step_ms(outcome: Outcome) -> float | None:
    times = [ms for _, ms in steady(outcome.steps)]
    return statistics.median(times) if times else None


def _sample_ms(outcome: Outcome) -> float | None:
    times = [row.sample_us / 1e3 for row, _ in steady(outcome.steps)]
    return statistics.median(times) if times else None


def _decode_tok_s(outcome: Outcome) -> float | None:
    """By the median step, so that one step that was held up does not decide."""
    rates = [row.output_tok / ms * 1e3 for row, ms in steady(outcome.steps) if ms > 0]
    return statistics.median(rates) if rates else None


def _draft_ratio(part: str, whole: str, plus: float = 0.0) -> Callable[[Outcome], float | None]:
    """A sum over the step rows by another one; None where nothing was drafted."""

    def of(outcome: Outcome) -> float | None:
        by = sum(getattr(row, whole) for row in outcome.steps)
        return plus + sum(getattr(row, part) for row in outcome.steps) / by if by else None

    return of


def _text_us(outcome: Outcome) -> float | None:
    tokens = sum(answer.tokens for answer in outcome.answers)
    spent = sum(row.detokenize_us + row.send_us for row in outcome.steps)
    return spent / tokens if tokens else None


def _messages(outcome: Outcome) -> float | None:
    tokens = sum(answer.tokens for answer in outcome.answers)
    return sum(answer.messages for answer in outcome.answers) / tokens if tokens else None


WASTED = Figure("wasted, mean", "tok", "lower", _wasted)
AT_ONCE = most("requests at once, most", "req", "higher", "running")
USED_BLOCKS = most("blocks used, most", "blk", "lower", "used_blk")
BATCH_FILL = Figure("requests of a batch", "req", "higher", _batch_fill)
DECODE_STEP_MS = Figure("decode step, median", "ms", "lower", _decode_step_ms)
SAMPLE_MS = Figure("choosing tokens, median step", "ms", "lower", _sample_ms)
DECODE_TOK_S = Figure("decode, median step", "tok/s", "higher", _decode_tok_s)
WEIGHTS_READ = Figure(
    "weights read by a step, most",
    "MiB",
    "lower",
    lambda outcome: max((row.weight_bytes / 2**20 for row in outcome.steps), default=None),
)
ACCEPTANCE = Figure("accepted of drafted", "", "higher", _draft_ratio("accepted_tok", "drafted_tok"))
DRAFT_LENGTH = Figure(
    "a step with a draft", "tok", "higher", _draft_ratio("accepted_tok", "draft_reqs", plus=1.0)
)
TEXT_US = Figure("text and sending", "us/tok", "lower", _text_us)
MESSAGES = Figure("messages", "a token", "lower", _messages)
TOKENIZE_MS = of_rows("tokenizing, all prompts", "ms", "lower", "tokenize_us", 1e-3)
COMPUTED = total("prompt tokens computed", "tok", "lower", "prefill_tok")
HIT_TOKENS = total("hit tokens", "tok", "higher", "hit_tok")
HOST_HITS = total("hit tokens from host", "tok", "higher", "host_hit_tok")
PREEMPTIONS = total("preemptions", "", "lower", "preempted")
RECOMPUTED = total("tokens recomputed", "tok", "lower", "recompute_tok")
RECOMPUTE_MS = total("recomputing", "ms", "lower", "recompute_us", 1e-3)
COPY_MS = total("copying blocks", "ms", "lower", "copy_us", 1e-3)
SWAPPED_IN = of_rows("tokens swapped in", "tok", "higher", "swap_in_tok")
LOST = of_rows("tokens lost", "tok", "lower", "lost_tok")
OVERLAP_MS = total("work beside the forward pass", "ms", "higher", "overlap_us", 1e-3)
RESULT_HITS = of_rows("answers given again", "", "higher", "result_cached")
