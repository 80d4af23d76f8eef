"""Every optimization that the engine's registry declares, each on its own switch; none is built in."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Qt, Signal, Slot
from PySide6.QtWidgets import QApplication, QFrame, QLineEdit, QScrollArea, QStackedLayout, QWidget

from app import status
from app.console import Console, Notice
from app.i18n import N_, tr, tr_later
from app.model.knobs import KnobStatus
from app.panels.knob_notes import SpeculationNote, WeightsNote
from app.widgets.basic import button, column, row, rule
from app.widgets.empty_state import EmptyState
from app.widgets.focus import has_focus, set_enabled
from app.widgets.knob_group import KnobGroup
from app.widgets.knob_row import AUTO, KnobRow
from ipc.messages import KnobInfo

GROUPS = {
    "batching": N_("Batching"), "kv memory": N_("KV memory"), "kv": N_("KV memory"), "weights": N_("Weights"),
    "kernels": N_("Kernels"), "speculation": N_("Speculation"), "text": N_("Text"),
    "measuring": N_("Measuring"),
}  # fmt: skip


def group_title(name: str) -> str:
    """A group's name as a heading."""
    return tr_later(GROUPS[name]) if name in GROUPS else name[:1].upper() + name[1:]


class OptimizationsPanel(QWidget):
    """Rows in the registry's order and groups; unavailable ones behind a line, greyed with the reason."""

    summary_changed = Signal(str)
    baseline_asked = Signal()
    draft_model_asked = Signal()

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._infos: list[KnobInfo] = []
        self._seen: tuple[int, bool, str] | None = None
        self._share: float | None = None  # of a change that is being applied
        self.rows: dict[str, KnobRow] = {}
        self.notes: dict[str, WeightsNote | SpeculationNote] = {}  # by group
        self.area = QScrollArea()
        self.area.setWidgetResizable(True)
        self.area.setFrameShape(QFrame.Shape.NoFrame)
        self.area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.undo = button(
            tr("Undo"), self._on_undo, tip=tr("Ask for the inverse of the last change (Ctrl+Z).")
        )
        self.defaults = button(
            tr("Defaults"), self._on_defaults, tip=tr("Ask for the default of every optimization.")
        )
        self.save = button(
            tr("Save baseline…"), self.baseline_asked.emit, "primary",
            tr("Keep the whole configuration with what was measured under it (Ctrl+S)."),
        )  # fmt: skip
        foot = row(self.undo, self.defaults, None, self.save, margins=(12, 8, 12, 8), spacing=6)
        self.filter = QLineEdit()
        self.filter.setPlaceholderText(tr("Find an optimization"))
        self.filter.setAccessibleName(tr("Find an optimization"))
        self.filter.setClearButtonEnabled(True)
        self.filter.textChanged.connect(self._on_filter)
        self.groups: dict[str, KnobGroup] = {}
        page = QWidget()
        search = row(self.filter, margins=(12, 8, 12, 4))
        page.setLayout(column(search, self.area, rule(), foot, spacing=0))
        self.empty = EmptyState(
            tr("No optimizations yet"),
            tr("The engine names what it can switch as soon as it answers."),
        )
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(page)

    def refresh(self) -> None:
        """Take in what changed in the knob model, if anything did."""
        knobs = self._console.knobs
        ready = self._console.engine_ready
        share = status.applying_share(self._console.session)
        became = self._became()
        if self._seen == (knobs.version, ready, became) and self._share == share:
            return
        self._seen, self._share = (knobs.version, ready, became), share
        self.refresh_figures()
        views = knobs.views()
        infos = [view.info for view in views]
        if infos != self._infos:
            self._rebuild(infos)
        values = knobs.values()
        for view in views:
            auto = became if view.info.id == "attention" and view.applied == AUTO else ""
            self.rows[view.info.id].show_view(view, ready, values, share, auto)
        for group in self.groups.values():
            ids = [made.info.id for made in group.rows]
            group.show_changed(sum(values.get(i) != self.rows[i].info.default for i in ids if i in values))
        pending = sum(view.status is KnobStatus.PENDING for view in views)
        set_enabled(self.undo, ready and knobs.can_undo)
        set_enabled(self.defaults, ready and bool(self._off_default()))
        summary = tr("rev {rev}").format(rev=knobs.rev) if knobs.rev is not None else ""
        if pending and ready:
            summary = tr("{n} pending").format(n=pending)
        self.summary_changed.emit(summary)
        self._stack.setCurrentIndex(1 if views else 0)

    def _became(self) -> str:
        """The attention that ran under the configuration of now, "" as long as no step did."""
        session = self._console.session
        return session.attention if session.attention_rev == self._console.knobs.rev else ""

    def refresh_figures(self) -> None:
        """Write what is measured of a group's optimizations."""
        for note in self.notes.values():
            note.refresh()

    def _rebuild(self, infos: list[KnobInfo]) -> None:
        bar = self.area.verticalScrollBar()
        place = bar.value()
        focused = next((knob for knob, made in self.rows.items() if has_focus(made)), None)
        self._make_groups(infos)
        QApplication.sendPostedEvents(self.area.widget(), QEvent.Type.LayoutRequest.value)
        bar.setValue(place)
        if focused in self.rows:
            self.rows[focused].take_focus()

    def _make_groups(self, infos: list[KnobInfo]) -> None:
        self._infos = infos
        self.rows = {info.id: KnobRow(info) for info in infos}
        for made in self.rows.values():
            made.asked.connect(self._on_asked)
            made.refused.connect(self._on_refused)
        groups: dict[str, list[KnobInfo]] = {}
        for info in infos:
            groups.setdefault(info.group, []).append(info)
        folded = self._console.settings.folded
        self.groups = {}
        self.notes = {}
        if "weights" in groups:
            self.notes["weights"] = WeightsNote(self._console)
        if "speculation" in groups:
            speculation = self.notes["speculation"] = SpeculationNote(self._console)
            speculation.choose_asked.connect(self.draft_model_asked)
        for name, members in groups.items():
            # Nobody folded anything yet: what cannot be used at all need not take a person's eye.
            closed = not any(info.available for info in members) if folded is None else name in folded
            group = KnobGroup(
                group_title(name), [self.rows[info.id] for info in members], closed, self.notes.get(name)
            )
            group.folded_changed.connect(self._on_folded)
            self.groups[name] = group
        page = QWidget()
        page.setProperty("role", "page")
        page.setLayout(column(*self.groups.values(), None, spacing=8, margins=(12, 2, 12, 8)))
        self.area.setWidget(page)
        self._on_filter()

    @Slot()
    def _on_filter(self) -> None:
        for made in self.groups.values():
            made.set_filter(self.filter.text())

    @Slot()
    def _on_folded(self) -> None:
        self._console.settings.folded = [name for name, made in self.groups.items() if made.folded]

    def _off_default(self) -> dict[str, object]:
        views = self._console.knobs.views()
        return {
            v.info.id: v.info.default
            for v in views
            if v.info.available and v.info.apply != "restart" and v.applied != v.info.default
        }

    @Slot(object, object)
    def _on_asked(self, knob: str, value: object) -> None:
        view = self._console.knobs.view(knob)
        if view.applied != value or view.status is KnobStatus.PENDING:
            self._console.change({knob: value})  # type: ignore[dict-item]
        self._seen = None
        self.refresh()

    @Slot(str)
    def _on_refused(self, why: str) -> None:
        self._console.noticed.emit(Notice("warning", why))

    @Slot()
    def _on_undo(self) -> None:
        self._console.knobs.undo()
        self.refresh()

    @Slot()
    def _on_defaults(self) -> None:
        patch = self._off_default()
        if patch:
            self._console.knobs.set(patch)  # type: ignore[arg-type]
        self.refresh()
