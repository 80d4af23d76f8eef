"""A step on its way through the pipeline, with what is known of it until then."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.flight import Flight
from engine.forward_worker import Outcome
from engine.metrics import StepClock
from engine.plan import StepPlan
from engine.step import Prepared


@dataclass(slots=True)
class Step:
    """One step. ``prepared`` is None where nothing is scheduled or ``error`` says why it could not be."""

    plan: StepPlan
    clock: StepClock
    prepared: Prepared | None = None
    error: Exception | None = None
    number: int = 0
    has_copies: bool = False
    outcome: Outcome | None = None  # of a step that was computed on the step thread
    flight: Flight | None = None  # of a step that was launched with the choice of its tokens
    entries: list[int] | None = None  # of what was launched that still count, None: all
    freed_slots: list[int] = field(default_factory=list)
