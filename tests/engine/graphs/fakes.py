"""A driver that replays by running again, and parts of a decoder that can be captured without a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import AttentionPlan, Rows, paged
from engine.attention.base import AttentionBackend, Ints, Needs, ToDevice
from engine.attention.naive import NaiveAttention
from engine.draw import U64s, inverse_cdf, uniform
from engine.graphs import driver as edge
from engine.graphs import switch
from engine.graphs.choosing import CHOICE_WORDS
from engine.graphs.driver import Arrival
from engine.kv_cache import KVCache
from engine.layers.rope import RotaryTable, rotate_
from engine.models.spec import ModelSpec
from engine.ops import choice
from engine.ops.base import AddNorm, Gate, Ops, StoreQKV, StoreStep
from engine.ops.plain import PLAIN, TorchAddNorm, TorchGate
from engine.penalties import Occurrences, penalize
from engine.sampling import GREEDY_BELOW
from ipc.messages import Sampling, TokenLogprob

GRAPH_BYTES = 1 << 20


@dataclass
class Graph:
    """Replays by running the body again, over the same static memory."""

    body: Callable[[], None]
    driver: FakeDriver
    nbytes: int = GRAPH_BYTES

    def replay(self) -> None:
        self.driver.launch(self.body)


@dataclass
class _Arrival:
    driver: FakeDriver
    there: threading.Event

    def wait(self) -> None:
        self.driver.drain(self.there)
        self.driver.await_more(-1)
        assert self.there.is_set(), "what was waited for was never launched"


class FakeDriver:
    """At the driver's edge: runs a body twice where a GPU would run and then capture it.

    A lazy one only queues what is launched, and does it when somebody waits for it: so whoever changes
    something too early, or reads it too early, is found out.
    """

    def __init__(self, *, fails: RuntimeError | None = None, lazy: bool = False) -> None:
        self.captures = self.tried = 0
        self.fails = fails
        self.lazy = lazy
        self.awaited = self.most_awaited = 0  # fetched, and not waited for: now, and at most
        self._queue: deque[Callable[[], object]] = deque()
        self._lock, self._counting = threading.RLock(), threading.Lock()

    def host(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int64)

    def send(self, host: Tensor, device: Tensor) -> None:
        self.launch(lambda: device.copy_(host))

    def fetch(self, device: Tensor, host: Tensor) -> Arrival:
        there = threading.Event()
        self.await_more(1)
        self.launch(lambda: host.copy_(device))
        self.launch(there.set)
        return _Arrival(self, there)

    def launch(self, act: Callable[[], object]) -> None:
        """Do something after all that was launched before."""
        self._queue.append(act)
        if not self.lazy:
            self.drain()

    def run(self, body: Callable[[], None]) -> None:
        self.launch(body)

    def await_more(self, count: int) -> None:
        """So many copies to the host more are under way."""
        with self._counting:
            self.awaited += count
            self.most_awaited = max(self.most_awaited, self.awaited)

    @property
    def pending(self) -> int:
        """How much of what was launched is not done yet."""
        return len(self._queue)

    def drain(self, there: threading.Event | None = None) -> None:
        """Do what was launched, as far as ``there``."""
        with self._lock, torch.inference_mode():
            while self._queue and not (there is not None and there.is_set()):
                self._queue.popleft()()

    def capture(self, body: Callable[[], None]) -> Graph:
        self.tried += 1
        self.drain()
        body()
        if self.fails is not None:
            raise self.fails
        body()
        self.captures += 1
        return Graph(body, self)


class FakeLane:
    """Copies of blocks, at the driver's edge: behind what was launched, and ahead of what will be."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def submit(self, task: Callable[[], None]) -> None:
        if self._driver.pending:
            self._driver.launch(task)
        else:  # what follows may be computed without the driver being asked
            task()

    def host(self, task: Callable[[], None]) -> None:
        self._driver.drain()
        task()

    def mark(self) -> None:
        pass

    def fence(self) -> None:
        pass


class StaticAttention(NaiveAttention):
    """Naive attention over the rows whose number lies on the device, as a kernel reads them there."""

    name = "paged"

    def __init__(self) -> None:
        self.packed: list[Rows] = []

    def pack(self, rows: Rows, count: int, width: int) -> Ints:
        assert rows.tables.shape[0] <= count
        assert rows.tables.shape[1] <= width
        self.packed.append(rows)
        return np.array([len(self.packed)])

    def move(self, words: Tensor, by: Tensor) -> None:
        number = int(words[0])
        if number == 0:  # captured while nobody is there
            assert not by.any()
            return
        rows = self.packed[number - 1]
        moved = rows.num_computed + by[: len(rows.num_computed)].numpy()
        self.packed.append(replace(rows, num_computed=moved))
        words[0] = len(self.packed)

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        number = to_device(rows.starts[:1])
        if number.data_ptr() == rows.starts.ctypes.data:  # nothing is captured
            return super().plan(rows, kv, spec, to_device)
        return _StaticPlan(self, kv, spec, number, Needs(new=False))


@dataclass
class _StaticPlan:
    """A plan over static memory: what is in there when it runs counts."""

    attention: StaticAttention
    kv: KVCache
    spec: ModelSpec
    number: Tensor
    needs: Needs

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        number = int(self.number[0])
        if number == 0:  # captured while nobody is there
            return torch.zeros_like(q).flatten(1)
        rows = self.attention.packed[number - 1]
        plan = NaiveAttention().plan(rows, self.kv, self.spec, torch.from_numpy)
        return plan.attend(layer, q, k, v)


class PaddedStore:
    """Torch's way, but for tokens without a slot, which are written nowhere."""

    name = "padded"

    def begin(
        self,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        needs: Needs,
        dtype: torch.dtype,
    ) -> StoreStep:
        def store(
            layer: int, qkv: Tensor, head_norm: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            kv_heads = kv.k[layer].shape[1]
            assert head_norm is None
            rotate_(qkv[:, :-kv_heads], *rotary.at(positions, dtype))
            there = slots >= 0
            kv.store(layer, slots[there], qkv[there])
            return qkv[:, : -2 * kv_heads], None, None

        return store


CAPTURABLE = Ops(PLAIN.norm, PaddedStore(), PLAIN.gate)


class GreedySampling:
    """Chooses the largest score of each row, as kernels do for greedy requests."""

    name = "greedy"

    def choose(self, scores: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s) -> Tensor:
        ids = torch.empty(len(scores), dtype=torch.int64)
        self.choose_packed(scores, ids, ids)
        return ids

    def pack(self, settings: Sequence[Sampling], seeds: U64s, positions: U64s, rows: int) -> Ints:
        assert all(each.temperature == 0.0 for each in settings)
        return np.zeros((CHOICE_WORDS, rows), dtype=np.int64)

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        best, at = scores.max(dim=1)
        ids.copy_(at.where(best.isfinite(), -1))

    def penalize(self, scores: Tensor, found: Occurrences) -> None:
        raise NotImplementedError

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        raise NotImplementedError

    def probabilities(self, scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
        raise NotImplementedError

    def reject(
        self,
        target: Tensor,
        proposal: Tensor,
        tokens: Sequence[int],
        lengths: Sequence[int],
        finite: Tensor,
        seeds: U64s,
        positions: U64s,
    ) -> tuple[list[int], list[int]]:
        raise NotImplementedError

    def probabilities_packed(self, scores: Tensor, packed: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def reject_packed(
        self,
        target: Tensor,
        proposal: Tensor,
        tokens: Tensor,
        cu: Tensor,
        finite: Tensor,
        seeds: Tensor,
        positions: Tensor,
        accepted: Tensor,
        own: Tensor,
    ) -> None:
        raise NotImplementedError


class TorchSampling(GreedySampling):
    """Draws by temperature and penalizes, as kernels do, in far less time than their interpreter takes."""

    name = "torch"

    def choose(self, scores: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s) -> Tensor:
        ids = torch.empty(len(scores), dtype=torch.int64)
        packed = self.pack(settings, seeds, positions, len(settings))
        self.choose_packed(scores, torch.from_numpy(packed), ids)
        return ids

    def pack(self, settings: Sequence[Sampling], seeds: U64s, positions: U64s, rows: int) -> Ints:
        assert all(each.top_k == 0 and each.top_p == 1.0 and each.min_p == 0.0 for each in settings)
        words = np.zeros((CHOICE_WORDS, rows), dtype=np.int64)
        count = len(settings)
        words[0, :count], words[1, :count] = seeds.view(np.int64), positions.view(np.int64)
        words[2, :count] = np.array([each.temperature for each in settings]).view(np.int64)
        return words

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        best, at = scores.max(dim=1)
        temperature = packed[2].contiguous().view(torch.float64)
        seeds, positions = (each.numpy().view(np.uint64) for each in packed[:2])
        flat = (scores.nan_to_num().double() / temperature.clamp(min=GREEDY_BELOW).unsqueeze(1)).softmax(-1)
        drawn = inverse_cdf(flat, torch.from_numpy(uniform(seeds, positions)))
        ids.copy_(torch.where(temperature < GREEDY_BELOW, at, drawn).where(best.isfinite(), -1))

    def penalize(self, scores: Tensor, found: Occurrences) -> None:
        penalize(scores, found)

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        sizes = cu.diff().long()
        row_of, used = torch.arange(len(scores)).repeat_interleave(sizes), int(cu[-1])
        there = tokens[:used] >= 0
        row_of, token_of, count = row_of[there], tokens[:used][there].long(), counts[:used][there].float()
        repetition, presence, frequency = each[:, row_of]
        values = scores[row_of, token_of]
        values = torch.where(values > 0, values / repetition, values * repetition)
        off = frequency * count + torch.where(count > 0, presence, 0.0)
        scores[row_of, token_of] = values - off


class Kernels:
    """Where attention and fused parts come from on a device that has any."""

    NAME = "captured"

    def probe(self, *_: object) -> str | None:
        return None

    def make(self, device: torch.device) -> AttentionBackend:
        return StaticAttention()

    def add_norm(self) -> AddNorm:
        return _Norm()

    def store_qkv(self) -> StoreQKV:
        return PaddedStore()

    def gate(self) -> Gate:
        return _Gate()


class _Norm(TorchAddNorm):
    name = "captured"


class _Gate(TorchGate):
    name = "captured"


def put_kernels(patch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    """Let knobs do what they do on a GPU: what takes the place of kernels are references that can be captured
    and of the driver only what a GPU does is faked.
    """
    kernels = Kernels()
    patch.setattr(paged, "source", lambda device: kernels)
    patch.setattr(choice, "sources", lambda device: (kernels,))
    patch.setattr(choice, "probe_sampling", lambda device: None)
    patch.setattr(choice, "samples_by_triton", lambda device: True)
    patch.setattr(choice, "TritonSampling", TorchSampling)
    for module in (edge, switch):
        patch.setattr(module, "probe", lambda device: None)
    patch.setattr(switch, "make_driver", lambda device: driver)


def agree(
    found: Sequence[TokenLogprob | None], wanted: Sequence[TokenLogprob | None], within: float = 1e-5
) -> None:
    """The same tokens, in this order, with the same numbers but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token == other.token
            assert [each.token for each in one.top] == [each.token for each in other.top]
            numbers = [[each.logprob, *(top.logprob for top in each.top)] for each in (one, other)]
            assert numbers[0] == pytest.approx(numbers[1], abs=within)
