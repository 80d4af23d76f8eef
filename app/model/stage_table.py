"""A Qt table model of the stages: what each took of a step and of a request, and when the chart is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, Qt
from PySide6.QtGui import QColor

from app import theme
from app.i18n import N_, tr, tr_later
from app.model.stages import BESIDE, FORWARD_PARTS, StageTimes
from app.units import NONE, milliseconds, percent
from app.widgets.basic import plain_tip

AnyIndex = QModelIndex | QPersistentModelIndex
WHOLE = "whole"
ROW_HEIGHT = 17


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One line: its name, what it covers, and the colour of its layer in the chart."""

    key: str
    title: str
    tip: str
    colour: str = ""
    always: bool = True  # shown even where it took no time


STAGES: tuple[StageSpec, ...] = (
    StageSpec(
        WHOLE,
        N_("whole"),
        N_(
            "Step: what it cost the engine, all that was waited for. Request: from arrival to end (E2E). "
            "The shares of the exposed stages add up to it."
        ),
    ),
    StageSpec(
        "queue",
        N_("queue"),
        N_("From a request's arrival to the first step that worked on it, without its tokenizing."),
    ),
    StageSpec(
        "forward",
        N_("forward"),
        N_("The model computes. Its parts are told while “Split the forward pass” is on."),
        "stage_forward",
    ),
    StageSpec(
        "linear",
        N_("linear"),
        N_("Of the forward pass: the layers' matrix products. Mean of the steps that were split."),
        "stage_linear",
        always=False,
    ),
    StageSpec(
        "attention",
        N_("attention"),
        N_("Of the forward pass: attention over keys and values. Mean of the steps that were split."),
        "stage_attention",
        always=False,
    ),
    StageSpec(
        "head",
        N_("head"),
        N_("Of the forward pass: the product that gives the logits. Mean of the steps that were split."),
        "stage_head",
        always=False,
    ),
    StageSpec(
        "rest",
        N_("rest"),
        N_("Of the forward pass: norms, rotary embedding, activations, and what lies between."),
        "stage_rest",
        always=False,
    ),
    StageSpec("sample", N_("sample"), N_("The next tokens are drawn from the logits."), "stage_sample"),
    StageSpec(
        "plan",
        N_("plan"),
        N_("The scheduler decides who computes how many tokens, finds their blocks, and drafts are sought."),
        "stage_plan",
    ),
    StageSpec(
        "prepare",
        N_("prepare"),
        N_("Index tensors and the attention's plan are made for the step."),
        "stage_prepare",
    ),
    StageSpec(
        "publish",
        N_("publish"),
        N_("The rows of the step before are handed to the thread that sends them."),
        "stage_publish",
    ),
    StageSpec(
        "copy",
        N_("copy"),
        N_("KV blocks are copied to host memory and back."),
        "stage_copy",
        always=False,
    ),
    StageSpec(
        "other",
        N_("other"),
        N_(
            "What no stage names. Step: taking in the new tokens and the loop itself. Request: publishing, "
            "taking in tokens, and waiting for a step to end."
        ),
        "stage_other",
    ),
    StageSpec(
        "preempted",
        N_("preempted"),
        N_("The request had lost its place and waited for another one."),
        always=False,
    ),
    StageSpec(
        "tokenize",
        N_("tokenize"),
        N_("Prompts become tokens, in a thread of their own. A request waits for its own; no step does."),
        "stage_tokenize",
    ),
    StageSpec(
        "detokenize",
        N_("detokenize"),
        N_("New tokens become text, in a thread of their own. No step waits for it."),
        "stage_detokenize",
    ),
    StageSpec(
        "send",
        N_("send"),
        N_("Text and rows are encoded and sent, in the thread of the sockets. No step waits for it."),
        "stage_send",
    ),
)  # fmt: skip

HEADS = (
    (N_("Stage"), N_("Where the time goes. Point at a name to read what it covers.")),
    (
        N_("now"),
        N_(
            "The layers of the chart, in ms: mean of the steps of the half second under the crosshair, else "
            "of the newest. Of plan, prepare and publish it is the exposed part."
        ),
    ),
    (
        N_("step"),
        N_("Mean over the steps of the window, in ms: all the work of the stage, exposed or hidden."),
    ),
    (N_("± std"), N_("Standard deviation over the steps of the window, in ms.")),
    (
        N_("share"),
        N_("The exposed part of the stage, of what a step costs. Hidden: all of it was done meanwhile."),
    ),
    (
        N_("request"),
        N_(
            "Mean over the requests that ended well in the window, in ms: its own stages, and the engine's "
            "stages while it ran."
        ),
    ),
    (N_("± std"), N_("Standard deviation over the requests of the window, in ms.")),
    (
        N_("share"),
        N_("Of the time from arrival to end. With overlap, hidden work makes the sum exceed 100 %."),
    ),
)  # fmt: skip
STEP, REQUEST = 2, 5  # first column of each block


class StageTable(QAbstractTableModel):
    """Rows that could say nothing are left out; they come with their first time."""

    def __init__(self) -> None:
        super().__init__()
        self._steps, self._requests = StageTimes(), StageTimes()
        self._now: Mapping[str, float] = {}
        self._when = ""
        self._rows = [spec for spec in STAGES if spec.always]

    def set_times(self, steps: StageTimes, requests: StageTimes) -> None:
        """Show the stages of the trailing window."""
        self._steps, self._requests = steps, requests
        rows = [spec for spec in STAGES if spec.always or self._took_time(spec.key)]
        if rows != self._rows:
            self.beginResetModel()
            self._rows = rows
            self.endResetModel()
        else:
            self._tell(STEP, len(HEADS) - 1)

    def set_reading(self, when: str, values: Mapping[str, float]) -> None:
        """Show what the chart reads under its crosshair, or now."""
        self._now = values
        if when != self._when:
            self._when = when
            self.headerDataChanged.emit(Qt.Orientation.Horizontal, 1, 1)
        self._tell(1, 1)

    def _tell(self, first: int, last: int) -> None:
        self.dataChanged.emit(self.index(0, first), self.index(len(self._rows) - 1, last))

    def _took_time(self, key: str) -> bool:
        return self._steps.mean_s.get(key, 0.0) > 0 or self._requests.mean_s.get(key, 0.0) > 0

    @property
    def rows(self) -> Sequence[StageSpec]:
        return self._rows

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(HEADS)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or not 0 <= index.row() < len(self._rows):
            return None
        spec, at = self._rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(spec, at)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(tr_later(spec.tip if at == 0 else HEADS[at][1]))
        if role == Qt.ItemDataRole.DecorationRole and at == 0:
            return theme.colour(spec.colour) if spec.colour else QColor(Qt.GlobalColor.transparent)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if at else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        if role == Qt.ItemDataRole.FontRole:
            return theme.ui_font(0.9, bold=spec.key == WHOLE)
        return None

    def _text(self, spec: StageSpec, at: int) -> str:
        if at == 0:
            name = tr_later(spec.title)
            return f"    {name}" if spec.key in FORWARD_PARTS else name
        if at == 1:
            return _ms(self._now.get(spec.key))
        times, which = (self._steps, at - STEP) if at < REQUEST else (self._requests, at - REQUEST)
        if which == 2:
            return _share(times, spec.key)
        if spec.key == WHOLE:
            return _ms(times.total_std_s if which else times.total_mean_s)
        return _ms((times.std_s if which else times.mean_s).get(spec.key))

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> object:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._when if section == 1 and self._when else tr_later(HEADS[section][0])
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(tr_later(HEADS[section][1]))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if section else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None


def _ms(value_s: float | None) -> str:
    """In ms. The engine counts whole microseconds: far below one, only rounding is left."""
    return milliseconds(None if value_s is None else round(value_s, 8)).value


def _share(times: StageTimes, key: str) -> str:
    if times.n == 0 or (key != WHOLE and key not in times.mean_s):
        return NONE
    if key == WHOLE:
        return str(percent(1.0))
    share = times.share.get(key)
    return tr("hidden") if share is None and key in BESIDE else str(percent(share))
