"""`KnobModel`: for each knob what the engine runs with, what was asked for, and how that ended.

A click never shows as done: it is pending until the engine says that it was applied between two steps, or
refused with the reason. Undo is the inverse patch, sent like any other change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from app.net.types import Batch, OnReply
from ipc.messages import Cfg, Command, KnobInfo, KnobValue

Patch = dict[str, KnobValue]
Send = Callable[[Command, OnReply], int]


class KnobStatus(StrEnum):
    APPLIED = "applied"
    PENDING = "pending"
    REFUSED = "refused"  # the last change was refused or rolled back; `reason` says why


@dataclass(frozen=True, slots=True)
class KnobView:
    """One knob as the panel draws it."""

    info: KnobInfo
    applied: KnobValue
    desired: KnobValue  # what the switch shows: the applied value once nothing is pending
    status: KnobStatus
    reason: str = ""
    took_s: float | None = None  # of its last change
    preempted: int | None = None


class KnobModel:
    """All methods belong to one thread, the one that drains the link."""

    def __init__(self, send: Send) -> None:
        """``send(command, on_reply)`` is `EngineLink.send`."""
        self.rev: int | None = None  # the engine's configuration revision
        self.version = 0  # grows with every change a view could show

    def load(self, cfg: Cfg) -> None:
        raise NotImplementedError

    def ingest(self, batch: Batch) -> None:
        """Take in configuration and apply events; call after `EngineLink.drain`."""
        raise NotImplementedError

    def views(self) -> list[KnobView]:
        raise NotImplementedError

    def view(self, knob: str) -> KnobView:
        raise NotImplementedError

    def values(self) -> Patch:
        """All applied values."""
        raise NotImplementedError

    def set(self, patch: Patch) -> None:
        """Ask for a change of one or several knobs, whole or not at all."""
        raise NotImplementedError

    def restore(self, values: Patch) -> Patch:
        """Ask for a stored configuration; returns what differs and was asked for."""
        raise NotImplementedError

    def undo(self) -> Patch | None:
        """Ask for the inverse of the last applied change of this console; None if there is none."""
        raise NotImplementedError

    def redo(self) -> Patch | None:
        raise NotImplementedError

    @property
    def can_undo(self) -> bool:
        raise NotImplementedError

    @property
    def can_redo(self) -> bool:
        raise NotImplementedError
