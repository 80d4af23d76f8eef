"""The random numbers of `engine.draw.uniform` inside kernels, bit for bit.

They depend on a request's seed and the position of the token alone, so neither the other rows of a batch nor
the shape of a launch can change them. SplitMix64 has that from its definition, as Philox 4x32-10 has, and its
one key and one counter are what there is, both of 64 bits; the host and other kernels compute it in a few
multiplications, so that a seed means the same wherever tokens are chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(seed, position, DRAW: tl.constexpr):
    """One float64 in [0, 1). seed, position: integers of 64 bits. DRAW numbers the streams of a pair."""
    offset: tl.constexpr = (0x9E3779B97F4A7C15 + DRAW * 0xD1B54A32D192ED03) % (1 << 64)
    state = _mix(seed.to(tl.uint64) + offset)
    bits = _mix(state + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15) >> 11
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)
