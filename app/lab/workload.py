"""What a load sends: a seeded specification, and the list of requests it stands for.

The same specification always gives the same requests, on any machine: randomness comes from the standard
library's Mersenne Twister through ``random()`` alone, whose sequence Python promises to keep, with one
generator per request, so that request k does not depend on how many others were made.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from random import Random
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from ipc.messages import ChatMessage

PromptKind = Literal["chat", "long_context", "shared_prefix", "code"]
Arrival = Literal["poisson", "constant", "concurrency"]
PROMPT_KINDS: tuple[PromptKind, ...] = ("chat", "long_context", "shared_prefix", "code")

CHARS_PER_TOKEN = 4.5  # of English prose; the engine counts the real tokens and each row keeps them
# To stay below a limit, fewer: code takes more tokens, and a small vocabulary has little more than letters.
FEWEST_CHARS_PER_TOKEN = 3.0
SMALL_VOCABULARY, ITS_CHARS_PER_TOKEN = 1000, 1.0
TEMPLATE_TOK = 64  # of roles, and of the system prompt that many chat templates add
LEAST_PROMPT_TOK = 16
HASHED_AT_MOST = 4096  # requests that enter the hash; longer lists follow from the specification anyway

Range = tuple[Annotated[int, Meta(ge=1, le=1 << 20)], Annotated[int, Meta(ge=1, le=1 << 20)]]
Weight = Annotated[float, Meta(ge=0.0, le=1e6)]
T = TypeVar("T")


class WorkloadError(ValueError):
    """A specification that describes no load; the text says which value and why."""


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A load, in full: the same specification always materialises to the same list of requests.

    ``arrival`` poisson and constant are open-loop at ``rate_rps``: requests are sent on schedule whatever
    the engine does; ``max_concurrency`` only bounds what this client can hold, and reaching it makes the
    run invalid. ``concurrency`` keeps that many requests in flight (closed loop). Lengths in tokens are
    aimed at by characters, since only the engine has the tokenizer.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)] = "demo"
    seed: Annotated[int, Meta(ge=0, le=(1 << 53) - 1)] = 1
    arrival: Arrival = "poisson"
    rate_rps: Annotated[float, Meta(gt=0.0, le=10_000.0)] = 2.0
    concurrency: Annotated[int, Meta(ge=1, le=4096)] = 8
    max_concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    num_requests: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None  # None: until the duration is over
    duration_s: Annotated[float, Meta(gt=0.0, le=7 * 86_400.0)] | None = 60.0
    mix: Annotated[dict[PromptKind, Weight], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"chat": 1.0}
    )
    input_tok: Range = (16, 128)  # chat and code
    long_tok: Range = (512, 1536)  # long_context
    prefix_tok: Annotated[int, Meta(ge=1, le=1 << 16)] = 384  # the system prompt of shared_prefix
    output_tok: Range = (16, 96)
    max_prompt_chars: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None  # no prompt has more
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0

    def check(self) -> None:
        """Raise `WorkloadError` for what the bounds of the fields cannot say."""
        for field, (low, high) in (
            ("input_tok", self.input_tok),
            ("long_tok", self.long_tok),
            ("output_tok", self.output_tok),
        ):
            if low > high:
                raise WorkloadError(f"{field}: the smallest length {low} is above the largest, {high}.")
        if sum(self.mix.values()) <= 0.0:
            raise WorkloadError("mix: all weights are 0; give at least one kind of prompt a weight.")
        if self.num_requests is None and self.duration_s is None:
            raise WorkloadError("Give num_requests or duration_s; with neither, the load would never end.")


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the list. ``at_s`` counts from the start of the run; None in a closed loop."""

    index: int
    at_s: float | None
    kind: PromptKind
    messages: list[ChatMessage]
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.messages)).hexdigest()

    @property
    def raw_prompt(self) -> str:
        """The same text without roles, for a model that has no chat template."""
        return "\n\n".join(message.content for message in self.messages)


@cache
def _corpus(name: str) -> tuple[str, ...]:
    """The pieces of a demo text: paragraphs, questions or programs, parted by blank lines with ``%``."""
    text = (resources.files("resources") / "demo" / f"{name}.txt").read_text(encoding="utf-8")
    return tuple(piece.strip() for piece in text.split("\n%\n") if piece.strip())


def _pick(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _between(rng: Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


def _shuffled(rng: Random, items: Sequence[T]) -> list[T]:
    return [item for _, item in sorted(((rng.random(), i), item) for i, item in enumerate(items))]


def _prose(rng: Random, tokens: int) -> str:
    """About ``tokens`` tokens of prose: paragraphs in a random order, cut at a word."""
    want = max(1, round(tokens * CHARS_PER_TOKEN))
    parts: list[str] = []
    have = 0
    while have < want:
        for piece in _shuffled(rng, _corpus("prose")):
            parts.append(piece)
            have += len(piece) + 2
            if have >= want:
                break
    text = "\n\n".join(parts)
    return text if len(text) <= want else text[:want].rsplit(" ", 1)[0]


def _shared_system(tokens: int, most: int | None = None) -> str:
    """The fixed system prompt of ``shared_prefix``, of at most ``most`` characters: one text for every seed
    and request.
    """
    return _cut(_corpus("system")[0] + "\n\n" + _prose(Random("system prompt"), tokens), most, " ")


def _cut(text: str, most: int | None, at: str) -> str:
    """``text``, or as much of it, up to an ``at``, as ``most`` characters hold."""
    if most is None or len(text) <= most:
        return text
    return text[: max(1, most)].rsplit(at, 1)[0]


def _room(spec: WorkloadSpec, *others: str) -> int | None:
    """Characters that a prompt may have beside ``others`` and what is between them; None for any number."""
    most = spec.max_prompt_chars
    return None if most is None else max(1, most - sum(len(other) + 4 for other in others))


def _chat(rng: Random, spec: WorkloadSpec) -> list[ChatMessage]:
    question = _pick(rng, _corpus("questions"))
    tokens = _between(rng, *spec.input_tok)
    room = tokens - round(len(question) / CHARS_PER_TOKEN)
    most = _room(spec, question)
    if most is not None:
        room = min(room, int(most / CHARS_PER_TOKEN))
    content = question if room < 12 else f"{_prose(rng, room)}\n\n{question}"
    return [ChatMessage(role="user", content=content)]


def _long_context(rng: Random, spec: WorkloadSpec) -> list[ChatMessage]:
    task = "Sum up the text above in three sentences."
    text = _cut(_prose(rng, _between(rng, *spec.long_tok)), _room(spec, task), " ")
    return [ChatMessage(role="user", content=f"{text}\n\n{task}")]


def _shared_prefix(rng: Random, spec: WorkloadSpec) -> list[ChatMessage]:
    # The longest question, whichever is asked: what is shared must be the same text in all of them.
    most = _room(spec, max(_corpus("questions"), key=len))
    return [
        ChatMessage(role="system", content=_shared_system(spec.prefix_tok, most)),
        ChatMessage(role="user", content=_pick(rng, _corpus("questions"))),
    ]


def _code(rng: Random, spec: WorkloadSpec) -> list[ChatMessage]:
    want = round(_between(rng, *spec.input_tok) * CHARS_PER_TOKEN)
    parts: list[str] = []
    for program in _shuffled(rng, _corpus("code")):
        parts.append(program)
        if sum(map(len, parts)) >= want:
            break
    task = _pick(rng, ("Explain what this code does.", "Find a fault in this code.", "Write a test for it."))
    listing = _cut("\n\n\n".join(parts), _room(spec, task, "```python```"), "\n")
    return [ChatMessage(role="user", content=f"{task}\n\n```python\n{listing}\n```")]


_MAKERS = {"chat": _chat, "long_context": _long_context, "shared_prefix": _shared_prefix, "code": _code}


def planned(spec: WorkloadSpec, index: int, at_s: float | None) -> PlannedRequest:
    """Request ``index`` of the list, whatever came before it."""
    rng = Random(f"{spec.seed}/{index}")
    kinds = [kind for kind in PROMPT_KINDS if spec.mix.get(kind, 0.0) > 0.0]
    weights = list(itertools.accumulate(spec.mix[kind] for kind in kinds))
    draw = rng.random() * weights[-1]
    kind = next((k for k, edge in zip(kinds, weights, strict=True) if draw < edge), kinds[-1])
    return PlannedRequest(
        index=index,
        at_s=at_s,
        kind=kind,
        messages=_MAKERS[kind](rng, spec),
        max_tokens=_between(rng, *spec.output_tok),
        ignore_eos=spec.ignore_eos,
        temperature=spec.temperature,
        seed=int(rng.random() * (1 << 31)),
    )


def schedule(spec: WorkloadSpec) -> Iterator[PlannedRequest]:
    """The requests in order of sending, one at a time: endless loads fit in memory too."""
    spec.check()
    rng = Random(f"{spec.seed}/arrivals")
    at_s = 0.0
    for index in itertools.count():
        if spec.num_requests is not None and index >= spec.num_requests:
            return
        if spec.arrival == "concurrency":
            yield planned(spec, index, None)
            continue
        if spec.duration_s is not None and at_s >= spec.duration_s:
            return
        yield planned(spec, index, at_s)
        # An exponential gap from (0, 1]: 1 - random() is never 0, so its logarithm is finite.
        gap = -math.log(1.0 - rng.random()) if spec.arrival == "poisson" else 1.0
        at_s += gap / spec.rate_rps


def fitted(spec: WorkloadSpec, max_model_len: int, vocab_size: int) -> WorkloadSpec:
    """``spec``, or one with shorter prompts and answers where a model of ``max_model_len`` tokens could not
    hold its longest ones together.

    Tokens are estimated from characters, and rather too many: only the engine has the tokenizer.
    """
    per_token = chars_per_token(vocab_size)
    longest = max(_most_chars(spec, kind) for kind, weight in spec.mix.items() if weight > 0.0)
    low, high = spec.output_tok
    if longest / per_token + TEMPLATE_TOK + high <= max_model_len:
        return spec
    high = min(high, max(1, max_model_len // 4))
    prompt_tok = max(LEAST_PROMPT_TOK, max_model_len - high - TEMPLATE_TOK)
    return msgspec.structs.replace(
        spec, output_tok=(min(low, high), high), max_prompt_chars=min(longest, round(prompt_tok * per_token))
    )


def chars_per_token(vocab_size: int) -> float:
    """Characters that a token surely stands for, on average, in the prompts of a load."""
    return ITS_CHARS_PER_TOKEN if vocab_size <= SMALL_VOCABULARY else FEWEST_CHARS_PER_TOKEN


def _most_chars(spec: WorkloadSpec, kind: PromptKind) -> int:
    """Characters of the longest prompt of a kind."""
    question = max(map(len, _corpus("questions")))
    most = {
        "chat": spec.input_tok[1] * CHARS_PER_TOKEN + question,
        "long_context": spec.long_tok[1] * CHARS_PER_TOKEN + question,
        "shared_prefix": spec.prefix_tok * CHARS_PER_TOKEN + len(_corpus("system")[0]) + question,
        "code": spec.input_tok[1] * CHARS_PER_TOKEN + max(map(len, _corpus("code"))) + question,
    }[kind]
    return round(most if spec.max_prompt_chars is None else min(most, spec.max_prompt_chars))


def workload_sha256(spec: WorkloadSpec) -> str:
    """SHA-256 of the materialised list, or of its first `HASHED_AT_MOST` requests."""
    digest = hashlib.sha256()
    for request in itertools.islice(schedule(spec), HASHED_AT_MOST):
        digest.update(msgspec.json.encode(request))
        digest.update(b"\n")
    return digest.hexdigest()
