"""Answers of deterministic requests, kept whole and given again to an equal request.

A key is blake2b over everything that may change an answer: what the engine runs (model, weights, precision,
tokenizer, kernels, context), the values of all knobs but those named in `NEUTRAL_KNOBS`, the prompt's ids,
every field of the sampling settings and the cache salt. A new knob or a new field is part of the key unless
somebody says otherwise here. Kept is what a request computed from its begin to its end under one
configuration; nothing is kept of one that failed, was cancelled or met a change of the configuration.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from engine.request import Request
from engine.sampling import is_greedy
from ipc.messages import Finish, KnobValue, Sampling, TokenLogprob

MAX_BYTES = 64 << 20
ENTRY_BYTES = 256  # what keeping an answer costs beside its own bytes
KEY_BYTES = 32

NEUTRAL_KNOBS = frozenset(
    {
        # Who runs when, and where keys and values lie. These change the shapes of products and with them the
        # rounding, as do the requests that happen to run at the same time.
        "batching", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "prefill_chunk_tokens",
        "policy", "priority_ageing_s", "max_num_queued", "batch_wait_ms", "preemption", "swap_space_gib",
        "overlap", "prefix_cache", "block_size", "kv_allocation", "kv_pool_gib", "kv_host_gib",
        # How many tokens are verified together: shapes again. Each is the one that would be chosen without.
        # What rejection sampling leaves to chance is not kept at all (see `ResultCache.ticket`).
        "speculation", "spec_tokens", "spec_adaptive", "spec_self_dtype",
        # How text is handled, and what is measured.
        "batched_tokenize", "batched_detokenize", "result_cache", "forward_timing",
    }
)  # fmt: skip


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a request came to. Its text follows from the ids."""

    ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish: Finish
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a request's answer belongs, and the configuration that it must be computed under."""

    key: bytes
    generation: int


class ResultCache:
    """Least recently used answers in at most ``max_bytes``. Thread-safe.

    ``identity`` names all that decides an answer and is fixed as long as the engine runs. `configure` must be
    called with the knob values before anything else, and at each change of them.
    """

    def __init__(self, identity: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.hits = 0
        self._identity = identity
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._enabled = False
        self._by_chance = False  # what is drawn depends on drafts too
        self._context = b""
        self._generation = 0
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answer)

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._num_bytes

    def configure(self, values: Mapping[str, KnobValue]) -> None:
        """Obey these knob values. Switched off, all answers are dropped."""
        relevant = sorted((name, value) for name, value in values.items() if name not in NEUTRAL_KNOBS)
        context = self._encoder.encode([self._identity, relevant])
        enabled = bool(values["result_cache"])
        by_chance = values["speculation"] in ("draft", "self") and values["spec_sampling"] == "rejection"
        with self._lock:
            if (enabled, by_chance, context) == (self._enabled, self._by_chance, self._context):
                return
            self._enabled, self._by_chance, self._context = enabled, by_chance, context
            self._generation += 1  # what runs now began under another configuration
            if not enabled:
                self._answers.clear()
                self._num_bytes = 0

    def ticket(self, request: Request) -> Ticket | None:
        """Where the answer of a request that was not begun belongs; None if none may be kept for it."""
        if not self._enabled or not is_deterministic(request.sampling):
            return None
        if self._by_chance and not is_greedy(request.sampling):
            return None
        with self._lock:
            context, generation = self._context, self._generation
        return Ticket(_key(context, request), generation)

    def get(self, ticket: Ticket) -> Answer | None:
        """The answer kept for an equal request."""
        with self._lock:
            kept = self._answers.get(ticket.key)
            if kept is None or ticket.generation != self._generation:
                return None
            self._answers.move_to_end(ticket.key)
            self.hits += 1
        return self._decoder.decode(kept)

    def put(self, ticket: Ticket, answer: Answer) -> None:
        """Keep an answer, if the configuration is still the one it began under and it is not too large."""
        body = self._encoder.encode(answer)
        size = len(body) + ENTRY_BYTES
        with self._lock:
            if ticket.generation != self._generation or not self._enabled or size > self._max_bytes:
                return
            old = self._answers.pop(ticket.key, None)
            if old is not None:
                self._num_bytes -= len(old) + ENTRY_BYTES
            self._answers[ticket.key] = body
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._answers.popitem(last=False)
                self._num_bytes -= len(oldest) + ENTRY_BYTES


def is_deterministic(sampling: Sampling) -> bool:
    """Whether an equal request would get an equal answer."""
    return is_greedy(sampling) or sampling.seed is not None


def _key(context: bytes, request: Request) -> bytes:
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (
        context,
        request.cache_salt.encode(),
        msgspec.msgpack.encode(msgspec.structs.astuple(request.sampling)),
        array("Q", request.token_ids).tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "little"))  # so that no two parts can blend
        digest.update(part)
    return digest.digest()
