"""Where a step's time goes: its stages over time, and beside them what they took of steps and requests."""

from __future__ import annotations

import math

from PySide6.QtCore import QSize, Qt, Signal, Slot
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView, QWidget

from app import theme
from app.i18n import N_, tr, tr_engine, tr_later, tr_n
from app.model.drafts import DraftFigures
from app.model.knobs import KnobStatus
from app.model.stage_table import ROW_HEIGHT, STAGES, WHOLE, StageTable
from app.panels.knob_notes import places_text
from app.panels.view import ChartView, Follower
from app.units import count, percent, seconds, span, tick
from app.widgets.basic import column, label, row, set_tip
from app.widgets.chart_header import SeriesSpec
from app.widgets.focus import set_enabled
from app.widgets.stack_plot import Layer, StackPlot
from app.widgets.toggle import ToggleSwitch

STACKED = N_(
    "The time of a step, stage upon stage, mean of the steps of each half second. Above the line: "
    "exposed, what the engine waited for. Below it: hidden, what was done meanwhile, under a forward "
    "pass (overlap) or in the threads of text and sockets. The scale leaves out the longest steps, one in "
    "fifty; the crosshair reads them."
)
DRAFTS = N_(
    "Speculation in this window. Accepted: of the drafted tokens, those that the model agreed with. Tokens a "
    "step: what a step with a draft brought its request, the model's own token included. By place: of the "
    "drafts that had a first, second, … token, those that had it accepted. Drafting and verifying: mean time "
    "of a step with drafts; verifying is the share of the forward pass that drafted tokens had by their "
    "number."
)
SPLIT_KNOB = "forward_timing"
# Layers from the line outwards, and the column of the session's timeline that each shows.
ABOVE = {
    "forward": "unsplit_s", "linear": "linear_s", "attention": "attention_s", "head": "head_s",
    "rest": "rest_s", "copy": "copy_s", "sample": "sample_s", "prepare": "exposed_prepare_s",
    "plan": "exposed_plan_s", "publish": "exposed_publish_s", "other": "other_s",
}  # fmt: skip
BELOW = {
    "overlap": "hidden_s", "tokenize": "tokenize_s", "detokenize": "detokenize_s", "send": "send_s"
}  # fmt: skip
FORWARD = ("forward", "linear", "attention", "head", "rest")
AROUND = tuple(key for key in ABOVE if key not in FORWARD)
WIDTHS = (118, 58, 62, 56, 56, 66, 60, 56)  # at least, in pixels
WIDEST = "0.00123"  # ms: a figure that has to fit
CELL_PAD = 14


class StageChart(StackPlot):
    """The stages of a step in ms, a half second a point."""

    def __init__(self, view: ChartView) -> None:
        names = {spec.key: tr_later(spec.title) for spec in STAGES}
        colours = {spec.key: spec.colour for spec in STAGES}
        above = [Layer(key, names[key], colours[key]) for key in ABOVE]
        below = [Layer(key, names.get(key, key), colours.get(key, "stage_overlap")) for key in BELOW]
        legend = (
            (SeriesSpec("forward", tr("forward"), "stage_forward"), FORWARD),
            (SeriesSpec("around", tr("around it"), "stage_prepare"), AROUND),
            (SeriesSpec("hidden", tr("hidden"), "stage_tokenize"), tuple(BELOW)),
        )
        super().__init__(
            "", above, below, legend, format_tick=lambda v: tick(v * 1e3),
            format_value=lambda v: str(seconds(v)), unit=tr("ms a step"), link=view.link, card=False,
        )  # fmt: skip
        self.header.title.hide()
        tip = tr_later(STACKED)
        set_tip(self.header, tip)
        self.setAccessibleDescription(tip)
        self._view = view
        self._follower = Follower(view, self, self.redraw)
        view.changed.connect(self.redraw)
        self.redraw()

    def sizeHint(self) -> QSize:
        return QSize(300, 120)

    def refresh(self) -> None:
        """Draw, if the data would move by a pixel since the last time."""
        self._follower.refresh()

    @Slot()
    def redraw(self) -> None:
        """Draw now."""
        self._follower.begin()
        layers = {**ABOVE, **BELOW}
        times, found = self._follower.columns([*layers.values(), "steps"])
        self.set_data(times, {key: found[name] for key, name in layers.items()}, found["steps"])


class StagesPanel(QWidget):
    """A chart of the stages and a table of them, with the switch that splits the forward pass."""

    summary_changed = Signal(str)

    def __init__(self, view: ChartView) -> None:
        super().__init__()
        self._console = view.console
        self._seen: tuple[int, bool] | None = None
        self.chart = StageChart(view)
        self.model = StageTable()
        self.chart.read.connect(self._on_read)
        self.table = QTableView()
        self.table.setModel(self.model)
        self._shape_table()
        self.split = ToggleSwitch(tr("Split the forward pass"))
        self.split.clicked.connect(self._on_split)
        self.split_text = label(tr("Split the forward pass"), "dim")
        self.split_state = label("", "small")
        for part in (self.split, self.split_text):
            set_tip(
                part,
                tr(
                    "Attention, linear layers and output head are timed apart in each step. Timing costs a "
                    "little itself; nothing that is computed changes."
                ),
            )
        head = row(self.split, self.split_text, self.split_state, None, margins=(8, 3, 10, 0), spacing=7)
        self.drafts = label("", "small", tr_later(DRAFTS), wrap=True)
        self.drafts.setContentsMargins(8, 3, 10, 4)
        self.drafts.hide()
        side = QWidget()
        side.setLayout(column(head, self.table, self.drafts, spacing=0))
        side.setFixedWidth(sum(self._widths()) + 14)
        self.setLayout(row(self.chart, side, spacing=0))

    def _widths(self) -> list[int]:
        """Of the columns: no name and no figure is cut, in any language."""
        header = self.table.horizontalHeader()
        header.ensurePolished()
        figure = math.ceil(theme.metrics(0.9, bold=True).horizontalAdvance(WIDEST)) + CELL_PAD
        return [max(least, header.sectionSizeHint(i), figure) for i, least in enumerate(WIDTHS)]

    def _shape_table(self) -> None:
        table = self.table
        table.setAccessibleName(tr("Stages"))
        table.setSelectionMode(QAbstractItemView.SelectionMode.NoSelection)
        table.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        table.setShowGrid(False)
        table.setWordWrap(False)
        table.setIconSize(QSize(9, 9))
        table.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        table.setProperty("role", "dense")
        table.verticalHeader().hide()
        table.verticalHeader().setMinimumSectionSize(ROW_HEIGHT)
        table.verticalHeader().setDefaultSectionSize(ROW_HEIGHT)
        table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        header = table.horizontalHeader()
        header.setHighlightSections(False)
        header.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        for i, width in enumerate(self._widths()):
            table.setColumnWidth(i, width)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)

    def showEvent(self, event: QShowEvent) -> None:
        self.refresh_figures()

    def refresh(self) -> None:
        """Draw the chart, and the switch as the engine has it."""
        self.chart.refresh()
        knobs, ready = self._console.knobs, self._console.engine_ready
        if self._seen == (knobs.version, ready):
            return
        self._seen = (knobs.version, ready)
        known = {view.info.id: view for view in knobs.views()}
        view = known.get(SPLIT_KNOB)
        pending = view is not None and view.status is KnobStatus.PENDING
        set_enabled(self.split, view is not None and ready and view.info.available and not pending)
        if view is None:
            self.split_state.setText(tr("this engine cannot") if known else "")
            return
        self.split.setChecked(bool(view.desired))
        self.split.set_pending(pending)
        self.split_state.setText(tr("applying…") if pending else "")

    def refresh_figures(self) -> None:
        """Write the table and what it rests on."""
        session = self._console.session
        steps, requests = session.stages(), session.request_stages()
        self.model.set_times(steps, requests)
        self.chart.refresh_legend()
        self.chart.set_note("" if steps.n else tr("no traffic"))
        parts = (
            tr_n("{n} step", "{n} steps", steps.n).format(n=count(steps.n)),
            tr_n("{n} request", "{n} requests", requests.n).format(n=count(requests.n)),
            str(span(session.window_s)),
        )
        shown = " · ".join(parts)
        self.summary_changed.emit(shown if steps.n or requests.n else "")
        self._show_drafts()

    def _show_drafts(self) -> None:
        """How drafts did, and why none are made though speculation is on; nothing where there are none."""
        session = self._console.session
        found, why = session.drafts(), session.state.speculation if session.state is not None else ""
        on = self._console.knobs.values().get("speculation", "off") != "off"
        lines = [_drafts_text(found)] if found is not None else []
        if on and found is None:
            lines.append(tr("No drafts in the last {window}.").format(window=span(session.window_s)))
        if why:
            lines.append(tr("no drafts: {why}").format(why=tr_engine(why)))
        self.drafts.setText("\n".join(lines))
        self.drafts.setVisible(bool(lines))

    @Slot()
    def _on_read(self) -> None:
        when, values = self.chart.reading
        if not values:
            self.model.set_reading(when, {})
            return
        shown = self._work(values)
        shown[WHOLE] = sum(values[key] for key in ABOVE)
        self.model.set_reading(when, shown)

    def _work(self, layers: dict[str, float]) -> dict[str, float]:
        """The layers as the table names them: the parts of the forward pass only where it was split."""
        shown = {key: value for key, value in layers.items() if key not in ("overlap", *FORWARD)}
        shown["forward"] = sum(layers[key] for key in FORWARD)
        if layers["linear"] > 0:
            shown |= {key: layers[key] for key in FORWARD[1:]}
        return shown

    @Slot()
    def _on_split(self) -> None:
        self._console.knobs.set({SPLIT_KNOB: self.split.isChecked()})
        self._seen = None
        self.refresh()


def _drafts_text(drafts: DraftFigures) -> str:
    return tr(
        "Drafts: {share} accepted · {length} tokens/step · by place {places} · draft {draft} · verify "
        "{verify}"
    ).format(
        share=percent(drafts.acceptance), length=f"{drafts.length:.1f}",
        places=places_text(drafts.by_place, 8),
        draft=seconds(drafts.draft_s), verify=seconds(drafts.verify_s),
    )  # fmt: skip
