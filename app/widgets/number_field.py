"""Fields for numbers that take what a person types, and refuse what they cannot have instead of bending it.

Qt's own fields swallow the digit that would lead out of the range: 99999 became 999 and was applied. Here all
of it can be typed; what is out of range is said, and the value stays as it was.
"""

from __future__ import annotations

import re

from PySide6.QtCore import QLocale, Signal
from PySide6.QtGui import QValidator, QWheelEvent
from PySide6.QtWidgets import QDoubleSpinBox, QSpinBox, QWidget

from app.i18n import tr

LEFT_MARGIN = 5  # the style sheet's padding does not reach the text of a field with arrows
Verdict = tuple[QValidator.State, str, int]  # with the text and where its cursor stands
_NUMBER = re.compile(r"[-+]?(\d+[.]?\d*|[.]\d+)(e[-+]?\d+)?", re.IGNORECASE)
_BEGUN = re.compile(r"[-+]?\d*[.]?\d*(e[-+]?\d*)?", re.IGNORECASE)


def number_text(value: float, decimals: int) -> str:
    """A number as these fields write it: ``1,024`` or ``0.125``."""
    return f"{value:,.{decimals}f}".rstrip("0").rstrip(".") if decimals else f"{value:,.0f}"


def _plain(text: str, prefix: str, suffix: str) -> str:
    """What was typed, without unit and separators of thousands."""
    core = text.removeprefix(prefix).removesuffix(suffix).removesuffix(suffix.rstrip())
    return re.sub(r"[\s,]", "", core)


def _refusal(text: str, low: float, high: float, decimals: int) -> str:
    """Why ``text`` (see `_plain`) cannot be had, "" where nothing was typed that can be told about."""
    if not _NUMBER.fullmatch(text):
        return ""
    value = float(text)
    names = {"value": text, "low": number_text(low, decimals), "high": number_text(high, decimals)}
    if not low <= value <= high:
        return tr("{value} is not within {low} to {high}").format(**names)
    if decimals:
        return tr("{value} has more than {n} decimals").format(value=text, n=decimals)
    return tr("{value} is not a whole number").format(**names)


class IntField(QSpinBox):
    """A whole number. The wheel scrolls the panel; what is typed counts once it is whole.

    ``refused`` tells this field's name, and why what was typed is not taken.
    """

    refused = Signal(str, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setKeyboardTracking(False)
        self.setLocale(QLocale(QLocale.Language.English))  # as the console writes all numbers
        self.lineEdit().setTextMargins(LEFT_MARGIN, 0, 0, 0)

    def validate(self, text: str, position: int) -> Verdict:
        found = super().validate(text, position)
        return _lenient(found, text, position, _plain(text, self.prefix(), self.suffix()))

    def fixup(self, text: str) -> str:
        """What cannot be taken is told of, and Qt goes back to the value there was."""
        why = _refusal(_plain(text, self.prefix(), self.suffix()), self.minimum(), self.maximum(), 0)
        if why:
            self.refused.emit(self.accessibleName(), why)
        return text

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()


class FloatField(QDoubleSpinBox):
    """As `IntField`, with decimals."""

    refused = Signal(str, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setKeyboardTracking(False)
        self.setLocale(QLocale(QLocale.Language.English))
        self.lineEdit().setTextMargins(LEFT_MARGIN, 0, 0, 0)

    def textFromValue(self, value: float) -> str:
        return number_text(value, self.decimals()).replace(",", "")

    def validate(self, text: str, position: int) -> Verdict:
        found = super().validate(text, position)
        return _lenient(found, text, position, _plain(text, self.prefix(), self.suffix()))

    def fixup(self, text: str) -> str:
        core = _plain(text, self.prefix(), self.suffix())
        why = _refusal(core, self.minimum(), self.maximum(), self.decimals())
        if why:
            self.refused.emit(self.accessibleName(), why)
        return text

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()


def _lenient(found: Verdict, text: str, position: int, core: str) -> Verdict:
    """Qt's verdict, but that a number which it would not let be typed may be typed on."""
    if found[0] == QValidator.State.Invalid and _BEGUN.fullmatch(core):
        return QValidator.State.Intermediate, text, position
    return found
