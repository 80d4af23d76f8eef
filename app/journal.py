"""What an operator needs to know afterwards: how the engine came and went, what was changed, what was sent.

Each event is kept as the way to say it, so that the same list reads in either language. No widgets.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable

from app.i18n import tr, tr_engine
from app.model.log_table import LogEntry, LogModel
from app.net.types import LinkState, LinkStatus
from ipc.messages import LogLine

Say = Callable[[], str]
LAST_WORDS = 20  # lines that a dead engine printed last


class Journal:
    """``model`` holds the list; it outlives the window. All methods belong to the GUI thread."""

    def __init__(self) -> None:
        self.model = LogModel()
        self._link = LinkStatus()

    def note(self, level: str, say: Say, unix_ms: int | None = None) -> None:
        """Keep one event of the console; ``unix_ms`` is when, if it was not just now."""
        when = round(time.time() * 1000) if unix_ms is None else unix_ms
        self.model.append([LogEntry(when, level, "console", say)])

    def take_lines(self, lines: Iterable[LogLine]) -> None:
        """Keep lines of the engine's own log."""
        self.model.append([LogEntry.of_line(line) for line in lines])

    def take_link(self, link: LinkStatus) -> None:
        """Keep what changed about the engine since the last call: its start, its end and why."""
        before, self._link = self._link, link
        if link.state is not before.state:
            found = link_event(before, link)
        elif link.state is LinkState.READY and link.session != before.session:
            found = ("info", lambda: _ready(link))
        else:
            return
        if found is not None:
            self.note(*found)
        if link.state is LinkState.DEAD and link.log_tail:
            words = "\n".join(link.log_tail[-LAST_WORDS:])
            self.note("info", lambda: f"{tr('The last it printed:')}\n{words}")


def _ready(link: LinkStatus) -> str:
    where = {"pid": "?" if link.pid is None else link.pid, "address": link.endpoint}
    if link.managed:
        return tr("The engine is ready: process {pid} at {address}.").format(**where)
    return tr("Attached to the engine at {address}, process {pid}.").format(**where)


def _because(what: str, why: str) -> str:
    return tr("{name}: {why}").format(name=what, why=why) if why else what


def link_event(before: LinkStatus, link: LinkStatus) -> tuple[str, Say] | None:
    """Level and words for a link that came from another state; None where there is nothing to tell."""
    reason, state = link.reason, link.state
    if state is LinkState.STARTING:
        line = shlex.join(link.command_line)
        return "info", lambda: _because(tr("Starting the engine"), line)
    if state is LinkState.CONNECTING and not link.managed:
        return "info", lambda: tr("Connecting to the engine at {address}.").format(address=link.endpoint)
    if state is LinkState.LOADING:
        pid = "?" if link.pid is None else link.pid
        return "info", lambda: tr("The engine loads its model: process {pid}.").format(pid=pid)
    if state is LinkState.READY:
        if before.state in (LinkState.STALLED, LinkState.UNRESPONSIVE) and link.session == before.session:
            return "info", lambda: tr("The engine answers and makes progress again.")
        return "info", lambda: _ready(link)
    if state is LinkState.FAILED:
        return "error", lambda: _because(tr("The engine could not start"), tr_engine(reason))
    if state is LinkState.STALLED:
        return "warning", lambda: _because(tr("The engine makes no progress"), tr_engine(reason))
    if state is LinkState.UNRESPONSIVE:
        return "warning", lambda: _because(tr("The engine does not respond"), tr_engine(reason))
    if state is LinkState.DEAD:
        return "error", lambda: _because(tr("The engine has stopped"), tr_engine(reason))
    if state is LinkState.OFFLINE and before.managed:
        return "info", lambda: tr_engine(reason) or tr("The engine was stopped.")
    if state is LinkState.OFFLINE:
        return "info", lambda: tr("Detached from the engine at {address}.").format(address=before.endpoint)
    return None
