"""Drafts made by a decoder, one token of each draft in a round over all requests of the batch.

Where the target's tokens are chosen in graphs, the rounds are replayed from graphs too, and feed each other
and the verification: the host knows how many tokens there are, and reads them when the step has been verified
(`engine.speculation.launched`). Everywhere else it reads the tokens of each round before it begins the next.
Both choose the same tokens.

Rounds that are replayed need not wait for the verification of the step before. What that accepts of its
drafts the device knows: it moves them (`engine.graphs.drafting`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, ToDevice
from engine.batch import Batch, BatchBuilder, RowRequest, TextRow
from engine.graphs.drafting import MOST_QUERIES, GraphedRounds, RoundShape, RunsWith
from engine.graphs.newest import BEFORE, awaited
from engine.graphs.shapes import ROWS
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.native import forward_pass
from engine.ops.choice import FUSED, SAMPLING, make_ops, make_sampling, probe
from engine.penalties import has_penalty
from engine.sampling import is_greedy, is_short
from engine.speculation.base import Draft, DraftSource
from engine.speculation.launched import LaunchedDrafts
from engine.speculation.proposals import ProposalSampler
from engine.speculation.rows import DraftRow
from engine.timing import Timer
from ipc.messages import Sampling


@dataclass(slots=True)
class Work:
    """A request that gets a draft of ``count`` tokens in this call, and what the decoder computes for it."""

    at: int  # its place in the call
    request: RowRequest
    row: TextRow
    count: int
    known: int = 0  # tokens of it on the host, if the newest is not: 0 if it is
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    source: DraftSource | None = None

    @property
    def draft(self) -> Draft:
        return Draft(self.token_ids, torch.stack(self.probs) if self.probs else None, self.source)


class ReplaysRounds(Protocol):
    """Who knows whether rounds are replayed from graphs, `engine.runner.ModelRunner` in the engine."""

    def rounds_for(
        self,
        shapes: Collection[RoundShape],
        outside: str,
        runs_with: RunsWith,
    ) -> GraphedRounds | None:
        """See `engine.graphs.switch.Graphs.rounds_for`."""
        ...

    def why_no_rounds(self, shapes: Collection[RoundShape], runs_with: RunsWith) -> str:
        """See `engine.graphs.switch.Graphs.why_no_rounds`."""
        ...

    def drop_rounds(self) -> None:
        """Forget the graphs of rounds."""
        ...


class RoundDrafter(ABC):
    """What drafters with a decoder share. The step thread owns it; no step may be computed meanwhile, but for
    one that chooses its tokens on the device (``behind``).

    ``spec``: of what drafts, with the attention windows that it runs with, none larger than the target's.
    ``kv``: the pool that it writes to. ``attention`` gives the backend to run with. ``graphs``: whose graphs
    of rounds it may use, if any.
    ``drawn``: drafts of requests that are not greedy are drawn freely and come with their probabilities.
    """

    name: str
    sequential = True
    most_behind: int
    """Tokens that it computes of a request in the first round, behind a step in flight."""

    def __init__(
        self,
        decoder: Decoder,
        spec: ModelSpec,
        kv: KVCache,
        attention: Callable[[], AttentionBackend],
        sampler: ProposalSampler,
        to_device: ToDevice,
        graphs: ReplaysRounds | None = None,
    ) -> None:
        self.drawn = False
        self.plan = 0
        """Number of the plan that is drafted for: those that are not drafted for count too."""
        self.behind = False
        """Whether a step is in flight: newest tokens may be pending, and what is not launched is left."""
        self.caught_up = 0
        """Tokens that the last call computed beside those of drafts."""
        self._decoder = decoder
        self._spec = spec
        self._kv = kv
        self._attention = attention
        self._sampler = sampler
        self._to_device = to_device
        self._graphs = graphs
        self._fused: Mapping[str, bool] | None = None
        windows = [window for window in spec.layer_windows if window is not None]
        self._window = max(windows) if len(windows) == spec.num_layers else None
        self._builder = BatchBuilder(kv.block_size, kv.num_blocks, self._window, most_moved=MOST_QUERIES)

    @abstractmethod
    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        """See `engine.speculation.base.Drafter`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of a pool of its own, if it has one."""
        return 0

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._builder.release(slot)
        self._sampler.release(slot)

    def set_fused(self, wanted: Mapping[str, bool]) -> None:
        """Fuse sampling, and those parts of the decoder (`engine.ops.choice.FUSED`) that can serve it: what
        is asked for is meant for the target, whose sizes may be others.
        """
        if wanted == self._fused:  # what was captured with the parts that there are stays good
            return
        self._fused = dict(wanted)
        decoder = self._decoder
        where = decoder.spec, decoder.device, decoder.activation_dtype
        can = {knob: wanted[knob] and probe(knob, *where) is None for knob in FUSED}
        decoder.ops = make_ops(can, *where)
        self._sampler.fused = make_sampling(wanted[SAMPLING], decoder.device)

    @property
    def runs_with(self) -> RunsWith:
        """What its forward passes are computed by, over which pool, and the model with its windows."""
        return self._decoder, self._attention(), self._kv, self._spec

    def close(self) -> None:
        """Give back what it holds, whoever may still know of it. It must not be asked any more."""
        if self._graphs is not None:
            self._graphs.drop_rounds()

    def _make(self, work: Sequence[Work], behind: Sequence[TextRow] = ()) -> None:
        """Let every request have its draft, by rounds that are replayed if they can be: see `_draft`.

        Behind a step in flight they have none if not.
        """
        launched = bool(work or self.behind) and self._launch(work, behind)
        if not launched and not self.behind:
            self._draft(work, behind)

    def _launch(self, work: Sequence[Work], behind: Sequence[TextRow]) -> bool:
        """Launch the rounds of all drafts, one after the other, and read nothing. Whether that could be."""
        if self._graphs is None:
            return False
        if not work:
            return self._launch_behind(behind)
        longest = max(each.count for each in work)
        far = [each.row for each in work if each.row.num_new > MOST_QUERIES]
        queries = max(1 if each.row.num_new > MOST_QUERIES else each.row.num_new for each in work)
        moved = any(each.row.num_maybe for each in work)
        first, later = (RoundShape.of(len(work), count, moved=moved) for count in (queries, 1))
        outside = self._outside([each.request for each in work])
        shapes = {first, later} if longest > 1 else {first}
        rounds = self._graphs.rounds_for(shapes, outside, self.runs_with)
        if rounds is None:
            return False
        clean, span = self._cleaner(work), Timer(self._decoder.device)
        with torch.inference_mode():
            span.start()
            self._bring_up(rounds, far, behind)
            for place in range(1, longest + 1):
                going = [each for each in work if each.count >= place]
                batch = self._builder.build([each.row for each in going])
                if place == 1:
                    _await_before(batch, going)
                rows = [_place_of(going[i]) for i in batch.sampled]
                rounds.launch(first if place == 1 else later, batch, rows, place)
                for each in going:
                    each.row.num_computed += each.row.num_new
                    _add(each, awaited(each.row.slot, place))
            arrival, host = rounds.fetch(longest)
            span.stop()
        besides = bool(self.caught_up or far)
        source = LaunchedDrafts(work, arrival, host, span, clean, caught_up=besides)
        for each in work:
            each.source = source
        return True

    def _launch_behind(self, behind: Sequence[TextRow]) -> bool:
        """Launch only what brings requests up that are ``behind``. Whether that could be."""
        assert self._graphs is not None
        rounds = self._graphs.rounds_for((), "", self.runs_with)
        if rounds is not None:
            with torch.inference_mode():
                self._bring_up(rounds, (), behind)
        return rounds is not None

    def why_waits(self, requests: Sequence[RowRequest]) -> str:
        """In a word why drafts for these have to wait for the step in flight, "" if they need not."""
        if self._graphs is None:
            return "off"
        if not requests:
            return ""
        moved = any(request.num_maybe for request in requests)
        shapes = {RoundShape.of(len(requests), count, moved=moved) for count in (1, self.most_behind)}
        return self._outside(requests) or self._graphs.why_no_rounds(shapes, self.runs_with)

    def _outside(self, requests: Sequence[RowRequest]) -> str:
        """In a word why their drafts are not made inside graphs, "" if they are."""
        if len(requests) > ROWS[-1]:
            return "large"
        for request in requests:
            if has_penalty(request.sampling):
                return "penalties"
            if is_short(request):
                return "min_tokens"
            if self.drawn and not is_greedy(request.sampling):
                return "rejection"
        return ""

    def _bring_up(self, rounds: GraphedRounds, far: Sequence[TextRow], behind: Sequence[TextRow]) -> None:
        """Launch all that is to be computed of requests that are ``behind``, and of those ``far`` behind all
        but the newest token.
        """
        rows = [*far, *behind]
        for row in far:
            row.num_new -= 1
        if rows:
            forward, _ = self._prepared(rows)
            rounds.compute(forward)
        for row in rows:
            row.num_computed += row.num_new
        for row in far:
            row.num_new = 1

    def _cleaner(self, work: Sequence[Work]) -> Callable[[], None]:
        """What replaces what is not finite, if others may get it, of all that will be written for them."""
        return lambda: None

    def _draft(self, work: Sequence[Work], behind: Sequence[TextRow] = ()) -> None:
        """Compute rounds until every request has its draft; those ``behind`` take part in the first.

        Raises `DraftFailed` for logits that are not finite, and what a forward pass raises.
        """
        going = list(work)
        with torch.inference_mode():
            while going or behind:
                rows = [each.row for each in going]
                logits, order = self._forward([*rows, *behind])
                for row in (*rows, *behind):
                    row.num_computed += row.num_new
                behind = ()
                if going:
                    self._choose(logits, [going[i] for i in order])
                going = [each for each in going if len(each.token_ids) < each.count]

    def _forward(self, rows: Sequence[TextRow]) -> tuple[Tensor, list[int]]:
        """Logits of the rows whose last token is computed, and which these are."""
        forward, order = self._prepared(rows)
        return forward(), order

    def _prepared(self, rows: Sequence[TextRow]) -> tuple[Callable[[], Tensor], list[int]]:
        """What `_forward` launches, and the rows that it gives logits of."""
        batch = self._builder.build(rows)
        batch.fill()
        attention = self._attention().plan(batch.rows, self._kv, self._spec, self._to_device)
        ids, positions, slots, wanted = map(
            self._to_device, (batch.ids, batch.positions, batch.slots, batch.logit_tokens)
        )

        def forward() -> Tensor:
            with forward_pass():
                return self._decoder.forward(ids, positions, slots, attention, self._kv, wanted)

        return forward, batch.sampled

    def _choose(self, logits: Tensor, work: Sequence[Work]) -> None:
        """Add the next token to each draft, and to what is to be computed next."""
        ids, probs = self._sampler.propose(logits, list(map(_place_of, work)), drawn=self.drawn)
        for each, token, distribution in zip(work, ids, probs, strict=True):
            _add(each, token)
            if distribution is not None:
                each.probs.append(distribution)


def _place_of(work: Work) -> DraftRow:
    """A request as the next token of its draft is chosen for it."""
    request = work.request
    return DraftRow(
        request.rid,
        request.slot,
        work.row.sampling,
        request.seed,
        request.num_prompt,
        request.num_known + len(work.token_ids),
        request.token_ids,
        work.token_ids,
    )


def _await_before(batch: Batch, work: Sequence[Work]) -> None:
    """Of two tokens of a row behind drafts that nobody has judged, the device alone knows the first too."""
    for at, entry in zip(batch.rows.starts.tolist(), batch.order, strict=True):
        row = work[entry].row
        if row.num_maybe and row.num_new > 1:
            batch.ids[at] = awaited(row.slot, BEFORE)


def _add(work: Work, token: int) -> None:
    """A draft has its next token, which is what is to be computed next."""
    work.token_ids.append(token)
    work.row.token_ids.append(token)
    work.row.num_new = 1


def known_of(request: RowRequest) -> int:
    """How many tokens of a request the host knows if the newest is not among them, 0 if it is."""
    return request.num_tokens if request.num_known > request.num_tokens else 0


def settings(sampling: Sampling) -> Sampling:
    """A request's settings without the log-probabilities, which nobody reads of a draft."""
    return msgspec.structs.replace(sampling, logprobs=None)
