"""`Generator`: sends one workload over one client, and keeps a row for each request.

Sending follows an absolute schedule on the monotonic clock: a late request is sent as soon as possible and
its lateness recorded, and the schedule of those after it does not move. Nothing is sent early.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from app.lab.orders import Order, Report
from app.lab.stats import ErrorClass, LoadRow
from app.lab.workload import PlannedRequest, schedule
from app.model.series import percentiles
from ipc import messages as m
from ipc.client import Client

# A generator later than this (99th percentile) has set the pace itself: its run says nothing of the engine.
LAG_LIMIT_S, LAG_LIMIT_OF_TTFT = 0.005, 0.02
_MIN_LAG_SAMPLES = 20
_LONGEST_WAIT_S = 0.05
# Refused for what the request is: the next one of the same kind will be too.
_FOR_GOOD = ("invalid", "too_long", "too_large", "unsupported")
GIVE_UP_AFTER = 32  # such refusals with the same code and no request accepted between them
_BACK_OFF_S = 0.1  # of a closed loop after a refusal: what is refused leaves its place at once
_REFUSALS = ("invalid", "too_long", "too_large", "not_ready", "busy", "rate_limited", "unsupported")


class _Flight:
    """One request on its way."""

    __slots__ = ("first_ns", "intended_ns", "last_ns", "plan", "rid", "sent_ns", "tokens", "ttft_s")

    def __init__(self, plan: PlannedRequest, intended_ns: int, sent_ns: int) -> None:
        self.plan = plan
        self.intended_ns = intended_ns
        self.sent_ns = sent_ns
        self.rid: int | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.tokens = 0
        self.ttft_s: float | None = None


class Generator:
    """Runs one order over one client. `step` is called until it returns False."""

    def __init__(self, client: Client, order: Order, has_chat_template: bool) -> None:
        self.spec = order.spec
        self.failed = self.done = self.sent = 0
        self.rows: list[LoadRow] = []
        self.invalid: list[str] = []
        self.gave_up = ""  # why nothing more was sent, if all was being refused
        self._client = client
        self._order = order
        self._chat = has_chat_template
        self._plans: Iterator[PlannedRequest] = schedule(order.spec)
        self._next: PlannedRequest | None = next(self._plans, None)
        self._by_id: dict[int, _Flight] = {}
        self._by_rid: dict[int, _Flight] = {}
        self._lags: list[float] = []
        self._ttfts: list[float] = []
        self._draining = False
        self._refused_in_a_row = 0
        self._refused_code = ""
        self._hold_until_ns = 0
        self.t0_ns = time.monotonic_ns()

    # --- state -----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._by_id) + len(self._by_rid)

    @property
    def draining(self) -> bool:
        return self._draining or self._next is None

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic_ns() - self.t0_ns) * 1e-9

    @property
    def lag_p99_s(self) -> float | None:
        return percentiles(self._lags, (99.0,))[99.0]

    def stop(self, *, cancel: bool) -> None:
        """Send nothing more; with ``cancel`` also end what is in flight."""
        self._draining, self._next = True, None
        if cancel:
            self._client.send(m.Cancel(id=self._client.next_id(), all=True))

    # --- running ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Send what is due and take in what arrived, waiting a little; False once all is done."""
        self._send_due()
        if self._next is None and not self.in_flight:
            return False
        wait_s = self._wait_s()
        if 0 < wait_s < 0.001:
            time.sleep(wait_s)  # the poller below only knows whole milliseconds
            wait_s = 0.0
        for reply in self._client.poll(wait_s):
            self._take(reply, time.monotonic_ns())
        return True

    def _wait_s(self) -> float:
        plan = self._next
        if plan is None or plan.at_s is None:
            return _LONGEST_WAIT_S
        due_ns = self.t0_ns + round(plan.at_s * 1e9)
        return min(_LONGEST_WAIT_S, max(0.0, (due_ns - time.monotonic_ns()) * 1e-9))

    def _send_due(self) -> None:
        while (plan := self._next) is not None:
            now_ns = time.monotonic_ns()
            if plan.at_s is None:
                if self._closed_loop_over(now_ns):
                    self._next = None
                    return
                if self.in_flight >= self.spec.concurrency or now_ns < self._hold_until_ns:
                    return
                intended_ns = now_ns
            else:
                intended_ns = self.t0_ns + round(plan.at_s * 1e9)
                if now_ns < intended_ns:
                    return  # never early: a reply must not come before its plan
                if self.in_flight >= self.spec.max_concurrency:
                    self._invalidate(
                        f"{self.spec.max_concurrency} requests were in flight, the most this client holds, "
                        "so sending had to wait"
                    )
                    return
            self._send(plan, intended_ns)
            self._next = next(self._plans, None)

    def _closed_loop_over(self, now_ns: int) -> bool:
        limit_s = self.spec.duration_s
        return limit_s is not None and (now_ns - self.t0_ns) * 1e-9 >= limit_s

    def _send(self, plan: PlannedRequest, intended_ns: int) -> None:
        command = m.Submit(
            id=self._client.next_id(),
            messages=plan.messages if self._chat else None,
            prompt=None if self._chat else plan.raw_prompt,
            sampling=m.Sampling(
                max_tokens=plan.max_tokens,
                ignore_eos=plan.ignore_eos,
                temperature=plan.temperature,
                seed=plan.seed,
            ),
            tag=f"{self.spec.name[:40]}/{plan.index}",
            cache_salt=self._order.salt,
        )
        sent_ns = time.monotonic_ns()
        self._client.send(command)
        self.sent += 1
        self._lags.append((sent_ns - intended_ns) * 1e-9)
        self._by_id[command.id] = _Flight(plan, intended_ns, sent_ns)

    def _take(self, reply: m.Reply, now_ns: int) -> None:
        match reply:
            case m.Tokens():
                flight = self._flight(reply.rid)
                if flight is not None and reply.ids:
                    if flight.first_ns is None:
                        flight.first_ns = now_ns
                        flight.ttft_s = (now_ns - flight.intended_ns) * 1e-9
                        self._ttfts.append(flight.ttft_s)
                    flight.last_ns = now_ns
                    flight.tokens += len(reply.ids)
            case m.Accepted():
                accepted = self._by_id.pop(reply.id, None)
                if accepted is not None:
                    self._refused_in_a_row = 0
                    accepted.rid = reply.rid
                    self._by_rid[reply.rid] = accepted
            case m.Done():
                ended = self._by_rid.pop(reply.rid, None)
                if ended is not None:
                    self._end(ended, now_ns, reply)
            case m.Error():
                refused = self._by_id.pop(reply.id, None)
                if refused is not None:
                    kind: ErrorClass = "refused" if reply.code in _REFUSALS else "engine"
                    self._end_failed(refused, now_ns, kind, f"{reply.code}: {reply.message}")
                    self._heed_refusal(reply, now_ns)

    def _heed_refusal(self, reply: m.Error, now_ns: int) -> None:
        """Slow a closed loop down, and send nothing more where every request is refused for what it is."""
        wait_s = max(_BACK_OFF_S, (reply.retry_after_ms or 0) * 1e-3)
        self._hold_until_ns = max(self._hold_until_ns, now_ns + round(wait_s * 1e9))
        if reply.code not in _FOR_GOOD:
            return
        if reply.code != self._refused_code:
            self._refused_in_a_row, self._refused_code = 0, reply.code
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= GIVE_UP_AFTER and not self.gave_up:
            self.gave_up = (
                f"{self._refused_in_a_row} requests in a row were refused, so the load was stopped; choose "
                f"another prompt mix or another model: {reply.code}: {reply.message}"
            )
            self._invalidate(self.gave_up)
            self.stop(cancel=False)

    def _flight(self, rid: int) -> _Flight | None:
        return self._by_rid.get(rid)

    def _end(self, flight: _Flight, now_ns: int, done: m.Done) -> None:
        row = done.row
        kind: ErrorClass = ""
        if done.finish == "cancelled":
            kind = "cancelled"
        elif done.finish == "error":
            kind = "engine"
            self.failed += 1
        else:
            self.done += 1
        if row.result_cached and flight.ttft_s is not None:
            self._ttfts.remove(flight.ttft_s)  # nothing was computed: it is no latency
        self.rows.append(
            msgspec.structs.replace(
                self._row(flight, now_ns, kind, done.message if kind else ""),
                prompt_tok=row.prompt_tok,
                cached_tok=row.cached_tok,
                output_tok=row.output_tok,
                arrive_engine_ns=row.arrive_ns,
                sched_engine_ns=row.sched_ns,
                first_engine_ns=row.first_ns,
                last_engine_ns=row.last_ns,
                itl_us=row.itl_us,
                finish=done.finish,
                rev_first=row.rev_first,
                rev_last=row.rev_last,
                result_cached=row.result_cached,
                drafts_n=row.drafts_n,
                drafted_tok=row.drafted_tok,
                accepted_tok=row.accepted_tok,
            )
        )

    def _end_failed(self, flight: _Flight, now_ns: int, kind: ErrorClass, why: str) -> None:
        self.failed += 1
        self.rows.append(self._row(flight, now_ns, kind, why))

    def _row(self, flight: _Flight, now_ns: int, kind: ErrorClass, why: str) -> LoadRow:
        plan = flight.plan
        return LoadRow(
            index=plan.index,
            kind=plan.kind,
            tag=f"{self.spec.name[:40]}/{plan.index}",
            rid=flight.rid,
            prompt_sha256=plan.prompt_sha256,
            output_tok=flight.tokens,
            max_tokens=plan.max_tokens,
            intended_ns=flight.intended_ns,
            sent_ns=flight.sent_ns,
            first_ns=flight.first_ns,
            last_ns=flight.last_ns,
            end_ns=now_ns,
            error_class=kind,
            error=why,
        )

    def abandon(self, kind: ErrorClass, why: str) -> None:
        """The engine is gone: everything in flight failed now."""
        now_ns = time.monotonic_ns()
        for flight in [*self._by_id.values(), *self._by_rid.values()]:
            self._end_failed(flight, now_ns, kind, why)
        self._by_id.clear()
        self._by_rid.clear()

    # --- judging itself --------------------------------------------------------------------------

    def _invalidate(self, why: str) -> None:
        if why not in self.invalid:
            self.invalid.append(why)

    def judge(self) -> None:
        """Mark the run invalid if this process, not the engine, set the pace."""
        lag_s = self.lag_p99_s
        ttft_s = percentiles(self._ttfts, (50.0,))[50.0]
        if lag_s is None or len(self._lags) < _MIN_LAG_SAMPLES:
            return
        limit_s = max(LAG_LIMIT_S, LAG_LIMIT_OF_TTFT * (ttft_s or 0.0))
        if lag_s > limit_s:
            self._invalidate(
                f"the generator was late: {lag_s * 1e3:.1f} ms at the 99th percentile, allowed are "
                f"{limit_s * 1e3:.1f} ms"
            )

    def report(self, phase: Literal["running", "draining", "done", "failed"], message: str = "") -> Report:
        """Progress, with the rows that ended since the last report."""
        rows, self.rows = self.rows, []
        elapsed_s = self.elapsed_s
        return Report(
            phase=phase,
            message=message,
            elapsed_s=elapsed_s,
            sent=self.sent,
            done=self.done,
            failed=self.failed,
            in_flight=self.in_flight,
            achieved_rps=self.sent / elapsed_s if elapsed_s > 0 else None,
            lag_p99_s=self.lag_p99_s,
            invalid_reasons=list(self.invalid),
            rows=rows,
        )
