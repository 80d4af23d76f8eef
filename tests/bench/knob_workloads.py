"""A workload for each knob, made so that the knob should matter.

Prompts are random token ids, drawn anew for each pair, so that nothing is left in a cache from the pair
before; the two arms of a pair get the same ids. What arms must not share is parted by the cache salt. Sizes
are chosen so that a run takes a few seconds with a model of a hundred million weights on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ipc.messages import Sampling
from tests.bench.knob_run import Send, Setup, Waves
from tests.bench.workloads import english_text

FIRST_ID = 32  # ids below are special ones in most vocabularies

Workload = Callable[["Draw"], Waves]


class Draw:
    """Everything random of one pair, from its seed."""

    def __init__(self, seed: str, setup: Setup) -> None:
        self.random = random.Random(seed)
        self.setup = setup

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(FIRST_ID, self.setup.vocab_size) for _ in range(count)]

    def text(self, chars: int) -> str:
        """A stretch of English text that begins anywhere."""
        whole = english_text()
        start = self.random.randrange(len(whole) - chars)
        return whole[start : start + chars]


def batch(count: int, prompt: int, out: int) -> Workload:
    """``count`` requests at once, all of one size."""
    return lambda draw: [[Send(prompt=draw.ids(prompt), out=out) for _ in range(count)]]


def drawn_batch(count: int, prompt: int, out: int, temperature: float, top_p: float) -> Workload:
    """``count`` requests at once, all of one size, whose tokens are drawn from the nucleus of ``top_p``."""

    def waves(draw: Draw) -> Waves:
        drawn = Sampling(temperature=temperature, top_p=top_p)
        return [[Send(prompt=draw.ids(prompt), out=out, sampling=drawn) for _ in range(count)]]

    return waves


def mixed_lengths(draw: Draw) -> Waves:
    """24 requests at once whose answers differ in length by a factor of sixteen."""
    outs = [4, 8, 12, 16, 32, 64] * 4
    draw.random.shuffle(outs)
    return [[Send(prompt=draw.ids(32), out=out) for out in outs]]


def trickle(draw: Draw) -> Waves:
    """16 short requests that come one by one, a quarter of a second apart."""
    return [[Send(prompt=draw.ids(32), out=4, at_s=0.25 * i) for i in range(16)]]


def streams_and_prompts(prompts: int, length: int, every: int) -> Workload:
    """Four answers are being read while long prompts come in, one each ``every`` tokens."""

    def waves(draw: Draw) -> Waves:
        streams = [Send(prompt=draw.ids(32), out=48, kind="streams") for _ in range(4)]
        longs = [
            Send(prompt=draw.ids(length), out=2, kind="prompts", after=16 + every * i) for i in range(prompts)
        ]
        return [[*streams, *longs]]

    return waves


def urgent_among_low(draw: Draw) -> Waves:
    """Twelve requests of low priority take all seats and wait; three urgent ones come."""
    low = [Send(prompt=draw.ids(64), out=32, kind="low", priority=10) for _ in range(12)]
    urgent = [Send(prompt=draw.ids(32), out=4, kind="urgent", priority=-10, after=24 * i) for i in (1, 2, 3)]
    return [[*low, *urgent]]


def displaced_contexts(draw: Draw) -> Waves:
    """Two long contexts hold the pool; each time they have got on, an urgent request takes a place."""
    low = [Send(prompt=draw.ids(768), out=40, kind="low", priority=10) for _ in range(2)]
    urgent = [
        Send(prompt=draw.ids(16), out=2, kind="urgent", priority=-10, after=12 * i) for i in range(1, 7)
    ]
    return [[*low, *urgent]]


def shared_prefix(draw: Draw) -> Waves:
    """Ten requests at once that begin with the same 384 tokens."""
    shared = draw.ids(384)
    return [[Send(prompt=shared + draw.ids(32), out=8) for _ in range(10)]]


def given_up_early(draw: Draw) -> Waves:
    """20 requests that may take 256 tokens and are stopped by their reader after 16."""
    return [[Send(prompt=draw.ids(48), out=256, cancel_after=16) for _ in range(20)]]


def short_prefix(draw: Draw) -> Waves:
    """12 requests that share 112 tokens, less than the larger block holds, and decode long contexts."""
    shared = draw.ids(112)
    return [[Send(prompt=shared + draw.ids(72), out=32) for _ in range(12)]]


def revisited_prefixes(draw: Draw) -> Waves:
    """Six prefixes of 384 tokens, more than the pool holds, each visited in turn and then again."""
    prefixes = [draw.ids(384) for _ in range(6)]
    return [
        [Send(prompt=prefix + draw.ids(16), out=2, kind=kind) for prefix in prefixes]
        for kind in ("first visits", "revisits")
    ]


def long_texts(draw: Draw) -> Waves:
    """A burst of 48 texts of 6,000 characters that differ only at their end, so that most is in the cache."""
    shared = draw.text(min(6000, draw.setup.max_model_len - 64))  # a token is at least a character
    return [
        [Send(prompt=shared, out=1, kind="first")],
        [Send(prompt=shared + draw.text(40), out=1, kind="burst") for _ in range(48)],
    ]


def repeated_prompts(draw: Draw) -> Waves:
    """Six prompts, and twice more the same six."""
    prompts = [draw.ids(64) for _ in range(6)]
    return [
        [Send(prompt=prompt, out=24, kind=kind) for prompt in prompts]
        for kind in ("first", "repeats", "repeats")
    ]


def copied_texts(draw: Draw) -> Waves:
    """One after the other, four texts that stand there twice already and are copied once more."""
    waves = []
    for _ in range(4):
        text = draw.text(360)
        waves.append([Send(prompt=text * 2 + text[:40], out=48)])
    return waves


def free_prose(draw: Draw) -> Waves:
    """One after the other, four texts that are gone on with freely."""
    return [[Send(prompt=draw.text(360), out=64)] for _ in range(4)]


def long_streams(draw: Draw) -> Waves:
    """16 requests that decode for long and end at different times; for a load that goes on and on."""
    return [[Send(prompt=draw.ids(32), out=draw.random.randrange(96, 161)) for _ in range(16)]]
