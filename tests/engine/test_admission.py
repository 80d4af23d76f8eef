"""Whom a waiting request may displace: nobody, if what it shares leaves it room enough."""

from __future__ import annotations

import pytest

from tests.engine.drive import Drive, expected_output

PREFIX = list(range(10, 50))  # ten blocks


@pytest.mark.parametrize("allocation", ["paged", "contiguous"])
@pytest.mark.parametrize(("num_blocks", "displaced"), [(20, 0), (12, 1)])
def test_blocks_that_will_be_shared_need_no_room(allocation: str, num_blocks: int, displaced: int) -> None:
    """B04: the prefix of the one that runs counts as there, and does not come free when that one leaves."""
    drive = Drive(num_blocks=num_blocks, policy="priority", priority_ageing_s=100.0, kv_allocation=allocation)
    low = drive.add([*PREFIX, 1, 2], 6, priority=5)
    for _ in range(4):
        drive.step()
    high = drive.add([*PREFIX, 3], 4, priority=0)
    drive.step()
    assert (low.preempt_count, high.cached_tokens) == (displaced, len(PREFIX))
    assert high.first_ns == drive.now_ns
    drive.run()
    assert high.output_ids == expected_output([*PREFIX, 3], 4)
    assert low.output_ids == expected_output([*PREFIX, 1, 2], 6)
