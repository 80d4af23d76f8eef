"""Help: the shortcuts, what the figures mean, and what this is."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QDialog, QFrame, QGridLayout, QScrollArea, QWidget

from app import __version__, theme
from app.console import Console
from app.i18n import N_, tr, tr_later
from app.panels.knob_notes import ACCEPTED, BY_PLACE, LENGTH
from app.panels.kpi_strip import TILES
from app.panels.memory import PARTS, RAN
from app.panels.stages import STACKED
from app.panels.timeline import RECOMPUTE_TAX, SEATS_BUSY
from app.widgets.basic import button, column, label, row
from app.widgets.command_palette import title_of

MORE = (
    (
        N_("n and window"),
        N_(
            "Each percentile names its sample: n values over the trailing window. No value is "
            "shown where nothing was measured; an empty sample is never 0."
        ),
    ),
    (
        N_("Vertical lines"),
        N_("A change of the configuration, at the step from which it holds. Amber: it was rolled back."),
    ),
    (N_("Grey bands"), N_("Telemetry was lost or the engine was away: nothing is known there.")),
    (N_("Waste"), N_("Token places in used blocks that hold no token.")),
    (N_("Stages"), STACKED),
    (N_("Seats busy"), SEATS_BUSY),
    (N_("Recompute tax"), RECOMPUTE_TAX),
    (N_("Drafts accepted"), ACCEPTED),
    (N_("Tokens a step with a draft"), LENGTH),
    (N_("Accepted by place"), BY_PLACE),
    (N_("Weights"), PARTS["weights"].tip),
    (N_("Kept for changes"), PARTS["originals"].tip),
    (N_("Linear layers run as"), RAN),
)


def _dialog(parent: QWidget, title: str, body: QWidget, width: int, height: int) -> QDialog:
    made = QDialog(parent)
    made.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    made.setWindowTitle(title)
    scroll = QScrollArea()
    scroll.setWidgetResizable(True)
    scroll.setFrameShape(QFrame.Shape.NoFrame)
    scroll.setWidget(body)
    close = button(tr("Close"), made.close, "primary")
    made.setLayout(column(scroll, row(None, close), spacing=10, margins=(16, 14, 16, 14)))
    made.resize(width, height)
    return made


def shortcuts_dialog(parent: QWidget, actions: Sequence[QAction]) -> QDialog:
    """Every command that has a shortcut."""
    body = QWidget()
    grid = QGridLayout(body)
    grid.setHorizontalSpacing(24)
    shown = [action for action in actions if not action.shortcut().isEmpty()]
    for i, action in enumerate(shown):
        keys = label(action.shortcut().toString())
        keys.setFont(theme.fixed_font())
        grid.addWidget(label(title_of(action)), i, 0)
        grid.addWidget(keys, i, 1)
    grid.setRowStretch(len(shown), 1)
    return _dialog(parent, tr("Keyboard shortcuts"), body, 460, 560)


def metrics_dialog(parent: QWidget) -> QDialog:
    """The definition of every figure."""
    body = QWidget()
    parts: list[object] = []
    for title, text in (*((spec.title, spec.definition) for spec in TILES), *MORE):
        parts.append(label(tr_later(title), "title"))
        parts.append(label(tr_later(text), "dim", wrap=True))
        parts.append(4)
    body.setLayout(column(*parts, None, spacing=2))
    return _dialog(parent, tr("What the figures mean"), body, 560, 560)


def about_dialog(parent: QWidget, console: Console) -> QDialog:
    """Versions of console and engine."""
    lines = [tr("Decodeck {version}").format(version=__version__)]
    engine = console.session.link.engine
    if engine is not None:
        text = tr("Engine {version}, torch {torch}, Python {python}")
        lines.append(text.format(version=engine.version, torch=engine.torch, python=engine.python))
    lines.append(tr("Settings and baselines: {path}").format(path=console.settings.path.parent))
    body = QWidget()
    head = label(lines[0], "heading")
    what = label(
        tr("Flips LLM inference optimizations live and says honestly what each one did."), "dim", wrap=True
    )
    body.setLayout(column(head, what, *(label(line, "small", wrap=True) for line in lines[1:]), None))
    return _dialog(parent, tr("About Decodeck"), body, 460, 230)
