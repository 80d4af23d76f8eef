"""The status line: how the link stands, what runs, how old the data are, what the window costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from PySide6.QtWidgets import QStatusBar

from app import status
from app.i18n import language, tr
from app.settings import TIME_WINDOWS_S
from app.units import percent, seconds, span
from app.widgets.basic import ElidedLabel, FigureLabel, button, set_role, set_tip
from app.widgets.status_pill import StatusPill

if TYPE_CHECKING:
    from app.main_window import MainWindow

OLD_S = 1.0


class StatusLine(QStatusBar):
    """Refreshed twice a second."""

    def __init__(self, window: MainWindow) -> None:
        super().__init__()
        self._window = window
        self.setSizeGripEnabled(False)
        self.pill = StatusPill()
        self.engine = ElidedLabel("", "small")
        self.age = FigureLabel("small")
        set_tip(self.age, tr("Time since anything was heard from the engine."))
        self.cost = FigureLabel("small")
        tip = tr("Time shown by the charts; it grows up to the chosen one. Click for the next.")
        self.span = button("", self._next_span, "flat", tip)
        self.pause = button(
            tr("Pause"), self._toggle_pause, "flat", tr("Let the charts stand still (Ctrl+P).")
        )
        other = "中文" if language() == "en" else "English"
        self.language = button(other, self._other_language, "flat", tr("Change the language"))
        self.addWidget(self.pill)
        self.addWidget(self.engine, 1)
        for part in (self.age, self.cost, self.span, self.pause, self.language):
            self.addPermanentWidget(part)
        self._cpu_s, self._at_s = time.process_time(), time.monotonic()
        self.cpu_share: float | None = None

    def refresh(self) -> None:
        """Write everything anew."""
        window = self._window
        session = window.session
        self.pill.set_state(*status.pill(session))
        self.engine.set_full_text(status.engine_line(session))
        self.age.setText(status.age_text(session))
        old = session.link.data_age_s is not None and session.link.data_age_s > OLD_S
        set_role(self.age, "warning" if old else "small")
        self._measure()
        frames, cost = window.clock.frames_per_s, window.clock.cost_s
        if frames is not None and cost is not None:
            text = tr("{frames} fps · {share} of a core")
            self.cost.setText(text.format(frames=f"{frames:.0f}", share=percent(self.cpu_share)))
            tip = tr("Frames per second, and this window's share of one core. A frame takes {cost}.")
            set_tip(self.cost, tip.format(cost=seconds(cost)))
        chosen, shown = window.view.span_s, window.view.shown_span_s
        text = tr("{shown} of {chosen}") if shown < chosen else "{chosen}"
        self.span.setText(text.format(shown=span(shown), chosen=span(chosen)))
        self.pause.setText(tr("Resume") if window.view.paused else tr("Pause"))

    def _measure(self) -> None:
        now, cpu = time.monotonic(), time.process_time()
        if now - self._at_s >= 2.0:
            self.cpu_share = (cpu - self._cpu_s) / (now - self._at_s)
            self._cpu_s, self._at_s = cpu, now

    def _next_span(self) -> None:
        spans = list(TIME_WINDOWS_S)
        at = spans.index(int(self._window.view.span_s)) if int(self._window.view.span_s) in spans else 0
        self._window.set_span(spans[(at + 1) % len(spans)])
        self.refresh()

    def _toggle_pause(self) -> None:
        self._window.set_paused(not self._window.view.paused)
        self.refresh()

    def _other_language(self) -> None:
        self._window.set_language("zh_CN" if language() == "en" else "en")
