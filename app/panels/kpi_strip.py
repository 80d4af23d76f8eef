"""The strip at the top: eight figures that say how the engine does, coloured only where one is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PySide6.QtWidgets import QWidget

from app.console import Console
from app.i18n import N_, tr, tr_later, tr_n
from app.model.session import Figure, Kpis
from app.panels.view import basis
from app.units import NONE, Quantity, bandwidth, count, pause, percent, rate, seconds, span
from app.widgets.basic import row
from app.widgets.kpi_tile import KpiTile

SPARK_S = 60.0
KV_WARNING, KV_ALARM = 0.90, 0.98


@dataclass(frozen=True, slots=True)
class Shown:
    """What a tile shows."""

    quantity: Quantity
    note: str
    level: str = "ok"
    aside: str = ""  # for the tooltip


@dataclass(frozen=True, slots=True)
class TileSpec:
    """One tile: ``column`` of the timeline is its sparkline."""

    id: str
    title: str
    definition: str
    column: str
    show: Callable[[Kpis, Console], Shown]


def _none(figure: Figure) -> str:
    """A word or two on why there is no figure; the whole reason would not fit a tile."""
    if figure.why_none == "no engine runs":
        return tr("engine not running")
    return tr("no engine") if figure.why_none == "no engine" else tr("no traffic")


def _latency(figure: Figure, kept: float | None, pause_s: float | None) -> Shown:
    note = basis(figure) if figure.value is not None else _none(figure)
    asides = []
    if kept:
        aside = tr_n(
            "{n} answer came from the result cache in this window and is left out.",
            "{n} answers came from the result cache in this window and are left out.",
            kept,
        )
        asides.append(aside.format(n=count(kept)))
    if pause_s and figure.value is not None:
        note = tr("with a pause of {time}").format(time=pause(pause_s))
        aside = tr("Requests in this window waited up to {time} for a change; that is in the figure. {basis}")
        asides.append(aside.format(time=pause(pause_s), basis=basis(figure)))
    return Shown(seconds(figure.value), note, aside=" ".join(asides))


def _output(kpis: Kpis, _console: Console) -> Shown:
    figure = kpis.output_tok_s
    prompt = tr("prompt {rate}").format(rate=rate(kpis.prefill_tok_s.value))
    return Shown(rate(figure.value), prompt if figure.value is not None else _none(figure))


def _running(kpis: Kpis, _console: Console) -> Shown:
    running, waiting = kpis.running.value, kpis.waiting.value
    if running is None:
        return Shown(Quantity(NONE, ""), _none(kpis.running))
    value = f"{running:.0f} / {waiting or 0:.0f}"
    done = tr("{rate} done").format(rate=rate(kpis.finished_req_s.value or 0.0, "req/s"))
    return Shown(Quantity(value, ""), done if running or waiting else tr("idle"))


def _kv(kpis: Kpis, _console: Console) -> Shown:
    figure = kpis.kv_used_share
    if figure.value is None:
        return Shown(Quantity(NONE, "%"), _none(figure))
    level = "alarm" if figure.value >= KV_ALARM else "warning" if figure.value >= KV_WARNING else "ok"
    note = tr("cached {share}").format(share=percent(kpis.kv_cached_share.value))
    return Shown(percent(figure.value), note, level)


def _hits(kpis: Kpis, console: Console) -> Shown:
    figure = kpis.hit_rate
    if figure.value is None:
        values = console.knobs.values() if console.knobs.rev is not None else {}
        off = values.get("prefix_cache") is False
        return Shown(Quantity(NONE, "%"), tr("prefix cache off") if off else tr("no look-ups"))
    return Shown(percent(figure.value), tr("in {window}").format(window=span(figure.window_s or 0.0)))


def _bandwidth(kpis: Kpis, console: Console) -> Shown:
    figure = kpis.bandwidth_share
    if figure.value is None:
        return Shown(Quantity(NONE, "%"), _none(figure))
    used = console.session.roofline().bandwidth_bytes_s
    return Shown(percent(figure.value), tr("{rate} modelled").format(rate=bandwidth(used)))


def _preemptions(kpis: Kpis, console: Console) -> Shown:
    figure = kpis.preemptions
    if figure.value is None:
        return Shown(Quantity(NONE, ""), _none(figure))
    session = console.session
    since_s = session.now_s - session.window_s
    reasons = {p.event.reason for p in session.preemptions if p.t_s > since_s}
    level = "warning" if figure.value > 0 and reasons != {"rebuild"} else "ok"
    note = tr("in {window}").format(window=span(figure.window_s) if figure.window_s else "")
    if level == "warning":
        small = not reasons or "blocks" in reasons
        note = tr("KV pool too small") if small else tr("for priority")
    elif figure.value > 0:
        note = tr("KV pool rebuilt")
    tax = kpis.recompute_share.value
    aside = tr("Recompute tax: {share} of the forward passes' time.")
    aside = aside.format(share=percent(tax)) if tax else ""
    errors = kpis.error_share.value
    if errors:
        return Shown(count(figure.value), tr("{share} failed").format(share=percent(errors)), "alarm")
    return Shown(count(figure.value), note, level, aside)


TILES: tuple[TileSpec, ...] = (
    TileSpec(
        "ttft",
        N_("TTFT p95"),
        N_(
            "Time to first token, 95th percentile: from a request's arrival at the engine to its first "
            "token. n requests that got their first token in the trailing window. Answers from the result "
            "cache are left out."
        ),
        "ttft_p95_s",
        lambda k, c: _latency(k.ttft_p95_s, k.result_cached.value, k.ttft_pause_s),
    ),
    TileSpec(
        "tpot",
        N_("TPOT p95"),
        N_(
            "Time per output token, 95th percentile: (last − first token) / (tokens − 1) of each request "
            "that ended in the trailing window. Requests of one token have none, nor have answers from the "
            "result cache."
        ),
        "tpot_p95_s",
        lambda k, c: _latency(k.tpot_p95_s, k.result_cached.value, k.tpot_pause_s),
    ),
    TileSpec(
        "output",
        N_("Output"),
        N_(
            "Tokens generated per second of wall time over the trailing window; below it the prompt tokens "
            "computed per second."
        ),
        "output_tok_s",
        _output,
    ),
    TileSpec(
        "running",
        N_("Running / waiting"),
        N_(
            "Requests in the batch now, and requests that wait for a place; below it requests "
            "ended per second."
        ),
        "running",
        _running,
    ),
    TileSpec(
        "kv",
        N_("KV cache used"),
        N_(
            "Blocks that a live request refers to, of all blocks. Cached blocks are free to be taken and "
            "keep their content for reuse. Warns from 90 %, alarms from 98 %."
        ),
        "kv_used_share",
        _kv,
    ),
    TileSpec(
        "hits",
        N_("Prefix hits"),
        N_(
            "Prompt tokens found in the prefix cache, of all prompt tokens looked up at admission in the "
            "trailing window."
        ),
        "hit_rate",
        _hits,
    ),
    TileSpec(
        "bandwidth",
        N_("Bandwidth"),
        N_(
            "Modelled bytes (weights and KV) per second of step time, as a share of the copy bandwidth "
            "that was measured on this machine when the engine started."
        ),
        "step_bytes_s",
        _bandwidth,
    ),
    TileSpec(
        "preempted",
        N_("Preempted"),
        N_(
            "Requests that lost their place and were put back to wait, in the trailing window: no block was "
            "left, so the pool is too small for this load; a request of higher priority came; or the pool "
            "was rebuilt."
        ),
        "preempted",
        _preemptions,
    ),
)


class KpiStrip(QWidget):
    """Refreshed twice a second."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.tiles = {spec.id: KpiTile(tr_later(spec.title), tr_later(spec.definition)) for spec in TILES}
        self.setLayout(row(*self.tiles.values(), spacing=8))

    def refresh(self) -> None:
        """Show the figures of the trailing window."""
        session = self._console.session
        kpis = session.kpis()
        stale = session.link.data_age_s is not None and session.link.data_age_s > 2.0
        for spec in TILES:
            tile = self.tiles[spec.id]
            shown = spec.show(kpis, self._console)
            old = stale and shown.quantity.value != NONE  # what is not known does not age
            note = tr("stale") if old else shown.note
            tile.show_value(shown.quantity, note, "ok" if old else shown.level, shown.aside)
            values = session.timeline.column(spec.column, SPARK_S)
            tile.set_spark(np.asarray(values))
