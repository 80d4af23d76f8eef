"""From token ids to the answer that a client reads, off the step thread.

The step thread appends a token to its request and hands it over here once a step. The delivery thread turns
ids into text, looks for stop strings, makes the messages of the stream, and once the step thread has let go
of a request writes its last row and its end, so that the two agree.

A stop string is therefore found later than the token that completes it, while the engine may have computed
further tokens of the request. They are dropped: ids, text, log-probabilities, token times and counts are
those of a check after every token. A complete stop string also wins over whatever ended the request behind
it (its length, an end token, a cancel, an error), as none of that would have come.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from engine.metrics import Meters
from engine.request import Request
from engine.result_cache import Answer, ResultCache, Ticket
from engine.text import Detokenizer, Tokenizer
from ipc.messages import Done, TokenLogprob, Tokens

if TYPE_CHECKING:
    from engine.answer import Event

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_IDS_A_MESSAGE = 4096
"""Ids of one `Tokens`, so that neither its text nor its bytes exceed what the protocol lets be read."""
LAG_STEPS = 256  # steps waiting at once that are worth a warning
FAULT = "the engine could not turn this request's tokens into text; its log says more"


class NewToken(NamedTuple):
    """One token of a request and when it was computed, or (``token`` is None) that the step thread ended it.

    A stop id ends its request and its own text is left out.
    """

    outlet: Outlet
    token: int | None
    t_ns: int
    logprob: TokenLogprob | None = None
    is_stop_id: bool = False


class Batch(NamedTuple):
    """The new tokens and ends of one step under configuration ``rev``, or an answer from the result cache."""

    rev: int
    rows: list[NewToken]
    whole: bool = False  # to be sent together, however many tokens that is


class Outlet:
    """The way out of one request: its text so far, and what was sent of it. The delivery thread owns it.

    ``ticket``: under which its answer may be kept in the result cache.
    """

    __slots__ = (
        "_detokenizer", "_ids", "_logprobs", "_parts", "_taken", "_times", "_unwatched", "cut", "ended",
        "error", "has_stop_id", "kept_logprobs", "request", "rev", "ticket", "told",
    )  # fmt: skip

    def __init__(self, request: Request, tokenizer: Tokenizer, ticket: Ticket | None = None) -> None:
        sampling = request.sampling
        self.request = request
        self.ticket = ticket
        self.rev = 0  # of the newest token
        self.cut: int | None = None  # output tokens up to and with the one that completed a stop string
        self.error = ""
        self.told = False  # the step thread, that it is over
        self.ended = False  # by the step thread
        self.has_stop_id = False  # the newest id ended it
        self.kept_logprobs: list[TokenLogprob] | None = None
        self._unwatched = bool(sampling.stop) and sampling.min_tokens > 0
        self._detokenizer = Detokenizer(tokenizer, [] if self._unwatched else sampling.stop)
        self._parts: list[str] = []  # of the text, if it goes out at the end
        self._taken = 0  # output tokens that were turned into text
        self._ids: list[int] = []  # and those that wait for it, with their times
        self._times: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def is_over(self) -> bool:
        """Whether further tokens are dropped."""
        return self.cut is not None or bool(self.error)

    def add(self, new: NewToken, rev: int) -> None:
        """Take one token. It waits for `release`."""
        if new.token is None or self.is_over:
            return
        self._ids.append(new.token)
        self._times.append(new.t_ns)
        if new.logprob is not None:
            self._logprobs.append(new.logprob)
        self.has_stop_id = new.is_stop_id
        self.rev = rev

    def release(self) -> list[Tokens]:
        """Turn the tokens that wait into text. Returns what goes to the client now."""
        messages: list[Tokens] = []
        while self._ids and not self.is_over:
            messages += self._release(min(len(self._ids), MAX_IDS_A_MESSAGE))
        return messages

    def fail(self, message: str) -> None:
        """Nothing more can be made of this request; it ends with an error."""
        self.error = message

    def end(self) -> tuple[Done, Answer | None]:
        """The end of a request that the step thread has let go of, and its answer if that may be kept."""
        request = self.request
        rest = "" if self.error else self._detokenizer.flush()
        if self.error:
            request.finish, request.stop_reason = "error", None
            request.code, request.message = "internal", self.error
        elif self.cut is not None:
            request.trim(self.cut)
            request.finish, request.stop_reason = "stop", self._detokenizer.matched
            request.code, request.message = None, ""
            request.end_ns, request.rev_last = request.last_ns, self.rev
        row = request.row()
        finish = request.finish
        if finish is None:
            raise RuntimeError(f"request {request.rid} came to its end without a reason")
        done = Done(
            rid=request.rid,
            finish=finish,
            text=rest if request.stream else "".join(self._parts) + rest,
            row=row,
            ids=None if request.stream else request.output_ids,
            logprobs=None if request.stream else self.kept_logprobs,
            stop_reason=request.stop_reason,
            code=request.code,
            message=request.message,
        )
        if self.ticket is None or finish not in ("stop", "length"):
            return done, None
        return done, Answer(
            ids=request.output_ids,
            logprobs=self.kept_logprobs,
            finish=finish,
            stop_reason=request.stop_reason,
        )

    def _release(self, count: int) -> list[Tokens]:
        """Turn ``count`` of the tokens that wait into text, or as many as there are before a stop string."""
        request, first = self.request, self._taken
        has_stop_id = self.has_stop_id and count == len(self._ids)
        text, used = self._push(self._ids[: count - 1] if has_stop_id else self._ids[:count])
        if self._detokenizer.matched is not None:
            self.cut = first + used
        else:
            used = count
        self._taken = first + used
        ids, self._ids = _split(self._ids, used)
        times, self._times = _split(self._times, used)
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs, self._logprobs = _split(self._logprobs, used)
            if not request.stream or self.ticket is not None:
                self.kept_logprobs = self.kept_logprobs or []
                self.kept_logprobs += logprobs
        if request.stream:
            return [Tokens(rid=request.rid, index=first, ids=ids, text=text, t_ns=times, logprobs=logprobs)]
        self._parts.append(text)
        return []

    def _push(self, ids: list[int]) -> tuple[str, int]:
        """Text of the next ids and how many were used, fewer than all only before a stop string.

        Stop strings count only in what is released after the first ``min_tokens`` tokens.
        """
        detokenizer = self._detokenizer
        if not self._unwatched:
            return detokenizer.feed(ids)
        unwatched = self.request.sampling.min_tokens - self._taken
        text = detokenizer.push(ids[:unwatched])
        if len(ids) < unwatched:
            return text, len(ids)
        detokenizer.watch(self.request.sampling.stop)
        self._unwatched = False
        more, used = detokenizer.feed(ids[unwatched:])
        return text + more, unwatched + used


def _split(items: list[T], count: int) -> tuple[list[T], list[T]]:
    """The first ``count`` and the rest; nearly always that is all and none."""
    return (items, []) if count == len(items) else (items[:count], items[count:])


class Delivery:
    """Takes the tokens and ends of each step and tells the sink, in order, of every request exactly once
    that it ended.

    With `start` this is done by a thread of its own; without, by whoever calls `drain`. ``on_stop`` gets the
    id of a request whose stop string was found: the step thread should end it. It may have ended already.
    ``batched``: everything that waits of a request becomes one message, otherwise each token does.
    """

    def __init__(
        self,
        sink: Callable[[list[Event]], None],
        on_stop: Callable[[int], None],
        *,
        results: ResultCache,
        meters: Meters,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.batched = False
        self._sink = sink
        self._on_stop = on_stop
        self._results = results
        self._meters = meters
        self._clock = clock_ns
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._lag_told = False

    def start(self) -> None:
        """Deliver on a thread of its own from now on."""
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Deliver what was put until now and end the thread. What comes later is delivered by who puts it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
        self._is_stopped = True
        self.drain()

    def put(self, batch: Batch) -> None:
        """Queue a batch; any thread. Returns at once."""
        self._queue.put(batch)
        if self._is_stopped:  # looked at after queueing: what `stop` did not see is not left behind
            self.drain()

    def flush(self) -> None:
        """See to it that what was put is delivered: by the thread if there is one, else here and now."""
        if self._thread is None:
            self.drain()

    def drain(self) -> None:
        """Deliver what waits. Not while the thread runs."""
        batches, _ = self._waiting()
        if batches:
            self._deliver(batches)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            first = self._queue.get()
            if first is None:
                return
            more, is_last = self._waiting()
            batches = [first, *more]
            if len(batches) > LAG_STEPS and not self._lag_told:
                self._lag_told = True
                log.warning("text lags the engine by %d steps; answers come later than tokens", len(batches))
            try:
                self._deliver(batches)
            except Exception:
                log.exception("the delivery thread met an error and goes on")
            del first, more, batches  # not to be kept while nothing comes

    def _waiting(self) -> tuple[list[Batch], bool]:
        """What is queued, up to the mark that `stop` leaves, and whether that was met."""
        batches: list[Batch] = []
        while True:
            try:
                batch = self._queue.get_nowait()
            except queue.Empty:
                return batches, False
            if batch is None:
                return batches, True
            batches.append(batch)

    def _deliver(self, batches: Iterable[Batch]) -> None:
        events: list[Event] = []
        seen: dict[Outlet, int] = {}  # in order, with the number of new tokens
        began = self._clock()
        for batch in batches:
            together = self.batched or batch.whole
            for new in batch.rows:
                outlet = new.outlet
                if new.token is None:
                    outlet.ended = True
                    seen.setdefault(outlet, 0)
                    continue
                seen[outlet] = seen.get(outlet, 0) + 1
                outlet.add(new, batch.rev)
                if not together:
                    self._release(outlet, events)
        for outlet in seen:
            self._release(outlet, events)
        self._share(seen, self._clock() - began)
        for outlet in seen:
            if outlet.ended:
                self._end(outlet, events)
            elif outlet.is_over and not outlet.told:
                outlet.told = True
                self._on_stop(outlet.request.rid)
        if events:
            self._sink(events)

    def _release(self, outlet: Outlet, events: list[Event]) -> None:
        try:
            events += outlet.release()
        except Exception:  # one request's text must not cost another one's
            log.exception("the tokens of request %d could not be turned into text", outlet.request.rid)
            outlet.fail(FAULT)

    def _share(self, seen: dict[Outlet, int], took_ns: int) -> None:
        """Add what it took to the requests, by their tokens."""
        self._meters.detokenize_ns += took_ns
        tokens = sum(seen.values())
        for outlet, count in seen.items():
            outlet.request.detokenize_ns += took_ns * count // tokens if tokens else 0

    def _end(self, outlet: Outlet, events: list[Event]) -> None:
        try:
            done, answer = outlet.end()
        except Exception:
            log.exception("the end of request %d could not be told as it was", outlet.request.rid)
            outlet.fail(FAULT)
            done, answer = outlet.end()
        events += (done.row, done)
        outlet.request.outlet = None  # no cycle is left for the garbage collector
        if answer is not None and outlet.ticket is not None:
            self._results.put(outlet.ticket, answer)
