"""The engine core: requests in, steps, events out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.knob_store import KnobStore, Proposal
from engine.request import Request
from ipc.messages import (
    ApplyEvent,
    DeviceInfo,
    Done,
    EngineState,
    ErrorCode,
    KnobValue,
    RequestRow,
    StepRow,
    Tokens,
)

if TYPE_CHECKING:
    from engine.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class BlockView:
    """A copy of the block map taken between two steps: state u8, fill u16 and owner u32, one a block."""

    t_ns: int
    block_size: int
    state: NDArray[np.uint8]
    fill: NDArray[np.uint16]
    owner: NDArray[np.uint32]


# Stream items carry rid only; whoever submitted keeps rid -> client. Log lines go through `logging`.
Event = Tokens | Done | StepRow | RequestRow | ApplyEvent | EngineState | BlockView


class RequestRefused(Exception):
    """A request that was refused at the door: nothing was queued and no event will follow."""

    def __init__(self, code: ErrorCode, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.retry_after_ms = retry_after_ms


class EngineCore:
    """One model, one scheduler, one step thread. ``sink`` gets each step's events on the step thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        knobs: KnobStore,
        sink: Callable[[list[Event]], None],
        *,
        device_info: DeviceInfo | None = None,
        clock_ns: Callable[[], int] | None = None,
    ) -> None: ...

    # --- any thread ---

    def new_rid(self) -> int:
        """A fresh request id."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Queue a request. RequestRefused with a code and both numbers if it can never run, or the queue is full."""

    def cancel(self, rids: Iterable[int], why: str = "cancelled") -> None:
        """End requests. Unknown or finished ids are ignored; each live one gets its Done."""

    def propose(self, patch: Mapping[str, KnobValue], expect_rev: int, *, dry_run: bool = False) -> Proposal:
        """Validate a patch and queue it for the gap between two steps. PatchRefused if it is not taken.

        Its end is an ApplyEvent with the proposal's ``apply_id``.
        """
        raise NotImplementedError

    def state(self) -> EngineState:
        """Phase ready, applying, stalled or failed; counts, pool size and model."""
        raise NotImplementedError

    @property
    def step_count(self) -> int:
        raise NotImplementedError

    @property
    def last_step_ns(self) -> int:
        """When the last step (or idle look) ended, engine clock: its age shows a loop that hangs."""
        raise NotImplementedError

    # --- step thread ---

    def step(self) -> bool:
        """One synchronous step. True if anything was done."""
        raise NotImplementedError

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set, asleep while idle; then end what is live as cancelled. `wake` after setting it."""

    def wake(self) -> None:
        """Make a sleeping loop look again."""
