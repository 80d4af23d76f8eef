"""What stages share: the settings, the clock, what was found so far, and the model once it is made."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tests.gpu.check.results import Results
from tests.gpu.check.settings import Settings
from tests.gpu.check.timing import Timer

if TYPE_CHECKING:
    from tests.gpu.check.model import Model


@dataclass
class Context:
    settings: Settings
    results: Results
    device: torch.device
    timer: Timer
    started_s: float = field(default_factory=time.perf_counter)
    model: Model | None = None
    stage: str = ""  # that runs
    stage_began_s: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)  # by that stage, kept if it fails

    def begin(self, **found: Any) -> dict[str, Any]:
        """What a stage puts its figures into as it gets them."""
        self.found = found
        return found

    def keep(self) -> None:
        """Write what the stage has found so far, lest it is lost with the process."""
        took_s = time.perf_counter() - self.stage_began_s
        self.results.put(self.stage, "unfinished", took_s, error="it had not ended", result=self.found)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.settings.deadline_s - (time.perf_counter() - self.started_s)

    def ceilings(self) -> dict[str, Any]:
        """What the device reaches. RuntimeError if that was not measured."""
        found = self.results.of("ceilings")
        if found is None:
            raise RuntimeError(f"there are no ceilings to compare with: {self.results.why_not('ceilings')}")
        return found

    def the_model(self) -> Model:
        """The model with random weights, made when it is first asked for."""
        from tests.gpu.check.model import Model

        if self.model is None:
            self.model = Model(self.settings, self.device)
        return self.model

    def drop_model(self) -> None:
        """Give its memory back."""
        if self.model is not None:
            self.model.close()
        self.model = None
        self.timer.free()
