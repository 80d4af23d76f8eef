"""What a request must meet before it is queued. Whoever fails here hears why, and nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.request import Request
from engine.sizes import counted
from engine.text import Tokenizer
from ipc.codec import MAX_ENGINE_BYTES
from ipc.messages import ErrorCode, Sampling

MAX_WHOLE_CHARS = 1 << 20  # of the text of a `Done`
# Most bytes of its other parts when encoded: an id, an id with its log-probability, the row with its gaps.
_ID_BYTES = 5
_LOGPROB_BYTES = 40
_ROW_BYTES = 256 << 10


class RequestRefused(Exception):
    """A request that was refused at the door: nothing was queued and no event will follow."""

    def __init__(self, code: ErrorCode, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.retry_after_ms = retry_after_ms


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestRefused if the request can never run on this model, saying value and limit."""
    _check_ids("prompt", request.token_ids, vocab_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, vocab_size)
    if not request.token_ids:
        raise RequestRefused("invalid", "the prompt has no tokens; give at least one")
    _check_sampling(request.sampling)
    if request.num_prompt >= max_model_len:
        raise RequestRefused(
            "too_long",
            f"the prompt has {counted(request.num_prompt, 'token')}, the limit is {max_model_len} with the "
            f"new ones; shorten it to {max_model_len - 1}",
        )


def check_fit(request: Request, needed_blocks: int, num_blocks: int, block_size: int) -> None:
    """Raise RequestRefused if the whole pool could not hold the request at its longest."""
    if needed_blocks > num_blocks:
        raise RequestRefused(
            "too_large",
            f"{counted(request.num_prompt, 'prompt token')} and up to "
            f"{counted(request.max_total - request.num_prompt, 'new one')} need "
            f"{counted(needed_blocks, 'block')} of {counted(block_size, 'token')}, the pool has "
            f"{num_blocks}; ask for fewer",
        )


def check_whole(request: Request, tokenizer: Tokenizer) -> None:
    """Raise RequestRefused if an answer that is sent whole could be more than one message may hold.

    The bound is that of the longest tokens, as what the model will say is not known.
    """
    tokens = request.max_total - request.num_prompt
    each = tokenizer.max_token_utf8 + _ID_BYTES
    if request.sampling.logprobs is not None:
        each += _LOGPROB_BYTES * (request.sampling.logprobs + 1)
    fits = min(MAX_WHOLE_CHARS // max(tokenizer.max_token_chars, 1), (MAX_ENGINE_BYTES - _ROW_BYTES) // each)
    if tokens > fits:
        raise RequestRefused(
            "invalid",
            f"an answer of {tokens} tokens may not fit into one message, which surely holds {fits} of this "
            f"model's tokens; lower max_tokens to that, or have the answer streamed",
        )


def _check_ids(what: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestRefused(
            "invalid", f"{what} holds id {wrong}, this model's ids are 0 to {vocab_size - 1}"
        )


def _check_sampling(sampling: Sampling) -> None:
    """The bounds the protocol declares, also for requests that did not come over the wire."""
    try:
        msgspec.convert(msgspec.to_builtins(sampling), Sampling)
    except msgspec.ValidationError as error:
        raise RequestRefused("invalid", f"sampling: {error}") from None
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestRefused(
            "invalid", f"min_tokens is {sampling.min_tokens}, above max_tokens {sampling.max_tokens}"
        )
