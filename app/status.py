"""What the state of the link means in words: for the banner and for the status bar. No widgets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from app.i18n import N_, tr, tr_engine, tr_later, tr_n
from app.model.session import SessionModel
from app.net.types import LinkState
from app.units import clock, count, data, percent, seconds
from ipc.messages import EngineState

PILLS: dict[LinkState, tuple[str, str]] = {
    LinkState.OFFLINE: ("off", N_("No engine")),
    LinkState.STARTING: ("busy", N_("Starting")),
    LinkState.CONNECTING: ("busy", N_("Connecting")),
    LinkState.LOADING: ("busy", N_("Loading")),
    LinkState.READY: ("ok", N_("Connected")),
    LinkState.FAILED: ("alarm", N_("Failed")),
    LinkState.STALLED: ("warning", N_("Stalled")),
    LinkState.UNRESPONSIVE: ("warning", N_("Not responding")),
    LinkState.DEAD: ("alarm", N_("Engine stopped")),
}
_SLOW_S = 2.0  # a change that takes longer says for how long


@dataclass(frozen=True, slots=True)
class Message:
    """What the banner says. ``share``: progress 0..1, None for none or without an end."""

    level: str
    title: str
    text: str
    share: float | None = None
    busy: bool = False
    can_restart: bool = False
    log: bool = False
    draft: bool = False  # another draft model, or none, may help
    change: bool = False  # of a change that is being applied: it comes and goes while a person works
    can_cancel: bool = False
    again: bool = False  # what the restart left out can be set again
    cpu: bool = False  # it may do on the CPU what it cannot on the card
    brief: str = ""  # `text` where it has no room


def applying_share(session: SessionModel) -> float | None:
    """How far the change is that is being applied, or what it needs loaded beside the steps, 0..1.

    None where there is none or it does not say, as where a stage is through and the change is not.
    """
    state = session.state
    if session.link.state is not LinkState.READY or state is None:
        return None
    if state.phase != "applying" and (state.pending_apply is None or not state.stage):
        return None
    return state.done_bytes / state.total_bytes if state.done_bytes < state.total_bytes else None


def banner_message(session: SessionModel, change: str = "", brief: str = "") -> Message | None:
    """The message for the present state, or None while all is well.

    ``change``: what was asked for; ``brief``: the same where there is no room for it.
    """
    link = session.link
    if link.state is LinkState.READY:
        state = session.state
        if state is not None and state.phase == "applying":
            return _applying(session, state, change, brief)
        return None
    if link.state in (LinkState.STARTING, LinkState.CONNECTING):
        title = tr("Starting the engine") if link.managed else tr("Connecting to the engine")
        return Message("busy", title, tr_engine(link.reason), busy=True)
    if link.state is LinkState.LOADING:
        return _loading(session)
    if link.state is LinkState.OFFLINE:
        text = tr_engine(link.reason) or tr(
            "Open a model from the Engine menu, or attach to a running engine."
        )
        return Message("off", tr("No engine"), text, can_restart=link.can_restart)
    titles = {
        LinkState.DEAD: tr("The engine has stopped"),
        LinkState.FAILED: tr("The engine could not start"),
        LinkState.UNRESPONSIVE: tr("The engine does not respond"),
        LinkState.STALLED: tr("The engine makes no progress"),
    }
    title, text = titles[link.state], tr_engine(link.reason)
    drafts = link.state is LinkState.FAILED and "--draft-model" in link.command_line
    if drafts:
        title = tr("The engine could not start with this draft model")
    if link.state is LinkState.DEAD:
        text = " ".join(part for part in (text, tr("What was measured is kept.")) if part)
    cpu = _may_do_on_cpu(session)
    return Message("alarm", title, text, can_restart=link.can_restart, log=True, draft=drafts, cpu=cpu)


def left_out_message(text: str) -> Message:
    """The message for changes that a restart left out, of which ``text`` tells."""
    return Message("warning", tr("Not with the last configuration"), text, again=True)


def _may_do_on_cpu(session: SessionModel) -> bool:
    """Whether an engine of ours that ended, or could not start, was to run on a card."""
    link = session.link
    if link.state not in (LinkState.FAILED, LinkState.DEAD) or not (link.managed and link.can_restart):
        return False
    words = link.command_line
    asked = dict(itertools.pairwise(words)).get("--device", "auto")
    if asked == "auto":
        return session.device is not None and session.device.kind != "cpu"
    return asked != "cpu"


def _applying(session: SessionModel, state: EngineState, change: str, brief: str) -> Message:
    share = applying_share(session)
    since_s = session.now_s - (state.since_ns - session.link.clock_offset_ns) * 1e-9
    stage = tr_engine(state.stage)
    if share is None and state.total_bytes:
        stage = tr("completing it after {stage}").format(stage=stage)
    parts = [stage, str(percent(share)) if share else ""]  # at 0 it may not tell how far it is
    if since_s >= _SLOW_S:
        parts.append(tr("for {time}").format(time=clock(since_s)))
    parts.append(_left(session))
    title, live = tr("Applying a change"), state.running + state.waiting
    if live:
        title = f"{title} · {tr_n('{n} request waits', '{n} requests wait', live).format(n=count(live))}"
    text, short = (" · ".join(part for part in (what, *parts) if part) for what in (change, brief))
    return Message(
        "busy", title, text, brief=short, share=share or None, busy=not share, change=True,
        can_cancel=share is not None and state.pending_apply is not None,
    )  # fmt: skip


def _left(session: SessionModel) -> str:
    """How long the present stage of a change has yet to go, "" where that is not known."""
    left_s = None
    if session.state is not None:
        left_s = session.stage_clock.left_s(session.state, session.now_s)
    return "" if left_s is None else tr("about {time} left").format(time=clock(left_s))


def _done(state: EngineState) -> str:
    return tr("{share} ({done} of {total})").format(
        share=percent(state.done_bytes / state.total_bytes),
        done=data(state.done_bytes), total=data(state.total_bytes),
    )  # fmt: skip


def _loading(session: SessionModel) -> Message:
    state = session.state
    if state is None or not state.total_bytes:
        stage = tr_engine(state.stage) if state is not None else ""
        return Message("busy", tr("Loading the model"), stage, busy=True)
    text = " · ".join(part for part in (tr_engine(state.stage), _done(state)) if part)
    return Message("busy", tr("Loading the model"), text, share=state.done_bytes / state.total_bytes)


def pill(session: SessionModel) -> tuple[str, str]:
    """Level and word of the link's state."""
    level, text = PILLS[session.link.state]
    return level, tr_later(text)


def engine_line(session: SessionModel) -> str:
    """Device, model and data type, as far as they are known."""
    parts = []
    if session.link.pid is not None:
        where = tr("local engine") if session.link.managed else tr("attached engine")
        parts.append(f"{where} · {tr('process {pid}').format(pid=session.link.pid)}")
    if session.device is not None:
        parts.append(session.device.name)
    if session.model is not None:
        parts.append(f"{session.model.name} · {session.model.dtype}")
        state = session.state
        if session.model.quantization:
            parts.append(tr("weights {precision}").format(precision=session.model.quantization))
        elif state is not None and state.weight_dtype not in ("", "model"):
            parts.append(tr("weights {precision}").format(precision=tr_engine(state.weight_dtype)))
    return "   ".join(parts)


def age_text(session: SessionModel) -> str:
    """How old the newest data are."""
    age = session.link.data_age_s
    if age is None or session.link.state in (LinkState.OFFLINE, LinkState.STARTING, LinkState.CONNECTING):
        return ""
    text = "0.1" if age < 0.15 else f"{age:.1f}"
    if age >= 10:
        return tr("data {age} old").format(age=seconds(age))
    return tr("data {age} s old").format(age=text)
