"""Arrays of a step that go to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints, ToDevice


class OneCopy:
    """Takes arrays of one dimension along with the first one that is sent, as an attention plan does it."""

    def __init__(self, arrays: Sequence[Ints], to_device: ToDevice) -> None:
        self._arrays = arrays
        self._to_device = to_device
        self._sent: list[Tensor] | None = None

    def __call__(self, array: Ints) -> Tensor:
        """An array on the device, of whatever shape."""
        if self._sent is not None:
            return self._to_device(array)
        whole = self._to_device(np.concatenate([*self._arrays, array.reshape(-1)]))
        *self._sent, last = torch.split(whole, [*map(len, self._arrays), array.size])
        return last.view(array.shape)

    def taken(self) -> list[Tensor]:
        """The arrays on the device. They are sent now if nothing else was."""
        if self._sent is None:
            self(np.empty(0, dtype=np.int64))
        assert self._sent is not None
        return self._sent
