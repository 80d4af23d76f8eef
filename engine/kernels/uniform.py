"""The random numbers of `engine.draw.uniform` inside kernels, bit for bit.

They depend on a request's seed and the position of the token alone, so neither the other rows of a batch nor
the shape of a launch can change them, and a seed means the same wherever tokens are chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position, DRAW: tl.constexpr):
    """One float64 in [0, 1). seed, position: integers of 64 bits. DRAW numbers the streams of a pair."""
    low, high = position.to(tl.uint32), (position.to(tl.uint64) >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, low, high, zero + DRAW, zero)
    bits = ((second.to(tl.uint64) << 32) | first) >> 11
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)
