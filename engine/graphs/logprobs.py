"""Log-probabilities made beside the choice of tokens on the device, and how they come to the host.

All rows of a shape get the most that any may ask for, so that one graph serves whoever asks for fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.penalties import SampledRequest
from engine.sampling import Top, who_asks
from ipc.messages import MAX_LOGPROBS


class TopWords:
    """Views of int64 words: log-probabilities of the chosen tokens and of the most likely ones.

    chosen: float32 [places]. values: float32 [places, MAX_LOGPROBS], ids: int32 of the same shape; of a
    vocabulary of fewer tokens the last columns are not used.
    """

    def __init__(self, words: Tensor, places: int) -> None:
        many = places * MAX_LOGPROBS
        held = words.view(torch.int32)[: places + 2 * many]
        chosen, values, ids = torch.split(held, [places, many, many])
        self.chosen = chosen.view(torch.float32)
        self.values = values.view(torch.float32).view(places, MAX_LOGPROBS)
        self.ids = ids.view(places, MAX_LOGPROBS)

    @staticmethod
    def size(places: int) -> int:
        """Words that it takes."""
        return (places * (2 * MAX_LOGPROBS + 1) + 1) // 2

    def write(self, logits: Tensor, chosen: Tensor) -> None:
        """Of logits [places, vocab_size], and of chosen ids [places], -1 where there is none.

        Launches only what depends on the shape.
        """
        total = logits.logsumexp(dim=-1, keepdim=True)
        values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
        self.chosen.copy_((logits.gather(1, chosen.clamp(min=0).unsqueeze(1)) - total).squeeze(1))
        self.values[:, : values.shape[1]].copy_(values - total)
        self.ids[:, : ids.shape[1]].copy_(ids)

    def of(self, requests: Sequence[SampledRequest], vocab_size: int) -> Top | None:
        """What is told, on the host, of the first places, place i being one of requests[i]."""
        rows, counts = who_asks(requests, vocab_size)
        return Top(rows, counts, self.chosen[rows], self.values[rows], self.ids[rows]) if rows else None
