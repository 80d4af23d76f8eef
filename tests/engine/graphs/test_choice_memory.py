"""What choosing tokens on the device takes for a while: what is reserved for it is enough, and not much more.

Beside the fakes at the driver's edge, all that torch allocates meanwhile is counted.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.batch import BatchBuilder
from engine.graphs import counting
from engine.graphs.choosing import GraphChooser
from engine.graphs.direct import choice_bytes
from engine.graphs.memory import Result
from engine.graphs.shapes import GraphShape
from engine.plan import ScheduledRequest
from engine.request import Request
from engine.speculation.verify import DraftSampler
from ipc.messages import Sampling
from tests.engine.driving import CPU
from tests.engine.graphs.fakes import FakeDriver, GreedySampling

Found = pytest.importorskip("engine.kernels.vocabulary", exc_type=ImportError).Found  # which needs triton
VOCAB, ROWS, BLOCK = 3000, 12, 4096
PENALIZED = Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)


class Allocated(TorchDispatchMode):
    """Bytes of tensors that operations gave while this was on, and that somebody holds: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if _is_tensor(each) and each.untyped_storage()._cdata not in inside | self._known:
                self._note(each.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        at, size = storage._cdata, storage.nbytes()
        self._known.add(at)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, at, size)

    def _forget(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.now -= size


def _is_tensor(each: Any) -> bool:
    return isinstance(each, Tensor)


class Driver(FakeDriver):
    """What it has on the host is numpy's, and no memory of a device."""

    def host(self, words: int) -> Tensor:
        return torch.from_numpy(np.zeros(words, dtype=np.int64))


class NoKernels(GreedySampling):
    """Kernels that are launched over what is there, and take the memory of theirs alone."""

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        pass

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        Found.allocate(len(scores), scores.shape[1], scores.device)
        ids.zero_()


@pytest.mark.parametrize("room", [VOCAB, 500])
def test_choosing_tokens_takes_what_is_reserved_for_it(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Every request is penalized for the first time, with lists that are nearly full."""
    monkeypatch.setattr(counting, "MOST_COUNTED", room)
    chooser = GraphChooser(DraftSampler(VOCAB, frozenset(), CPU), NoKernels(), None, CPU)
    rows = []
    for slot in range(ROWS):
        request = Request(slot, list(range(room - 1)), PENALIZED)
        request.slot, request.block_table, request.num_computed = slot, [slot], room - 2
        rows.append(ScheduledRequest(request, 1))
    batch = BatchBuilder(BLOCK, ROWS).build(rows)
    shape, driver = GraphShape(ROWS, 1, "adjusted"), Driver()
    assert chooser.needs_of(batch).in_shape(shape) == (shape, "")
    chooser.counts.reserve()
    words = np.zeros(chooser.num_words(shape), dtype=np.int64)
    chooser.fill(words, shape, batch)
    logits, result = torch.zeros(ROWS, VOCAB), torch.zeros(Result.num_words(shape), dtype=torch.int64)
    held = torch.from_numpy(words)
    with Allocated() as sending:
        chooser.send(driver)
    with Allocated() as choosing:
        chooser.choose(logits, held, shape, Result.of(result, shape), torch.zeros(ROWS, dtype=torch.int64))
    assert (sending.now, choosing.now) == (0, 0), "all of it is for a while"
    # What a step gave back may be in the way of what it takes next: so both count together.
    taken, reserved = sending.most + choosing.most, choice_bytes(ROWS, VOCAB)
    assert taken <= reserved
    assert reserved - Found.bytes_for(ROWS, VOCAB) <= 1.02 * taken
