"""The requests over time: which held a seat of the batch, which waited, and which seats stood empty."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import Signal, Slot
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QStackedLayout, QWidget

from app.i18n import N_, tr, tr_later, tr_n
from app.model.request_table import preemption_lines, state_text
from app.model.seats import DECODE, IN_QUEUE, PREFILL, RECOMPUTE, SWAPPED, WAITING
from app.panels.view import ChartView, Follower
from app.units import count, percent, seconds
from app.widgets.basic import label, plain_tip, set_tip
from app.widgets.chart_header import SeriesSpec
from app.widgets.empty_state import EmptyState
from app.widgets.seat_plot import Lanes, SeatPlot

SEATS_BUSY = N_(
    "Mean of the requests that ran, over the steps of the shown time and weighted by how long each took, of "
    "the seats that “Running requests” allows. A static batch leaves seats empty until its slowest member "
    "ends."
)
RECOMPUTE_TAX = N_(
    "Recompute tax: the share of the forward passes' time, by tokens, that went into tokens computed once "
    "already and lost by a preemption. Over the trailing window."
)
_RID_BITS = 40  # a bar's key: the engine's number above, the request's below


class SeatChart(SeatPlot):
    """The bars of the session, in step with the other charts."""

    def __init__(self, view: ChartView) -> None:
        kinds = {
            WAITING: SeriesSpec("waiting", tr("waiting"), "stage_other"),
            PREFILL: SeriesSpec("prefill", tr("prefill"), "series_b"),
            DECODE: SeriesSpec("decode", tr("decode"), "series_a"),
            RECOMPUTE: SeriesSpec("recompute", tr("preempted"), "alarm"),
            SWAPPED: SeriesSpec("swapped", tr("swapped out"), "kv_swapped"),
        }
        series = [kinds[kind] for kind in sorted(kinds)]
        super().__init__("", series, tr("queue"), link=view.link, card=False)
        self.header.title.hide()
        self.header.unit.hide()
        tip = tr(
            "A lane for each seat of the batch: a running request takes the lowest free one, and an empty "
            "seat shows its ground. Above them the queue: who waits for a first place, or for another "
            "one after a preemption. A thin line ends a request: short when cancelled, red when failed. "
            "Point at a bar to read about its request; click to pick it; click twice for the table."
        )
        set_tip(self.header, tip)
        self.setAccessibleDescription(tip)
        self._view = view
        self._follower = Follower(view, self, self.redraw)
        view.changed.connect(self.redraw)

    def refresh(self) -> None:
        """Draw, if the data would move by a pixel since the last time."""
        self._follower.refresh()

    @Slot()
    def redraw(self) -> None:
        """Draw now."""
        now = self._follower.begin()
        session = self._view.console.session
        bars = session.bars(now - self.span_s, now)
        seats = self._view.console.knobs.values().get("max_num_seqs")
        self.set_lanes(
            Lanes(
                t0_s=bars.t0_s - now,
                t1_s=bars.t1_s - now,
                lane=bars.lane,
                kind=bars.kind,
                queued=np.isin(bars.kind, IN_QUEUE),
                key=(bars.engine << _RID_BITS) + bars.rid,
                end_t_s=bars.end_t_s - now,
                end_lane=bars.end_lane,
                end=bars.end,
                seats=seats if isinstance(seats, int) else 0,
            )
        )


def _short(number: float) -> str:
    """A number of seats: whole, or with one decimal."""
    return f"{round(number, 1):g}"


class TimelinePanel(QWidget):
    """The lanes, and in their header what they sum up to."""

    summary_changed = Signal(str)
    requests_asked = Signal()
    load_asked = Signal()

    def __init__(self, view: ChartView) -> None:
        super().__init__()
        self._view = view
        self._console = view.console
        self.chart = SeatChart(view)
        self.chart.describe = self.describe
        self.chart.picked.connect(self._on_picked)
        self.chart.opened.connect(self._on_opened)
        self.seats = label("", "small")
        set_tip(
            self.seats,
            tr_later(SEATS_BUSY),
        )
        self.tax = label("", "small")
        set_tip(
            self.tax,
            tr_later(RECOMPUTE_TAX),
        )
        self.chart.header.add(self.seats, self.tax)
        self.empty = EmptyState(
            tr("No requests yet"),
            tr("Each request becomes a bar here: how long it waited, computed its prompt, and decoded."),
            tr("Start load"),
            self.load_asked.emit,
        )
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(self.chart)
        self._console.selected.connect(self._on_selected)

    def showEvent(self, event: QShowEvent) -> None:
        self.chart.redraw()
        self.refresh_figures()

    def refresh(self) -> None:
        """Draw what moved."""
        self.empty.set_usable(self._console.can_load, tr("The engine is not ready yet."))
        self._stack.setCurrentIndex(1 if self._console.session.requests_rev else 0)
        self.chart.refresh()

    def refresh_figures(self) -> None:
        """Write the header and the summary."""
        session = self._console.session
        use = session.seat_use(self._view.now_s - self._view.shown_span_s, self._view.now_s)
        if use is None:
            self.seats.setText(tr("no step ran in this time"))
        elif use.seats is None or use.share is None:
            self.seats.setText(tr("seats busy {busy}").format(busy=_short(use.busy)))
        else:
            self.seats.setText(
                tr("seats busy {busy} of {seats} ({share})").format(
                    busy=_short(use.busy), seats=_short(use.seats), share=percent(use.share)
                )
            )
        kpis = session.kpis()
        tax, lost = kpis.recompute_share.value, kpis.preemptions.value
        text = tr("preempted {n} · recompute tax {share}")
        shown = text.format(n=count(lost), share=percent(tax)) if tax or lost else ""
        self.tax.setText(shown)
        running, waiting = kpis.running.value, kpis.waiting.value
        now = tr("running {running} · waiting {waiting}")
        self.summary_changed.emit(
            "" if running is None else now.format(running=f"{running:.0f}", waiting=f"{waiting or 0:.0f}")
        )

    def describe(self, key: int) -> str:
        """The tooltip of a bar."""
        view = self._console.session.request((key >> _RID_BITS, key & ((1 << _RID_BITS) - 1)))
        if view is None:
            return ""
        data = view.row
        lines = [tr("Request {rid} {tag}").format(rid=view.rid, tag=data.tag).rstrip()]
        lines.append(state_text(view))
        lines.append(
            tr_n(
                "prompt {prompt} token, {cached} cached · output {output}",
                "prompt {prompt} tokens, {cached} cached · output {output}",
                data.prompt_tok,
            ).format(
                prompt=count(data.prompt_tok), cached=count(data.cached_tok), output=count(data.output_tok)
            )
        )
        lines.append(
            tr("queue {queue} · TTFT {ttft} · TPOT {tpot}").format(
                queue=seconds(view.queue_s), ttft=seconds(view.ttft_s), tpot=seconds(view.tpot_s)
            )
        )
        lines += preemption_lines(self._console.session, view)
        return plain_tip("\n".join(lines))

    @Slot(object)
    def _on_picked(self, key: int | None) -> None:
        current = key is not None and key >> _RID_BITS == self._console.session.engine_number
        self._console.select(key & ((1 << _RID_BITS) - 1) if key is not None and current else None)

    @Slot(object)
    def _on_opened(self, key: int | None) -> None:
        if key is not None:
            self.requests_asked.emit()

    @Slot(object)
    def _on_selected(self, rid: int | None) -> None:
        engine = self._console.session.engine_number
        self.chart.choose(None if rid is None else (engine << _RID_BITS) + rid)
