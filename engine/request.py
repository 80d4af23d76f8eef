"""One request: its tokens, where it stands, and when things happened to it.

A request has no phases of its own. ``num_computed`` counts the leading tokens whose keys and values
lie in its blocks; the scheduler gives it tokens until ``num_computed`` reaches ``num_tokens``, and the
step that reaches it samples the next one. Prefill, chunks, prefix hits and recompute after a
preemption are all this one rule.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ipc.messages import ErrorCode, Finish, RequestRow, RequestState, Sampling, TokenLogprob

if TYPE_CHECKING:
    from engine.text import Detokenizer

NO_SLOT = -1
MAX_ITL = 8192  # gaps kept in a finished request's row, the protocol's bound


class Request:
    """A request as the engine holds it. Only the step thread changes it once it is submitted.

    token_ids: prompt then output; ``num_prompt`` marks the border for good, preempted or not.
    slot: the persistent row of the runner's buffers, `NO_SLOT` while it is not running.
    seed: what its random stream starts from, from ``sampling.seed`` alone where that is given.
    Times are nanoseconds of the engine's monotonic clock, None until they happened.
    """

    __slots__ = (
        "arrive_ns", "block_keys", "block_table", "cache_salt", "cached_tokens", "code",
        "computed_tokens", "detokenizer", "end_ns", "finish", "first_ns", "high_water", "last_ns",
        "logprobs", "max_total", "message", "miss_reason", "num_computed", "num_keyed", "num_prompt", "order",
        "preempt_count", "preempted_at_ns", "preempted_ns", "priority", "recompute_tokens",
        "resume_hit_tokens", "rev_first", "rev_last", "rid", "sampling", "sched_ns", "seed", "slot", "state",
        "stop_ids", "stop_reason", "stream", "tag", "text_parts", "token_ids", "token_ns",
    )  # fmt: skip

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
        self.block_table: list[int] = []
        self.block_keys: list[bytes] = []
        self.num_keyed = 0  # leading blocks already offered to the prefix cache
        self.slot = NO_SLOT
        self.order: tuple[int, int] = (0, rid)  # place in queue and victim choice, set by the scheduler
        self.max_total = self.num_prompt + sampling.max_tokens  # lowered to the model's limit at submit
        self.stop_ids: frozenset[int] = frozenset(sampling.stop_token_ids)  # and EOS ids, set at submit
        self.detokenizer: Detokenizer | None = None

        self.arrive_ns = arrive_ns
        self.sched_ns: int | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.end_ns: int | None = None
        self.token_ns: list[int] = []
        self.preempted_at_ns: int | None = None
        self.preempted_ns = 0
        self.preempt_count = 0
        self.cached_tokens = 0
        self.resume_hit_tokens = 0
        self.computed_tokens = 0
        self.recompute_tokens = 0
        self.high_water = 0  # most tokens ever computed; below it a token is a recomputed one
        self.miss_reason = ""
        self.rev_first = 0
        self.rev_last = 0

        self.text_parts: list[str] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish: Finish | None = None
        self.stop_reason: str | int | None = None
        self.code: ErrorCode | None = None
        self.message = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

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

    def row(self) -> RequestRow:
        """The request as the protocol shows it; gaps between tokens only once it has finished."""
        gaps: list[int] = []
        if self.state == "finished":
            times = self.token_ns[: MAX_ITL + 1]
            gaps = [(b - a) // 1000 for a, b in pairwise(times)]
        return RequestRow(
            rid=self.rid,
            tag=self.tag,
            state=self.state,
            arrive_ns=self.arrive_ns,
            prompt_tok=self.num_prompt,
            cached_tok=self.cached_tokens,
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
            recompute_tok=self.recompute_tokens,
            resume_hit_tok=self.resume_hit_tokens,
            miss_reason=self.miss_reason,
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
