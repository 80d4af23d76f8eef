"""What all charts share: the length of time shown, the pause, and the crosshair."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from PySide6.QtCore import QObject, Signal

from app.console import Console
from app.model.session import Figure, Marker
from app.units import count, span
from app.widgets.mark_flags import ChartMark
from app.widgets.time_plot import F64, CrosshairLink, TimePlot

GROWING_S = (60, 120, 180, 300, 600, 900, 1800, 3600)


class ChartView(QObject):
    """One for each window. `changed` tells charts to draw at once."""

    changed = Signal()

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.link = CrosshairLink(self)
        self.span_s = float(console.settings.time_window_s)
        self._paused_at_s: float | None = None
        self._labels: dict[str, str] = {}  # by what the change was; an engine's numbers begin anew with it

    @property
    def paused(self) -> bool:
        return self._paused_at_s is not None

    @property
    def now_s(self) -> float:
        """The time at the right edge: now, or when the charts were paused."""
        return self._paused_at_s if self._paused_at_s is not None else self.console.session.now_s

    @property
    def shown_span_s(self) -> float:
        """The chosen length, or a shorter one while the session is too young to fill it."""
        table = self.console.session.timeline
        if table.first is None:
            return float(GROWING_S[0])
        age_s = self.now_s - table.first * table.bin_s
        return next((float(s) for s in GROWING_S if age_s <= s <= self.span_s), self.span_s)

    def set_span(self, span_s: int) -> None:
        """Show the last ``span_s`` seconds, and remember that."""
        self.span_s = float(span_s)
        self.console.settings.time_window_s = span_s
        self.changed.emit()

    def set_paused(self, paused: bool) -> None:
        """Let the charts stand still; data are still taken in."""
        self._paused_at_s = self.console.session.now_s if paused else None
        self.changed.emit()

    def marks(self) -> list[ChartMark]:
        """Changes of the configuration, relative to the right edge."""
        now = self.now_s
        return [
            ChartMark(m.t_s - now, self._label(m), m.ok) for m in self.console.session.markers if m.t_s <= now
        ]

    def _label(self, marker: Marker) -> str:
        if marker.label not in self._labels:
            self._labels[marker.label] = self.console.patch_text(marker.patch)
        return self._labels[marker.label]

    def gaps(self) -> list[tuple[float, float]]:
        """Stretches without telemetry, relative to the right edge; an outage that goes on is the last."""
        now, session = self.now_s, self.console.session
        gaps = [*session.gaps] if session.outage is None else [*session.gaps, session.outage]
        return [(g.t0_s - now, g.t1_s - now) for g in gaps if g.t0_s <= now]


class Follower:
    """Keeps one chart in step with the view: draws it when its data would have moved by a pixel."""

    def __init__(self, view: ChartView, plot: TimePlot, redraw: Callable[[], None]) -> None:
        self._view, self._plot, self._redraw = view, plot, redraw
        self._drawn_s = -1.0

    def refresh(self) -> None:
        """Redraw if it is due."""
        step_s = max(0.1, self._view.shown_span_s / max(100, self._plot.plot.width()))
        if not self._view.paused and abs(self._view.now_s - self._drawn_s) >= step_s * 0.95:
            self._redraw()

    def begin(self) -> float:
        """The time at the right edge of the picture to be drawn now; sets span, marks and gaps for it."""
        self._drawn_s = self._view.now_s
        if self._plot.span_s != self._view.shown_span_s:
            self._plot.set_span(self._view.shown_span_s)
        self._plot.set_marks(self._view.marks())
        self._plot.set_gaps(self._view.gaps())
        return self._drawn_s

    def columns(self, names: Iterable[str]) -> tuple[F64, dict[str, F64]]:
        """Of the session's timeline: times [n] up to the right edge, which is 0, and columns [n] by name."""
        session = self._view.console.session
        reach = self._view.shown_span_s + max(0.0, session.now_s - self._drawn_s)
        times = session.timeline.times(reach) - self._drawn_s
        shown = times <= 0
        return times[shown], {name: session.timeline.column(name, reach)[shown] for name in names}


def basis(figure: Figure) -> str:
    """What a figure rests on: ``n=213 · 30 s``."""
    parts = []
    if figure.n is not None:
        parts.append(f"n={count(figure.n)}")
    if figure.window_s is not None:
        parts.append(span(figure.window_s))
    return " · ".join(parts)
