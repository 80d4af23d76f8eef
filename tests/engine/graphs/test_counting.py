"""Tokens counted on the device: whatever becomes of requests and slots, penalties are those of a recount."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch, BatchBuilder
from engine.graphs import counting
from engine.graphs.counting import TextCounts
from engine.graphs.newest import Newest
from engine.graphs.shapes import GraphShape
from engine.plan import ScheduledRequest
from engine.request import Request
from engine.speculation.base import NO_DRAFT, Draft
from ipc.messages import Sampling
from tests.engine.driving import CPU
from tests.engine.graphs.fakes import FakeDriver, TorchSampling

VOCAB = 23
SLOTS = 4
BLOCK = 512  # one is enough for every text here
PENALTIES = [
    Sampling(repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.2),
    Sampling(),
    Sampling(frequency_penalty=0.9),
]


def recounted(scores: torch.Tensor, request: Request, output: Sequence[int]) -> torch.Tensor:
    """One row of scores, penalized token by token by what the text says."""
    out, s = scores.clone(), request.sampling
    prompt = request.token_ids[: request.num_prompt]
    for token in {*prompt, *output}:
        out[token] = (
            out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        )
    for token, count in Counter(output).items():
        out[token] -= s.presence_penalty + s.frequency_penalty * count
    return out


@dataclass
class Rig:
    """Steps of some requests: what is chosen is put down for the next step, which may be launched at once."""

    rng: random.Random
    newest: Newest = field(default_factory=lambda: Newest(CPU))
    driver: FakeDriver = field(default_factory=lambda: FakeDriver(lazy=True))
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    chosen: dict[int, tuple[int, int]] = field(default_factory=dict)  # rid -> token and slot, not read yet
    rid: int = 0

    def __post_init__(self) -> None:
        self.counts = TextCounts(self.newest, VOCAB, CPU)

    def token(self) -> int:
        return self.rng.randrange(VOCAB)

    def admit(self) -> None:
        """One that comes, or comes back, to whatever slot is free."""
        free = sorted(set(range(SLOTS)) - {request.slot for request in self.running})
        if not free:
            return
        if self.waiting and self.rng.random() < 0.7:
            request = self.waiting.pop()
        else:
            self.rid += 1
            prompt = [self.token() for _ in range(self.rng.randrange(1, 9))]
            request = Request(self.rid, prompt, self.rng.choice(PENALTIES))
        request.slot = self.rng.choice(free)
        request.block_table = [request.slot]
        self.running.append(request)

    def leave(self, preempted: bool) -> None:
        if self.running:
            request = self.running.pop(self.rng.randrange(len(self.running)))
            if preempted:
                self.waiting.append(request)
            else:
                self.chosen.pop(request.rid, None)

    def read(self) -> None:
        """The host learns what was chosen."""
        self.driver.drain()
        for request in [*self.running, *self.waiting]:
            if request.rid in self.chosen:
                request.token_ids.append(self.chosen.pop(request.rid)[0])
                request.num_pending = 0

    def drop(self) -> None:
        """The newest tokens are chosen anew, those among them that were fed to a step which is forgone."""
        self.driver.drain()
        self.chosen.clear()
        for request in [*self.running, *self.waiting]:
            request.num_pending = 0
            if request.num_tokens > request.num_prompt:
                request.token_ids[-1] = self.token()
        self.counts.forget()

    def step(self, *, drafts: bool = False, launches: bool = True) -> None:
        """Penalize some requests' scores on the device, and choose a token for each."""
        requests = [request for request in self.running if self.rng.random() < 0.8]
        if drafts:
            self.read()
        if not requests:
            return
        rows = []
        for request in requests:
            request.num_pending = int(request.rid in self.chosen)
            request.num_computed = request.num_known - 1
            draft = [self.token() for _ in range(self.rng.randrange(3))] if drafts else []
            rows.append(ScheduledRequest(request, 1, draft=Draft(draft) if draft else NO_DRAFT))
        batch = BatchBuilder(BLOCK, SLOTS).build(rows)
        batch.sources = {rid: slot for rid, (_, slot) in self.chosen.items()}
        if not self.counts.has_room(batch):
            self.read()  # as where the host chooses
            return
        shape = GraphShape(SLOTS, 3 if drafts else 1, "adjusted")
        words = np.full(self.counts.num_words(shape), 7 << 32 | 7, dtype=np.int64)  # of another step
        self.counts.fill(words, shape, batch)
        if launches:
            self._launch(batch, words, shape, [requests[i] for i in batch.sampled])

    def _launch(self, batch: Batch, words: np.ndarray, shape: GraphShape, requests: list[Request]) -> None:
        total = sum(len(draft) + 1 for draft in batch.drafts)
        scores = torch.randn(shape.tokens, VOCAB, generator=torch.Generator().manual_seed(self.rid))
        wanted, first, puts = scores.clone(), 0, []
        for request, draft in zip(requests, batch.drafts, strict=True):
            pending = [self.chosen[request.rid][0]] if request.rid in self.chosen else []
            known = request.token_ids[request.num_prompt :] + pending
            for place in range(len(draft) + 1):
                output = known + draft.token_ids[:place]
                wanted[first + place] = recounted(scores[first + place], request, output)
            first += len(draft) + 1
            kept = draft.token_ids[: self.rng.randrange(len(draft) + 1)]
            puts.append((request, kept, self.token()))
        held = torch.from_numpy(words.copy())
        self.counts.send(self.driver)
        self.driver.run(lambda: self.counts.penalize(TorchSampling(), scores, held, shape))
        slots = torch.tensor([request.slot for request in requests])
        ids = torch.tensor([own for _, _, own in puts])
        self.driver.run(lambda: self.newest.put(slots, ids))
        self.counts.launched()
        self.driver.run(lambda: torch.testing.assert_close(scores[:total], wanted[:total]))
        # Of the one before: a step is launched behind another, never behind two.
        for request, kept, own in puts:
            if request.rid in self.chosen:
                request.token_ids.append(self.chosen.pop(request.rid)[0])
            request.token_ids += kept
            self.chosen[request.rid] = own, request.slot


acts = st.sampled_from(
    ["admit", "admit", "step", "step", "step", "drafts", "lost", "preempt", "end", "read", "drop"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(acts, min_size=4, max_size=40), st.integers(0, 1000), st.sampled_from([VOCAB, 15]))
def test_penalties_are_those_of_a_recount(happens: list[str], seed: int, room: int) -> None:
    """A07, A11: with preemptions, other slots and slots of others, drafts that stay in part, steps that were
    written and never launched or launched and dropped, and lists that have no room: each place is penalized
    by its text alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "MOST_COUNTED", room)
        rig = Rig(random.Random(seed))
        for act in happens:
            match act:
                case "admit":
                    rig.admit()
                case "preempt" | "end":
                    rig.leave(act == "preempt")
                case "read":
                    rig.read()
                case "drop":
                    rig.drop()
                case _:
                    rig.step(drafts=act == "drafts", launches=act != "lost")
        rig.driver.drain()


def test_a_list_goes_on_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the property above would say little: it is sent once, and again when its request came back."""
    rig = Rig(random.Random(3))
    request = Request(1, [1, 2], PENALTIES[0])
    request.slot, request.block_table = 2, [2]
    rig.running.append(request)
    monkeypatch.setattr(rig.rng, "random", lambda: 0.0)
    sent = 0
    send = rig.driver.send

    def counted(host: torch.Tensor, device: torch.Tensor) -> None:
        nonlocal sent
        sent += 1
        send(host, device)

    monkeypatch.setattr(rig.driver, "send", counted)
    for _ in range(5):
        rig.step()
    assert sent == 1
    request.slot, request.block_table = 0, [0]
    for _ in range(3):
        rig.step()
    assert sent == 2
    rig.driver.drain()
    tokens, counts = rig.counts.reserve()[:, 0]
    there = tokens >= 0
    output = request.token_ids[2:]
    want = {token: output.count(token) for token in {1, 2, *output}}
    assert dict(zip(tokens[there].tolist(), counts[there].tolist(), strict=True)) == want


class Watched(list[int]):
    """A text that knows how many of its tokens were looked at."""

    looked_at = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked_at += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.looked_at += len(self)
        return super().__iter__()


def test_a_text_is_counted_once_where_it_is_longer_than_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text of few distinct tokens has room, and each step of it looks at what is new to it alone."""
    monkeypatch.setattr(counting, "MOST_COUNTED", 5)
    counts = TextCounts(Newest(CPU), VOCAB, CPU)
    request = Request(1, [1, 2, 3] * 20, PENALTIES[0])
    request.slot, request.block_table = 0, [0]

    def has_room(drafted: int = 0) -> tuple[bool, int]:
        request.num_computed = request.num_known - 1
        draft = Draft([7] * drafted) if drafted else NO_DRAFT
        batch = BatchBuilder(BLOCK, SLOTS).build([ScheduledRequest(request, 1, draft=draft)])
        text = request.token_ids = Watched(request.token_ids)
        return counts.has_room(batch), text.looked_at

    assert has_room() == (True, 60)
    assert has_room() == (True, 0)
    request.token_ids += [4, 4]
    assert has_room() == (True, 2)
    request.num_pending = 1  # may be a fifth
    assert has_room() == (True, 0)
    request.num_pending = 0
    assert has_room(drafted=2) == (False, 0)
    request.token_ids += [5, 6]
    assert has_room() == (False, 2)
    assert has_room() == (False, 0)
    other = Request(2, [1, 2] * 20, PENALTIES[0])
    other.slot, other.block_table = 0, [0]
    request = other
    assert has_room() == (True, 40)
