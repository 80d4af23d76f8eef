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
        return self.settings.deadline_s - (time.perf_counter() - self.settings.began_s)

    def ceilings(self) -> dict[str, Any]:
        """What the device reaches. RuntimeError if what others are a part of was not measured."""
        found = self.results.so_far("ceilings")
        if not {"read_bytes_per_s", "bf16_flops_per_s", "fp8_flops_per_s"} <= set(found):
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
        model, self.model = self.model, None
        if model is not None:
            try:
                model.close()
            except RuntimeError as error:  # of a card that is lost, whose memory goes with the process
                print(f"the model cannot be freed: {error}", flush=True)
        self.free()

    def free(self) -> bool:
        """Give back what nobody holds any more; whether the card still answers."""
        try:
            self.timer.free()
            self.timer.synchronize()
        except RuntimeError as error:
            print(f"the card is lost to this process: {error}", flush=True)
            return False
        return True
