"""Changes of the configuration: what they need is loaded, then they are made between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import reconfigure
from engine.knob_store import Proposal
from engine.mailbox import Mailbox
from engine.speculation.fetcher import Fetcher

if TYPE_CHECKING:
    from engine.loop import EngineCore


class Changes:
    """At most one change at a time. The step thread owns it; what is loaded comes to ``mailbox``."""

    def __init__(self, core: EngineCore, mailbox: Mailbox) -> None:
        self._core = core
        self._fetcher = Fetcher(mailbox, core.progress)

    def begin(self, proposal: Proposal, now_ns: int) -> None:
        """Carry a change out, or first let what it needs be loaded while steps go on."""
        job = reconfigure.what_to_fetch(self._core, proposal)
        if job is None or self._core.phase == "stopping":
            self.carry_out(proposal, now_ns)
        else:
            self._fetcher.start(proposal, job)

    def carry_out(self, proposal: Proposal, now_ns: int, error: Exception | None = None) -> None:
        """Change the configuration between two steps, or leave all as it was and say why.

        ``error``: what went wrong when what the change needs was loaded.
        """
        core = self._core
        if core.phase == "stopping":
            core.knobs.abandon()
            return
        if core.pulse.stage:  # what was loaded is there
            core.pulse.progress("", 0, 0)
        if proposal.mode != "step":
            core.pulse.set_phase("applying")
        core.flush()  # what there is was computed under the old configuration
        reconfigure.carry_out(core, proposal, now_ns, error)
        core.pulse.blocks_changed(show_at_once=True)
        if core.phase == "applying":
            core.pulse.set_phase("ready")
        core.flush()  # how it ended is not to wait for the step that follows, which may be long

    def stop(self) -> None:
        """Load nothing any more."""
        self._fetcher.stop()
