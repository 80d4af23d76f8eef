"""The knob values of a running engine, their revision, and the one change that may be on its way."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from engine.knob import KnobContext
from engine.knobs import BY_ID, KNOBS
from ipc.messages import CANCELLED, ApplyMode, ErrorCode, KnobInfo, KnobValue

APPLY_ORDER: tuple[ApplyMode, ...] = ("step", "rebuild_kv", "reload", "restart")


class PatchRefused(Exception):
    """A patch that was not taken, whole. ``keys`` gives one reason for each refused knob."""

    def __init__(self, code: ErrorCode, message: str, keys: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.keys: dict[str, str] = dict(keys or {})


class ChangeCancelled(RuntimeError):
    """A client does not want the change any more that is being made."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A validated patch on its way to the step thread. ``changed`` leaves out what is so already."""

    apply_id: int
    from_rev: int
    changed: Mapping[str, KnobValue]
    mode: ApplyMode


class KnobStore:
    """The knob values of one engine, their revision, and at most one change on its way.

    Thread-safe. ``values`` is never changed in place: a commit replaces it.
    """

    def __init__(self, context: KnobContext, initial: Mapping[str, KnobValue] | None = None) -> None:
        """Raises PatchRefused if an initial value cannot be taken."""
        self.context = context
        self.values: Mapping[str, KnobValue] = {knob.id: knob.default_in(context) for knob in KNOBS}
        self.rev = 0
        self.pending: Proposal | None = None
        self._lock = threading.Lock()
        self._next_apply_id = 1
        self._cancel_asked = self._cancel_heeded = False  # of the pending change
        refused = self.validate(initial or {})
        if refused:
            raise PatchRefused("invalid", _summary(refused), refused)
        self.values = {**self.values, **self._normal(initial or {})}

    def __getitem__(self, knob_id: str) -> KnobValue:
        return self.values[knob_id]

    def infos(self) -> list[KnobInfo]:
        return [knob.info(self.context) for knob in KNOBS]

    def validate(self, patch: Mapping[str, KnobValue]) -> dict[str, str]:
        """One reason for each key that cannot be taken; empty if the whole patch can."""
        refused: dict[str, str] = {}
        for key, value in patch.items():
            knob = BY_ID.get(key)
            if knob is None:
                refused[key] = f"there is no knob {key!r}"
            elif knob.unavailable(self.context) and value == knob.default_in(self.context):
                continue  # saying that what is not there stays off changes nothing
            elif why := knob.why_not(value, self.context):
                refused[key] = why
        return refused or self._conflicts(patch)

    def propose(self, patch: Mapping[str, KnobValue], expect_rev: int, *, dry_run: bool = False) -> Proposal:
        """Reserve a change. Raises PatchRefused: conflict, busy (one is on its way) or invalid."""
        with self._lock:
            if expect_rev != self.rev:
                raise PatchRefused(
                    "conflict",
                    f"expect_rev is {expect_rev} but the configuration is at {self.rev}; read it again",
                )
            if self.pending is not None and not dry_run:
                raise PatchRefused(
                    "busy", f"change {self.pending.apply_id} is still being applied; try again"
                )
            refused = self.validate(patch)
            if refused:
                raise PatchRefused("invalid", _summary(refused), refused)
            changed = {k: v for k, v in self._normal(patch).items() if v != self.values[k]}
            modes = {BY_ID[key].apply for key in changed} or {"step"}
            mode = max(modes, key=APPLY_ORDER.index)
            proposal = Proposal(0 if dry_run else self._next_apply_id, self.rev, changed, mode)
            if not dry_run:
                self._next_apply_id += 1
                self.pending = proposal
                self._cancel_asked = self._cancel_heeded = False
            return proposal

    def cancel(self, apply_id: int) -> bool:
        """Have a change given up that is on its way; False if it is not. Any thread."""
        with self._lock:
            if self.pending is None or self.pending.apply_id != apply_id:
                return False
            self._cancel_asked = True
            return True

    def heed_cancel(self) -> None:
        """Raise `ChangeCancelled` if the pending change is to be given up. Once: the way back has to be gone.

        Call it where what was done of the change until then can be undone.
        """
        with self._lock:
            if not self._cancel_asked or self._cancel_heeded:
                return
            self._cancel_heeded = True
        raise ChangeCancelled(CANCELLED)

    def commit(self, proposal: Proposal) -> int:
        """Make the proposed values current and return the new revision."""
        with self._lock:
            self.values = {**self.values, **proposal.changed}
            self.rev += 1
            self.pending = None
            return self.rev

    def abandon(self) -> None:
        """Drop the proposed change; values and revision stay."""
        with self._lock:
            self.pending = None

    def _conflicts(self, patch: Mapping[str, KnobValue]) -> dict[str, str]:
        """Why values cannot be had together, told of the knob that asks for the others if it is changed."""
        values = {**self.values, **patch}
        refused: dict[str, str] = {}
        for knob in KNOBS:
            touched = [key for key in (knob.id, *knob.conflicts_with) if key in patch]
            if knob.conflict is not None and touched and (why := knob.conflict(values, self.context)):
                refused |= dict.fromkeys(touched[:1] if touched[0] == knob.id else touched, why)
        return refused

    def _normal(self, patch: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        return {k: float(v) if BY_ID[k].type == "float" and v is not None else v for k, v in patch.items()}


def _summary(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {why}" for key, why in refused.items())[:4000]
