"""`KnobModel`: for each knob what the engine runs with, what was asked for, and how that ended.

A click never shows as done: it is pending until the engine says that it was applied between two steps, or
refused with the reason. Undo is the inverse patch, sent like any other change. If somebody else changed
the configuration in between, the change is sent again with the new revision as long as the knobs it names
still have the values the person saw; otherwise it is refused and says what they are now. While the engine
is applying another client's change, it waits for that and goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from app.net.types import Batch, LinkState, OnReply
from ipc.messages import (
    CANCELLED,
    ApplyEvent,
    Cfg,
    CfgAccepted,
    CfgGet,
    CfgSet,
    Command,
    Error,
    KnobInfo,
    KnobValue,
    Reply,
)

Patch = dict[str, KnobValue]
MAX_RETRIES = 3
BUSY_AGAIN_S, BUSY_AT_MOST_S = 0.5, 60.0
_UNDO_DEPTH = 100
_ENDED = (LinkState.DEAD, LinkState.OFFLINE)


class Send(Protocol):
    """`EngineLink.send`, as far as it is needed here."""

    def __call__(self, command: Command, on_reply: OnReply | None = None, /) -> object: ...


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


Origin = Literal["user", "undo", "redo"]


@dataclass(slots=True, eq=False)
class _Change:
    """One patch on its way. ``seen`` holds the values its knobs had when it was asked for."""

    patch: Patch
    seen: Patch
    origin: Origin
    retries: int = 0
    busy_since_s: float | None = None  # the engine applies somebody else's change
    again_s: float | None = None  # ask again then, or as soon as any change was applied
    undo_then: bool = False  # a person took it back before it was applied
    apply_id: int | None = None


@dataclass(slots=True)
class _Outcome:
    """How the last change of a knob ended."""

    reason: str = ""
    took_s: float | None = None
    preempted: int | None = None


@dataclass(slots=True)
class _History:
    undo: deque[Patch] = field(default_factory=lambda: deque(maxlen=_UNDO_DEPTH))
    redo: deque[Patch] = field(default_factory=lambda: deque(maxlen=_UNDO_DEPTH))


class KnobModel:
    """All methods belong to one thread, the one that drains the link."""

    def __init__(
        self, send: Send, on_change: Callable[[], None] | None = None,
        on_asked: Callable[[Patch, Patch], None] | None = None,
    ) -> None:  # fmt: skip
        """``send`` is `EngineLink.send`; ``on_change`` is told of everything a view could show.

        ``on_asked`` is told of each change that is asked for, and of the values that its knobs had.
        """
        self.rev: int | None = None  # the engine's configuration revision
        self.version = 0  # grows with every change a view could show
        self._send = send
        self._on_change = on_change
        self._on_asked = on_asked
        self._infos: dict[str, KnobInfo] = {}
        self._applied: Patch = {}
        self._outcomes: dict[str, _Outcome] = {}
        self._queue: deque[_Change] = deque()  # the first one is with the engine
        self._ended: dict[int, ApplyEvent] = {}  # events that overtook their acceptance
        self._history = _History()
        self._now_s = 0.0
        self._views: list[KnobView] = []  # as they were at version `_views_of`
        self._views_of = -1

    # --- reading ---------------------------------------------------------------------------------

    def views(self) -> list[KnobView]:
        """All knobs, in the registry's order."""
        if self._views_of != self.version:
            self._views, self._views_of = [self.view(knob) for knob in self._infos], self.version
        return list(self._views)

    def view(self, knob: str) -> KnobView:
        """One knob. Raises KeyError for an id the engine does not have."""
        info, applied = self._infos[knob], self._applied.get(knob)
        outcome = self._outcomes.get(knob, _Outcome())
        pending = [change.patch[knob] for change in self._queue if knob in change.patch]
        if pending:
            return KnobView(info, applied, pending[-1], KnobStatus.PENDING)
        status = KnobStatus.REFUSED if outcome.reason else KnobStatus.APPLIED
        return KnobView(info, applied, applied, status, outcome.reason, outcome.took_s, outcome.preempted)

    def values(self) -> Patch:
        """All applied values."""
        return dict(self._applied)

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def can_undo(self) -> bool:
        return bool(self._history.undo) or self._unfinished() is not None

    @property
    def can_redo(self) -> bool:
        return bool(self._history.redo)

    # --- asking ----------------------------------------------------------------------------------

    def set(self, patch: Patch) -> None:
        """Ask for a change of one or several knobs, whole or not at all."""
        self._ask(patch, "user")

    def difference(self, values: Patch) -> Patch:
        """The patch to a stored configuration: what differs and this engine can take."""
        unavailable = self.unavailable(values)
        return {
            knob: value
            for knob, value in values.items()
            if knob not in unavailable and self._applied.get(knob) != value
        }

    def unavailable(self, values: Patch) -> dict[str, str]:
        """Of a stored configuration, what differs and cannot be had here, with the reasons."""
        found: dict[str, str] = {}
        for knob, value in values.items():
            info = self._infos.get(knob)
            if info is None:
                found[knob] = "This engine has no such knob."
            elif self._applied.get(knob) == value:
                continue
            elif not info.available:
                found[knob] = info.reason
            elif str(value) in info.choice_reasons:
                found[knob] = info.choice_reasons[str(value)]
        return found

    def undo(self) -> Patch | None:
        """Ask for the inverse of this console's last change, once that is applied; None if there is none."""
        unfinished = self._unfinished()
        if unfinished is None:
            return self._step(self._history.undo, "undo")
        unfinished.undo_then = True
        return dict(unfinished.seen)

    def redo(self) -> Patch | None:
        """Ask again for what was undone last; None if there is nothing."""
        return self._step(self._history.redo, "redo")

    def _unfinished(self) -> _Change | None:
        """The newest change on its way that was not taken back."""
        made = (change for change in reversed(self._queue) if change.origin != "undo")
        return next((change for change in made if not change.undo_then), None)

    def _step(self, stack: deque[Patch], origin: Origin) -> Patch | None:
        if not stack:
            return None
        patch = stack.pop()
        self._ask(patch, origin)
        return patch

    def _ask(self, patch: Patch, origin: Origin) -> None:
        seen = {knob: self._applied.get(knob) for knob in patch}
        self._queue.append(_Change(dict(patch), seen, origin))
        if self._on_asked is not None:
            self._on_asked(dict(patch), seen)
        for knob in patch:
            self._outcomes.pop(knob, None)
        self._changed()
        if len(self._queue) == 1:
            self._submit(self._queue[0])

    def _submit(self, change: _Change) -> None:
        if self.rev is None:
            self._refuse(change, "No engine is connected.", {})
            return
        command = CfgSet(id=1, expect_rev=self.rev, patch=change.patch)
        self._send(command, lambda reply: self._replied(change, reply))

    # --- hearing ---------------------------------------------------------------------------------

    def load(self, cfg: Cfg) -> None:
        """Take in a whole configuration."""
        infos = {info.id: info for info in cfg.knobs}
        # What can be had is known only once the model is loaded, at the same revision.
        if self.rev == cfg.rev and self._applied == cfg.values and self._infos == infos:
            return
        self._infos = infos
        self._applied = dict(cfg.values)
        self.rev = cfg.rev
        self._changed()

    def ingest(self, batch: Batch) -> None:
        """Take in configuration and apply events; call after `EngineLink.drain`."""
        if batch.new_session:
            self._ended.clear()
            self._outcomes.clear()
            for change in list(self._queue):
                self._refuse(change, "The engine was started anew meanwhile.", {})
            self._changed()
        for event in batch.events:
            self._applied_event(event)
        if batch.link.state in _ENDED and self._queue:
            for change in list(self._queue):
                self._refuse(change, "The engine ended before it was applied.", {})
        if batch.cfg is not None:
            self.load(batch.cfg)
        self._now_s = batch.now_s
        first = self._queue[0] if self._queue else None
        if first is not None and first.again_s is not None and (batch.events or batch.now_s >= first.again_s):
            first.again_s = None
            self._send(CfgGet(id=1), lambda answer: self._retry(first, answer))

    def _replied(self, change: _Change, reply: Reply) -> None:
        if change not in self._queue:
            return
        if isinstance(reply, CfgAccepted):
            if not reply.changed:
                self._finish(change)  # it is so already: no event will follow
                return
            change.apply_id = reply.apply_id
            overtaken = self._ended.pop(reply.apply_id, None)
            if overtaken is not None:
                self._applied_event(overtaken)
        elif isinstance(reply, Error) and reply.code == "conflict" and change.retries < MAX_RETRIES:
            change.retries += 1
            self._send(CfgGet(id=1), lambda answer: self._retry(change, answer))
        elif isinstance(reply, Error) and reply.code == "busy" and self._may_wait(change):
            change.again_s = self._now_s + BUSY_AGAIN_S
        elif isinstance(reply, Error):
            self._refuse(change, reply.message, dict(reply.keys))
        else:
            self._refuse(change, f"The engine answered {type(reply).__name__} to a change of knobs.", {})

    def _may_wait(self, change: _Change) -> bool:
        if change.busy_since_s is None:
            change.busy_since_s = self._now_s
        return self._now_s - change.busy_since_s < BUSY_AT_MOST_S

    def _retry(self, change: _Change, answer: Reply) -> None:
        if change not in self._queue:
            return
        if not isinstance(answer, Cfg):
            why = answer.message if isinstance(answer, Error) else "The configuration could not be read."
            self._refuse(change, why, {})
            return
        self.load(answer)
        moved = {
            knob: f"It was changed elsewhere to {self._applied.get(knob)!r} meanwhile."
            for knob, value in change.seen.items()
            if self._applied.get(knob) not in (value, change.patch[knob])
        }
        if moved:
            self._refuse(change, "Another client changed the configuration.", moved)
        else:
            self._submit(change)

    def _applied_event(self, event: ApplyEvent) -> None:
        change = next((c for c in self._queue if c.apply_id == event.apply_id), None)
        if event.result == "ok":
            if self.rev is None or event.to_rev > self.rev:
                self._applied |= event.patch
                self.rev = event.to_rev
            for knob in event.patch:
                self._outcomes[knob] = _Outcome("", event.took_us * 1e-6, event.preempted)
        if change is None:
            self._ended[event.apply_id] = event
            while len(self._ended) > _UNDO_DEPTH:
                del self._ended[next(iter(self._ended))]
            self._changed()
        elif event.result == "ok":
            self._remember(change)
            if change.undo_then:
                self._step(self._history.undo, "undo")
            self._finish(change)
        else:
            # What a person cancelled was not refused.
            why = "" if event.why == CANCELLED else f"It was rolled back: {event.why}"
            self._refuse(change, why, {})

    def _remember(self, change: _Change) -> None:
        """Make the change undoable by this console."""
        inverse = {knob: change.seen[knob] for knob in change.patch}
        if change.origin == "undo":
            self._history.redo.append(inverse)
            return
        self._history.undo.append(inverse)
        if change.origin == "user":
            self._history.redo.clear()

    def _refuse(self, change: _Change, why: str, keys: dict[str, str]) -> None:
        for knob in change.patch:
            self._outcomes[knob] = _Outcome(keys.get(knob) or why)
        if change.origin == "undo":
            self._history.undo.append(change.patch)
        elif change.origin == "redo":
            self._history.redo.append(change.patch)
        self._finish(change)

    def _finish(self, change: _Change) -> None:
        first = bool(self._queue) and self._queue[0] is change
        if change in self._queue:
            self._queue.remove(change)
        self._changed()
        if first and self._queue:
            following = self._queue[0]
            following.seen = {knob: self._applied.get(knob) for knob in following.patch}
            self._submit(following)

    def _changed(self) -> None:
        self.version += 1
        if self._on_change is not None:
            self._on_change()
