"""One request: its tokens, where it stands, and when things happened to it.

A request has no phases of its own. ``num_computed`` counts the leading tokens whose keys and values
lie in its blocks; the scheduler gives it tokens until ``num_computed`` reaches ``num_tokens``, and the
step that reaches it samples the next one. Prefill, chunks, prefix hits and recompute after a
preemption are all this one rule.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ipc.messages import ErrorCode, Finish, RequestRow, RequestState, Sampling

if TYPE_CHECKING:
    from engine.delivery import Outlet

NO_SLOT = -1
NO_BLOCK = -1  # in a block table: a leading block that was released because it lies outside every window
MAX_ITL = 8192  # gaps kept in a finished request's row, the protocol's bound
NUM_STAGES = 5  # plan, prepare, copy, forward, sample


@dataclass(frozen=True, slots=True)
class Swapped:
    """Where a preempted request's keys and values are kept: its blocks in the swap space, in token order.

    ``host_blocks[i]`` holds tokens [i * block_size, (i + 1) * block_size), `NO_BLOCK` where they were outside
    every window already; all of them together hold ``num_tokens`` tokens.
    """

    host_blocks: list[int]
    num_tokens: int


class Request:
    """A request as the engine holds it. Only the step thread changes it once it is submitted.

    token_ids: prompt then output; ``num_prompt`` marks the border for good, preempted or not.
    slot: the persistent row of the runner's buffers, `NO_SLOT` while it is not running.
    seed: what its random stream starts from, from ``sampling.seed`` alone where that is given.
    num_pending: 1 while a step that was launched will still deliver its next token, else 0.
    num_maybe: drafted tokens that may come with that one, ahead of it.
    swap: where its blocks are while it waits with them in host memory.
    stage_ns: what the engine spent while it ran: plan, prepare, copy, forward, sample. ``stages_at`` is the
    state of the engine's sums when it began to run, None while it does not.
    Times are nanoseconds of the engine's monotonic clock, None until they happened.
    """

    __slots__ = (
        "accepted_tokens", "arrive_ns", "block_keys", "block_table", "cache_salt", "cached_tokens", "code",
        "computed_tokens", "detokenize_ns", "draft_ns", "drafted_tokens", "drafts", "end_ns", "finish",
        "first_ns", "high_water", "host_hit_tokens", "last_ns", "lost_tokens", "max_total", "may_draft",
        "message", "miss_reason", "num_computed", "num_keyed", "num_maybe", "num_pending", "num_prompt",
        "order", "outlet", "preempt_count", "preempt_reason", "preempted_at_ns", "preempted_ns", "priority",
        "recompute_ns", "recompute_tokens", "result_cached", "resume_hit_tokens", "rev_first", "rev_last",
        "rid", "sampling", "sched_ns", "seed", "send_ns", "served_ns", "slot", "stage_ns", "stages_at",
        "state", "stop_ids", "stop_reason", "stream", "swap", "swap_count", "swap_in_tokens", "tag",
        "token_ids", "token_ns", "tokenize_ns", "verify_ns",
    )  # fmt: skip

    drafted: Sequence[int] = ()
    """Assumed tokens behind its own: none, a request holds verified ones only (see `SampledRequest`)."""

    def __init__(
        self,
        rid: int,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        tag: str = "",
        stream: bool = True,
        cache_salt: str = "",
        arrive_ns: int = 0,
    ) -> None:
        self.rid = rid
        self.token_ids: list[int] = list(prompt_ids)
        self.num_prompt = len(self.token_ids)
        self.sampling = sampling
        self.priority = priority
        self.tag = tag
        self.stream = stream
        self.cache_salt = cache_salt
        self.seed: int = sampling.seed if sampling.seed is not None else secrets.randbits(53)

        self.state: RequestState = "waiting"
        self.num_computed = 0
        self.num_pending = self.num_maybe = 0
        self.swap: Swapped | None = None
        self.block_table: list[int] = []
        self.block_keys: list[bytes] = []
        self.num_keyed = 0  # leading blocks already offered to the prefix cache
        self.slot = NO_SLOT
        self.order: tuple[int, int] = (0, rid)  # place in queue and victim choice, set by the scheduler
        self.max_total = self.num_prompt + sampling.max_tokens  # lowered to the model's limit at submit
        self.stop_ids: frozenset[int] = frozenset(sampling.stop_token_ids)  # and EOS ids, set at submit
        self.outlet: Outlet | None = None  # its way to the client, made at submit

        self.arrive_ns = arrive_ns
        self.sched_ns: int | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.end_ns: int | None = None
        self.token_ns: list[int] = []
        self.preempted_at_ns: int | None = None
        self.preempted_ns = 0
        self.served_ns = 0  # its last turn, where there are too few tokens in a step for every request
        self.preempt_count = 0
        self.preempt_reason = ""
        self.lost_tokens = 0
        self.swap_count = 0
        self.swap_in_tokens = 0
        self.cached_tokens = 0
        self.host_hit_tokens = 0
        self.resume_hit_tokens = 0
        self.computed_tokens = 0
        self.recompute_tokens = 0
        self.recompute_ns = 0
        self.may_draft = True  # until a draft made something that is not finite
        self.drafts = 0  # that proposed anything
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.draft_ns = 0
        self.verify_ns = 0
        self.high_water = 0  # most tokens ever computed; below it a token is a recomputed one
        self.miss_reason = ""
        self.result_cached = False
        self.tokenize_ns = 0
        self.detokenize_ns = 0
        self.send_ns = 0
        self.stage_ns: list[int] = [0] * NUM_STAGES
        self.stages_at: tuple[int, ...] | None = None
        self.rev_first = 0
        self.rev_last = 0

        self.finish: Finish | None = None
        self.stop_reason: str | int | None = None
        self.code: ErrorCode | None = None
        self.message = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_known(self) -> int:
        """Tokens that exist, the one that a launched step will still deliver among them."""
        return len(self.token_ids) + self.num_pending

    @property
    def held_blocks(self) -> list[int]:
        """Its block table without what was released already. Not to be changed."""
        table = self.block_table
        if table and table[0] == NO_BLOCK:
            return [block for block in table if block != NO_BLOCK]
        return table

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """A copy of the generated ids."""
        return self.token_ids[self.num_prompt :]

    @property
    def is_running(self) -> bool:
        return self.state in ("prefill", "decode")

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    def trim(self, num_output: int) -> None:
        """Cut the output to its first ``num_output`` tokens: where it ends was found further back.

        ValueError if it has fewer. Work done for what is cut stays counted.
        """
        if not 0 <= num_output <= self.num_output:
            raise ValueError(f"request {self.rid} cannot be cut to {num_output} of {self.num_output} tokens")
        del self.token_ids[self.num_prompt + num_output :]
        del self.token_ns[num_output:]
        self.last_ns = self.token_ns[-1] if self.token_ns else None
        if self.last_ns is None:
            self.first_ns = None

    def row(self) -> RequestRow:
        """The request as the protocol shows it; gaps between tokens only once it has finished."""
        gaps: list[int] = []
        if self.state == "finished":
            times = self.token_ns[: MAX_ITL + 1]
            gaps = [(b - a) // 1000 for a, b in pairwise(times)]
        plan_ns, prepare_ns, copy_ns, forward_ns, sample_ns = self.stage_ns
        return RequestRow(
            rid=self.rid,
            tag=self.tag,
            state=self.state,
            arrive_ns=self.arrive_ns,
            prompt_tok=self.num_prompt,
            cached_tok=self.cached_tokens,
            host_hit_tok=self.host_hit_tokens,
            result_cached=self.result_cached,
            computed_tok=self.computed_tokens,
            output_tok=self.num_output,
            max_tokens=self.sampling.max_tokens,
            priority=self.priority,
            sched_ns=self.sched_ns,
            first_ns=self.first_ns,
            last_ns=self.last_ns,
            end_ns=self.end_ns,
            preempt_n=self.preempt_count,
            preempted_us=self.preempted_ns // 1000,
            preempt_reason=self.preempt_reason,
            lost_tok=self.lost_tokens,
            recompute_tok=self.recompute_tokens,
            recompute_us=self.recompute_ns // 1000,
            resume_hit_tok=self.resume_hit_tokens,
            swap_n=self.swap_count,
            swap_in_tok=self.swap_in_tokens,
            miss_reason=self.miss_reason,
            drafts_n=self.drafts,
            drafted_tok=self.drafted_tokens,
            accepted_tok=self.accepted_tokens,
            draft_us=self.draft_ns // 1000,
            verify_us=self.verify_ns // 1000,
            tokenize_us=self.tokenize_ns // 1000,
            plan_us=plan_ns // 1000,
            prepare_us=prepare_ns // 1000,
            copy_us=copy_ns // 1000,
            forward_us=forward_ns // 1000,
            sample_us=sample_ns // 1000,
            detokenize_us=self.detokenize_ns // 1000,
            send_us=self.send_ns // 1000,
            itl_us=gaps,
            finish=self.finish,
            code=self.code,
            message=self.message,
            rev_first=self.rev_first,
            rev_last=self.rev_last,
        )

    def __repr__(self) -> str:
        return (
            f"Request(rid={self.rid}, {self.state}, computed={self.num_computed}/{self.num_tokens}, "
            f"prompt={self.num_prompt}, blocks={len(self.block_table)})"
        )
