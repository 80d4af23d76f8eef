"""What a load sends: a seeded specification, and the list of requests it stands for."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PromptKind = Literal["chat", "long_context", "shared_prefix", "code"]
Arrival = Literal["poisson", "constant", "concurrency"]
PROMPT_KINDS: tuple[PromptKind, ...] = ("chat", "long_context", "shared_prefix", "code")


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A load, in full: the same specification always materialises to the same list of requests.

    ``arrival`` poisson and constant are open-loop at ``rate_rps`` (requests are sent on schedule whatever
    the engine does; ``max_concurrency`` only bounds what this client can hold, and reaching it makes the
    run invalid). ``concurrency`` keeps ``concurrency`` requests in flight (closed loop).
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)] = "demo"
    seed: Annotated[int, Meta(ge=0, le=(1 << 53) - 1)] = 1
    arrival: Arrival = "poisson"
    rate_rps: Annotated[float, Meta(gt=0.0, le=10_000.0)] = 2.0
    concurrency: Annotated[int, Meta(ge=1, le=4096)] = 8
    max_concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    num_requests: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None  # None: until the duration is over
    duration_s: Annotated[float, Meta(gt=0.0, le=7 * 86_400.0)] | None = 60.0
    mix: Annotated[dict[PromptKind, Annotated[float, Meta(ge=0.0)]], Meta(min_length=1)] = {"chat": 1.0}
    input_tok: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]] = (32, 256)  # about: min, max
    output_tok: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]] = (16, 128)
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
