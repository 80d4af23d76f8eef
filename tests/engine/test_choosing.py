"""What logits and hidden states that are not finite come to, place by place of a draft."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from engine.batch import BatchBuilder, TextRow
from engine.choosing import fail_nonfinite
from engine.kv_cache import KVCache
from engine.speculation.base import Draft
from engine.step import StepOutput


class Scrubbed:
    """Notes the blocks that are cleaned."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []

    def scrub(self, blocks: list[int]) -> None:
        self.blocks.append(blocks)


@pytest.mark.parametrize(("bad", "fails"), [(0, True), (1, True), (2, False), (3, False)])
def test_only_tokens_that_were_rejected_may_be_other_than_finite(bad: int, fails: bool) -> None:
    """A25: a draft of three tokens behind the newest, of which the first held: what is not finite at a place
    that counts fails the request, behind it the blocks are cleaned and the tokens stay."""
    drafting: Any = TextRow([5, 6, 7], [4, 2], num_new=1, num_computed=2, draft=Draft([8, 9, 10]))
    other: Any = TextRow([5, 6, 7], [1], num_new=1, num_computed=2, rid=1, slot=1)
    batch = BatchBuilder(4, 8).build([drafting, other])
    out = StepOutput([[8, 20], [30]], [[None, None], [None]], [False, False], [1, 0])
    finite = torch.ones(len(batch.ids), dtype=torch.bool)
    first = int(batch.rows.starts[batch.order.index(0)])
    finite[first + bad] = False
    kv = Scrubbed()
    fail_nonfinite(finite, batch, cast(KVCache, kv), out)
    assert kv.blocks == [[4, 2]]
    assert out.nonfinite == [fails, False]
    assert out.token_ids == [[] if fails else [8, 20], [30]]
    assert out.accepted == [0 if fails else 1, 0]
