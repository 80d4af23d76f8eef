"""One knob: an editor that fits its type, its name, and how its last change ended."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from PySide6.QtCore import QRectF, QSignalBlocker, Qt, QTimer, Signal, Slot
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QKeyEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QStandardItem,
    QStandardItemModel,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QComboBox,
    QDoubleSpinBox,
    QSpinBox,
    QStyle,
    QStyleOptionComboBox,
    QStylePainter,
    QWidget,
)

from app import theme
from app.i18n import N_, knob_help, knob_title, tr, tr_engine, tr_later
from app.knob_text import value_text
from app.model.knobs import KnobStatus, KnobView
from app.net.types import knob_text
from app.units import count, pause, percent
from app.widgets.basic import ElidedLabel, label, plain_tip, row, set_role, set_state
from app.widgets.focus import set_enabled
from app.widgets.number_field import FloatField, IntField
from app.widgets.toggle import ToggleSwitch
from ipc.messages import KnobInfo, KnobValue

COMMIT_MS = 450  # arrow clicks in quick succession make one change
APPLY_TEXT = {
    "step": N_("next step"), "rebuild_kv": N_("rebuilds KV"),
    "reload": N_("converts"), "restart": N_("restarts engine"),
}  # fmt: skip
APPLY_TIP = {
    "step": N_("Applied between two steps; running requests go on."),
    "rebuild_kv": N_("Preempts all requests and allocates the KV pool anew; they resume by recompute."),
    "reload": N_(
        "Requests wait while the weights are converted, which takes seconds, and resume by recompute. AWQ "
        "(int4) searches its codes first, which takes minutes the first time; rtn does not."
    ),
    "restart": N_("Needs a new engine process."),
}
ADVICE = {("speculation", "draft"): N_("choose one under “Draft model” below")}
"""What a person can do about a choice that is not available."""
AUTO = "auto"
"""The choice that leaves it to the engine."""
EDITOR_WIDTH = 104
INT_MAX = 2**31 - 1


class _Choice(QComboBox):
    """The list says why a choice cannot be had; there is no room for that where it is closed."""

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # it scrolls the panel and never changes a value by accident

    def paintEvent(self, event: QPaintEvent) -> None:
        option = QStyleOptionComboBox()
        self.initStyleOption(option)
        option.currentText = tr_engine(str(self.currentData()))
        painter = QStylePainter(self)
        painter.drawComplexControl(QStyle.ComplexControl.CC_ComboBox, option)
        painter.drawControl(QStyle.ControlElement.CE_ComboBoxLabel, option)


class KnobRow(QWidget):
    """Shows a `KnobView` and emits `asked` with the knob's id and the value that a person chose.

    ``refused`` tells of one that cannot be had, in words; nothing is asked for then.
    """

    asked = Signal(object, object)
    refused = Signal(str)

    def __init__(self, info: KnobInfo) -> None:
        super().__init__()
        self.info = info
        self.title = label(knob_title(info.id, info.title))
        self.setAccessibleName(self.title.text())
        self.status = ElidedLabel("", "small")
        self.status.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self._problem = ""  # why what was typed last was not taken
        self.editor = self._make_editor()
        self.editor.setAccessibleName(self.title.text())
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(COMMIT_MS)
        self._timer.timeout.connect(self._commit)
        line = row(self.title, self.status, self.editor, spacing=8)
        line.setStretchFactor(self.status, 1)
        line.setContentsMargins(0, 1, 0, 1)
        self.setLayout(line)
        # What cannot be changed here needs no editor: its name and the reason say all.
        self.editor.setVisible(info.available)
        tip = self._tip()
        for part in (self, self.title, self.editor):
            part.setToolTip(plain_tip(tip))
        self.setAccessibleDescription(tip)
        self.editor.setAccessibleDescription(tip)

    # --- editors ------------------------------------------------------------------------------------

    def _make_editor(self) -> ToggleSwitch | QSpinBox | QDoubleSpinBox | QComboBox:
        info = self.info
        if info.type == "bool":
            switch = ToggleSwitch(info.title)
            switch.clicked.connect(self._on_switch)
            return switch
        if info.type == "choice":
            return self._make_choice()
        made: IntField | FloatField = IntField() if info.type == "int" else FloatField()
        low = info.minimum if info.minimum is not None else 0.0
        high = info.maximum if info.maximum is not None else float(INT_MAX)
        if isinstance(made, QSpinBox):
            made.setRange(max(-INT_MAX, int(low)), min(INT_MAX, int(high)))
            made.setGroupSeparatorShown(True)
            made.setStepType(QSpinBox.StepType.AdaptiveDecimalStepType)
            made.valueChanged.connect(self._on_edit)
        else:
            made.setRange(low, high)
            made.setDecimals(3)
            made.setStepType(QDoubleSpinBox.StepType.AdaptiveDecimalStepType)
            made.valueChanged.connect(self._on_edit)
        if info.unit and len(info.unit) <= 3:
            made.setSuffix(f" {info.unit}")
        made.refused.connect(self._on_refused)
        made.setFixedWidth(EDITOR_WIDTH)
        made.setAlignment(Qt.AlignmentFlag.AlignRight)
        return made

    def _make_choice(self) -> QComboBox:
        made = _Choice()
        for choice in self.info.choices:
            made.addItem(tr_engine(choice), choice)
            reason = self.info.choice_reasons.get(choice)
            model = made.model()
            if reason and isinstance(model, QStandardItemModel):
                item: QStandardItem = model.item(made.count() - 1)
                item.setEnabled(False)
                advice = ADVICE.get((self.info.id, choice))
                why = "; ".join([tr_engine(reason), *([tr_later(advice)] if advice else [])])
                item.setToolTip(plain_tip(why))
                item.setText(f"{tr_engine(choice)} ({why})")
        made.setFixedWidth(EDITOR_WIDTH)
        made.view().setMinimumWidth(max(EDITOR_WIDTH, made.view().sizeHintForColumn(0) + 24))
        made.activated.connect(self._on_choice)
        return made

    @Slot()
    def _on_switch(self) -> None:
        self._ask(self.editor.isChecked() if isinstance(self.editor, ToggleSwitch) else None)

    @Slot()
    def _on_choice(self) -> None:
        if isinstance(self.editor, QComboBox):
            self._ask(self.editor.currentData())

    @Slot()
    def _on_edit(self) -> None:
        if self._problem:
            self._problem = ""
            self._say("", "small")
        self._timer.start()

    @Slot(str, str)
    def _on_refused(self, _name: str, why: str) -> None:
        self._problem = why
        self._say(why, "alarm")
        self.refused.emit(tr("{name}: {why}").format(name=self.title.text(), why=why))

    @Slot()
    def _commit(self) -> None:
        if isinstance(self.editor, QSpinBox | QDoubleSpinBox):
            self._ask(self.editor.value())

    def _ask(self, value: KnobValue) -> None:
        self._problem = ""
        self.asked.emit(self.info.id, value)

    # --- focus --------------------------------------------------------------------------------------

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """While the focus waits here, a key that was meant for the editor does nothing."""
        event.accept()

    def take_focus(self) -> None:
        """Have the keyboard act upon this knob, now or as soon as it can be used."""
        self.editor.setFocus(Qt.FocusReason.OtherFocusReason)

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        """Frame the editor while the focus waits for it."""
        if self.hasFocus():
            painter = QPainter(self)
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            painter.setPen(QPen(QColor(theme.tokens().accent), 1))
            box = QRectF(self.editor.geometry()).adjusted(-1.5, -0.5, 1.5, 0.5)
            painter.drawRoundedRect(box, 5, 5)

    # --- state --------------------------------------------------------------------------------------

    def matches(self, text: str) -> bool:
        """Whether a word of name, id or help begins with ``text`` (casefolded).

        Texts without spaces between their words, as Chinese ones, may hold it anywhere.
        """
        words = (self.title.text(), self.info.id, self.info.title, knob_help(self.info.id, self.info.help))
        begin = r"(?<![a-z0-9])" if text[:1].isascii() and text[:1].isalnum() else ""
        pattern = re.compile(begin + re.escape(text))
        return any(pattern.search(word.casefold()) for word in words)

    def show_view(
        self,
        view: KnobView,
        enabled: bool,
        values: Mapping[str, KnobValue],
        share: float | None = None,
        became: str = "",
    ) -> None:
        """Show what is applied, what is asked for and how it stands.

        ``enabled``: the engine can be asked. ``values``: what all knobs have, for those that this one needs.
        ``share``: how far the change is that the engine applies now, None where it does not say.
        ``became``: what a choice that was left to the engine became, as far as it is known.
        """
        pending = view.status is KnobStatus.PENDING and enabled
        usable = enabled and self.info.available and self.info.apply != "restart"
        self._set_usable(usable and not pending)
        self._show_value(view.desired)
        self.title.setEnabled(self.info.available)
        if isinstance(self.editor, ToggleSwitch):
            self.editor.set_pending(pending)
        else:
            set_state(self.editor, "state", "pending" if pending else "")
        needs = self.info.requires.items()
        idle = [other for other, value in needs if knob_text(values.get(other)) not in value.split(" or ")]
        text, role = self._status(view, pending, bool(idle), share)
        settled = bool(became) and not pending and view.status is KnobStatus.APPLIED
        if settled:
            text, role = f"{tr_engine(AUTO)} → {became}", "small"
        if self._problem and not pending:
            self._say(self._problem, "alarm")
            return
        self._say(text, role)
        if text and view.reason:
            self.status.setToolTip(plain_tip(tr_engine(view.reason)))
        elif settled:
            tip = tr("What the engine chose: steps run {name}.").format(name=became)
            self.status.setToolTip(plain_tip(tip))
        elif text and view.preempted:
            more = tr("Requests that lost their place and went on by recompute: {n}.")
            self.status.setToolTip(plain_tip(f"{text}. {more.format(n=count(view.preempted))}"))

    def _say(self, text: str, role: str) -> None:
        self.status.set_full_text(text)
        set_role(self.status, role)

    def _set_usable(self, usable: bool) -> None:
        """Let the editor be used or not. What was typed and not asked for yet is given up with its use."""
        if not usable and self.editor.isEnabled():
            self._timer.stop()
            if isinstance(self.editor, QComboBox):
                self.editor.hidePopup()
            with QSignalBlocker(self.editor):
                set_enabled(self.editor, False)
        set_enabled(self.editor, usable)

    def _show_value(self, value: KnobValue) -> None:
        if self._timer.isActive() or (self.editor.hasFocus() and self._is_typing()):
            return
        with QSignalBlocker(self.editor):
            if isinstance(self.editor, ToggleSwitch):
                self.editor.setChecked(bool(value))
            elif isinstance(self.editor, QComboBox):
                self.editor.setCurrentIndex(self.editor.findData(value))
            elif isinstance(value, int | float) and math.isfinite(value):
                if isinstance(self.editor, QSpinBox):
                    self.editor.setValue(int(value))
                else:
                    self.editor.setValue(float(value))

    def _is_typing(self) -> bool:
        if isinstance(self.editor, QSpinBox | QDoubleSpinBox):
            return bool(self.editor.lineEdit().isModified())
        return False

    def _status(self, view: KnobView, pending: bool, idle: bool, share: float | None) -> tuple[str, str]:
        if not self.info.available:
            return tr_engine(self.info.reason), "small"
        if pending:
            if share is not None and (self.info.apply == "reload" or self.info.group == "speculation"):
                return tr("{share} done").format(share=percent(share)), "warning"
            return tr("applying…"), "warning"
        if view.status is KnobStatus.REFUSED:
            return tr("refused: {why}").format(why=tr_engine(view.reason)), "alarm"
        if view.took_s is not None:
            return tr("applied, {time}").format(time=pause(view.took_s)), "small"
        if idle:
            return tr("no effect"), "small"
        return (
            (tr_later(APPLY_TEXT[self.info.apply]), "small") if self.info.apply != "step" else ("", "small")
        )

    def _tip(self) -> str:
        info = self.info
        lines = [knob_help(info.id, info.help)]
        if info.unit:
            lines.append(tr("Unit: {unit}").format(unit=tr_engine(info.unit)))
        if info.minimum is not None and info.maximum is not None:
            lines.append(
                tr("Range: {low} to {high}").format(low=f"{info.minimum:g}", high=f"{info.maximum:g}")
            )
        lines.append(tr("Default: {value}").format(value=value_text(info.default)))
        lines.append(tr_later(APPLY_TIP[info.apply]))
        if info.lossy:
            lines.append(tr("May change outputs."))
        for other, value in info.requires.items():
            lines.append(tr("Needs {knob} = {value}").format(knob=other, value=value))
        if not info.available:
            lines.append(tr("Not available: {why}").format(why=tr_engine(info.reason)))
        return "\n".join(line for line in lines if line)
