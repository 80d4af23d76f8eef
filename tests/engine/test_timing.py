"""Time on a device, with a stand-in for a GPU's streams and events."""

from __future__ import annotations

import pytest
import torch

from engine.timing import Part, PartTimer, Timer

CARD = torch.device("cuda", 1)


class Event:
    """Remembers where it was put; events lie a second apart."""

    made: list[Event]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: object = None
        self.at_ms = 0.0
        self.made.append(self)

    def record(self, stream: object) -> None:
        self.stream, self.at_ms = stream, 1e3 * sum(event.stream is not None for event in self.made)

    def synchronize(self) -> None:
        assert self.stream is not None

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")


def test_a_span_is_taken_on_the_card_that_computes() -> None:
    """Not on the thread's current one, which is the first: there it would be next to nothing."""
    timer = Timer(CARD)
    timer.start()
    timer.stop()
    assert timer.elapsed_s() == 1.0
    assert {event.stream for event in Event.made} == {"stream of cuda:1"}


def test_parts_are_taken_on_the_card_that_computes() -> None:
    timer = PartTimer(CARD)
    mark = timer.begin()
    for part in (Part.ATTENTION, Part.LINEAR, Part.ATTENTION, Part.HEAD):
        mark(part)
    assert [timer.seconds(part) for part in Part] == [0.0, 2.0, 1.0, 1.0]
    assert {event.stream for event in Event.made} == {"stream of cuda:1"}
