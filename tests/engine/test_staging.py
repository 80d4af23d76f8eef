"""Arrays of a step that go to the device together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.base import Ints
from engine.staging import OneCopy


@pytest.mark.parametrize("later", [0, 1, 2])
def test_arrays_go_with_the_first_one_that_is_sent(later: int) -> None:
    """Whether attention sends none, one, or more: each comes as it was, and no copy is made beside them."""
    copies: list[Ints] = []

    def to_device(array: Ints) -> torch.Tensor:
        copies.append(array)
        return torch.from_numpy(array.copy())

    arrays = [np.arange(5), np.array([7]), np.arange(20, 23)]
    send = OneCopy(arrays, to_device)
    tables = [np.arange(6).reshape(2, 3) + i for i in range(later)]
    got = [send(table) for table in tables]
    assert [each.tolist() for each in got] == [table.tolist() for table in tables]
    assert [each.tolist() for each in send.taken()] == [array.tolist() for array in arrays]
    assert len(copies) == max(1, later)
    assert all(each.is_contiguous() for each in got)
