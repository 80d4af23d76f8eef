"""The bound on answers that are sent whole: what passes can be read, whatever the model says."""

from __future__ import annotations

import math

import msgspec
import pytest

from engine import door
from engine.door import RequestRefused, check_whole
from engine.models.dummy import byte_tokenizer
from engine.request import MAX_ITL, Request
from ipc import codec
from ipc import messages as m
from tests.ipc.samples import request_row

TOKENIZER = byte_tokenizer(300)


def request(tokens: int, logprobs: int | None = None) -> Request:
    return Request(1, [5], m.Sampling(max_tokens=tokens, logprobs=logprobs), stream=False)


def passes(tokens: int, logprobs: int | None) -> bool:
    try:
        check_whole(request(tokens, logprobs), TOKENIZER)
    except RequestRefused:
        return False
    return True


def most(logprobs: int | None) -> int:
    """The largest answer that passes, found by asking."""
    low, high = 1, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle, logprobs) else (low, middle)
    return low


@pytest.mark.parametrize("logprobs", [None, 0, 20])
def test_the_largest_answer_that_passes_can_be_read(logprobs: int | None) -> None:
    tokens = most(logprobs)
    worst = max(range(300), key=lambda token: len(TOKENIZER.token_bytes(token)))
    text = "".join(TOKENIZER.decode([worst]) for _ in range(tokens))
    entry = m.TokenLogprob(
        token=2**31 - 1,
        logprob=-math.inf,
        top=[m.TopLogprob(token=2**31 - 1, logprob=-1.5)] * (logprobs or 0),
    )
    row = msgspec.structs.replace(
        request_row(1, message="é" * 4096), itl_us=[(1 << 53) - 1] * MAX_ITL, tag="t" * 64
    )
    done = m.Done(
        rid=1,
        finish="length",
        row=row,
        text=text,
        ids=[2**31 - 1] * tokens,
        logprobs=None if logprobs is None else [entry] * tokens,
        stop_reason="é" * 256,
        message="é" * 4096,
    )
    body = codec.encode(done)
    assert isinstance(codec.decode_reply([body]), m.Done)
    if logprobs == 20:
        assert len(body) > codec.MAX_ENGINE_BYTES / 2, "the bound is not far off what fits"


def test_what_may_not_fit_is_refused_with_advice() -> None:
    tokens = most(None)
    with pytest.raises(
        RequestRefused, match=rf"{tokens + 1} tokens may not fit.*holds {tokens} .*streamed"
    ) as refused:
        check_whole(request(tokens + 1), TOKENIZER)
    assert refused.value.code == "invalid"


def test_the_bound_on_text_is_that_of_the_protocol() -> None:
    row = request_row(1)
    fits, large = (
        codec.encode(m.Done(rid=1, finish="length", row=row, text="x" * (door.MAX_WHOLE_CHARS + more)))
        for more in (0, 1)
    )
    codec.decode_reply([fits])
    with pytest.raises(codec.BadMessage):
        codec.decode_reply([large])
