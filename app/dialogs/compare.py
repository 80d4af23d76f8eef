"""Two baselines side by side: what differs in the configuration, and every metric of both."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QAbstractItemView, QDialog, QHeaderView, QTableView, QWidget

from app import theme
from app.i18n import N_, knob_title, tr, tr_engine, tr_later, tr_n
from app.knob_text import value_text
from app.store.records import BaselineSummary, Comparison, ConfigDiff, MetricDelta
from app.units import NONE, Quantity, bandwidth, change, count, data, percent, rate, seconds, significant
from app.widgets.basic import button, column, label, row
from ipc.messages import KnobValue

METRIC_NAMES = {
    "ttft_s": N_("TTFT"),
    "tpot_s": N_("TPOT"),
    "itl_s": N_("Inter-token latency"),
    "e2e_s": N_("End to end"),
    "queue_s": N_("Queue"),
    "lag_s": N_("Sending lag"),
    "output_tok_s": N_("Output"),
    "prompt_tok_s": N_("Prompt"),
    "request_rate_rps": N_("Request rate"),
    "error_share": N_("Failed requests"),
    "draft_acceptance": N_("Drafts accepted"),
    "draft_length": N_("Tokens a step with a draft"),
    "draft_mean_s": N_("Drafting, a step"),
    "verify_mean_s": N_("Verifying, a step"),
    "weight_bytes": N_("Weights"),
    "original_bytes": N_("Weights kept for changes"),
    "draft_weight_bytes": N_("Draft weights"),
    "draft_kv_bytes": N_("Draft KV"),
    "kv_pool_bytes": N_("KV pool"),
    "other_cores_mean": N_("Other processes, mean"),
    "other_cores_max": N_("Other processes, most"),
    "requests": N_("Requests"),
    "duration_s": N_("Duration"),
}


class CompareDialog(QDialog):
    """Emits `restore_asked` with the id of the baseline whose configuration is wanted."""

    restore_asked = Signal(str)

    def __init__(self, comparison: Comparison, titles: Mapping[str, str], parent: QWidget) -> None:
        """``titles``: what the engine calls its knobs, by id."""
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(tr("Compare baselines"))
        self.comparison = comparison
        self.resize(860, 640)
        heads = row(_who("A", comparison.a), _who("B", comparison.b), spacing=24)
        self.config = _table(
            [tr("Setting"), "A", "B"],
            [_diff_cells(d, titles) for d in (*comparison.config, *comparison.identity)],
        )
        self.metrics = _table(
            [tr("Metric"), "A", "B", tr("B against A"), "n A", "n B", tr("Better")],
            [_metric_cells(m) for m in comparison.metrics],
            right_from=1,
        )
        parts: list[object] = [heads]
        if comparison.warnings:
            text = "\n".join(f"▲ {tr_engine(warning)}" for warning in comparison.warnings)
            parts.append(label(text, "warning", wrap=True))
        same = not comparison.config and not comparison.identity
        parts.append(label(tr("What differs"), "section"))
        parts.append(label(tr("The configurations are equal."), "dim") if same else self.config)
        parts.append(label(tr("What was measured"), "section"))
        parts.append(self.metrics)
        parts.append(
            label(
                tr("A difference of two single runs is no proof; repeat them before you rely on it."), "small"
            )
        )
        restore_a = button(tr("Restore A"), lambda: self.restore_asked.emit(comparison.a.id))
        restore_b = button(tr("Restore B"), lambda: self.restore_asked.emit(comparison.b.id))
        parts.append(row(restore_a, restore_b, None, button(tr("Close"), self.close, "primary")))
        self.setLayout(column(*parts, spacing=8, margins=(16, 14, 16, 14)))
        head = self.config.horizontalHeader().sizeHint().height()
        fit = head + 24 * min(9, self.config.model().rowCount()) + 6
        self.config.setFixedHeight(fit)


def _who(letter: str, item: BaselineSummary) -> QWidget:
    made = QWidget()
    head = label(f"{letter}  {item.name}", "heading")
    requests = tr_n("{n} request", "{n} requests", item.requests).format(n=count(item.requests))
    facts = f"{item.model} · {item.device} · {requests}"
    made.setLayout(
        column(head, label(facts, "dim", wrap=True), label(item.note, "small", wrap=True), spacing=2)
    )
    return made


def _table(heads: list[str], rows: list[list[str]], right_from: int = 99) -> QTableView:
    model = QStandardItemModel(len(rows), len(heads))
    model.setHorizontalHeaderLabels(heads)
    for i, cells in enumerate(rows):
        for j, text in enumerate(cells):
            item = QStandardItem(text)
            item.setEditable(False)
            if j >= right_from:
                item.setTextAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            model.setItem(i, j, item)
    for j in range(len(heads)):
        side = Qt.AlignmentFlag.AlignRight if j >= right_from else Qt.AlignmentFlag.AlignLeft
        model.setHeaderData(j, Qt.Orientation.Horizontal, side, Qt.ItemDataRole.TextAlignmentRole)
    table = QTableView()
    table.setFont(theme.ui_font())
    table.setModel(model)
    model.setParent(table)
    table.setShowGrid(False)
    table.setSelectionMode(QAbstractItemView.SelectionMode.NoSelection)
    table.verticalHeader().hide()
    table.verticalHeader().setDefaultSectionSize(24)
    table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
    table.horizontalHeader().setSectionResizeMode(0, QHeaderView.ResizeMode.ResizeToContents)
    return table


def _diff_cells(diff: ConfigDiff, titles: Mapping[str, str]) -> list[str]:
    a = _setting(diff.a) if diff.in_a else tr("missing")
    b = _setting(diff.b) if diff.in_b else tr("missing")
    return [knob_title(diff.key, titles.get(diff.key) or tr_engine(diff.key)), a, b]


def _setting(value: KnobValue) -> str:
    return value_text(value)


def _metric_cells(metric: MetricDelta) -> list[str]:
    a, b = str(quantity(metric.a, metric.unit)), str(quantity(metric.b, metric.unit))
    # What reads the same is not told to be better.
    better = NONE if a == b else {"a": "A", "b": "B"}.get(metric.better or "", NONE)
    return [
        metric_name(metric.name),
        a,
        b,
        change(metric.b, metric.a),
        str(count(metric.n_a)),
        str(count(metric.n_b)),
        better,
    ]


def metric_name(name: str) -> str:
    """A metric's name for a person: ``ttft_s.p50`` or ``ttft_p50_s`` become ``TTFT p50``."""
    for key, text in METRIC_NAMES.items():
        stem = key.removesuffix("_s")
        for part in ("p50", "p90", "p95", "p99", "mean", "min", "max", "minimum", "maximum"):
            if name in (f"{key}.{part}", f"{key}_{part}", f"{stem}_{part}_s", f"{key} {part}"):
                return f"{tr_later(text)} {part}"
        if name == key:
            return tr_later(text)
    return tr_engine(name.replace("_", " "))


def quantity(value: float | None, unit: str) -> Quantity:
    """A stored metric in its best unit."""
    if unit == "s":
        return seconds(value)
    if unit in ("tok/s", "req/s"):
        return rate(value, unit)
    if unit == "B":
        return data(value)
    if unit == "B/s":
        return bandwidth(value)
    if unit in ("share", "1", "ratio"):
        return percent(value)
    if value is None:
        return Quantity(NONE, unit)
    return Quantity(significant(value), unit)
