"""What the window says where a figure may mislead, or where there is something else to do."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from PySide6.QtCore import QPoint, QRect, Qt

from app import i18n
from app.console import Console
from app.dialogs.compare import CompareDialog
from app.main_window import MainWindow
from app.net.types import LaunchSpec, LinkState
from app.panels.baselines import HEADS, BaselineTable
from app.status import banner_message
from app.store.compare import compare, other_work
from app.store.records import Baseline, BaselineSummary
from tests.app import builders as b
from tests.app.builders import baseline
from tests.app.gui.conftest import beat, discard
from tests.app.gui.feed import FeedLink


def box(window: MainWindow, part: object) -> QRect:
    return QRect(part.mapTo(window, QPoint(0, 0)), part.size())  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [(1280, 800), (1440, 900)])
@pytest.mark.parametrize("language", ["en", "zh_CN"])
def test_the_news_of_a_change_hide_nothing(
    console: Console, link: FeedLink, size: tuple[int, int], language: str
) -> None:
    i18n.use(language)
    window = MainWindow(console)
    window.resize(*size)
    window.show()
    link.ready()
    beat(window)
    link.push(state=b.state(phase="applying", stage="converting weights", pending_apply=7, running=3,
                            done_bytes=43, total_bytes=100))  # fmt: skip
    beat(window)
    news = window.change_banner
    assert news.isVisible()
    there = box(window, news)
    assert window.rect().contains(there)
    charts = (window.ttft, window.tpot, window.throughput)
    for part in (window.load_bar, window.kpis, window._search, *charts, *window.docks.values()):
        assert not there.intersects(box(window, part)), part
    menus = [window.menuBar().actionGeometry(action) for action in window.menuBar().actions()]
    assert not [1 for menu in menus if there.intersects(menu)]
    window.keep_console = True
    discard(window)


def test_a_stage_that_is_through_is_not_the_end_of_a_change(window: MainWindow, link: FeedLink) -> None:
    """What comes after it has no measure: no 100 %, no 0:00 left, and nothing more to cancel."""
    link.ready()
    beat(window)
    for share in (0, 40, 100):
        link.push(state=b.state(phase="applying", stage="converting weights to int8", pending_apply=7,
                                done_bytes=share, total_bytes=100))  # fmt: skip
        beat(window)
        message = banner_message(window.session)
        assert message is not None
        assert message.share == (0.4 if share == 40 else None)
        assert message.busy == (share != 40)
        assert message.can_cancel == (share != 100)
        assert ("%" in message.text) == (share == 40)
        assert ("completing it after" in message.text) == (share == 100)
    assert "left" not in message.text


def test_more_than_the_measured_peak_is_shown_with_caution(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    value = window.bandwidth._values["flops"]
    assert not value.text().startswith("▲")
    assert "at the limit" not in value.toolTip()
    link.push(device=msgspec.structs.replace(b.DEVICE, flops_per_s=1e6))
    beat(window)
    assert value.text().startswith("▲ ")
    assert value.property("role") == "warning"
    assert "at the limit" in value.toolTip()


def test_a_dead_engine_is_not_called_quiet(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD, reason="gone", data_age_s=9.0)
    beat(window)
    assert window.kpis.tiles["ttft"].note == "stale"
    assert window.kpis.tiles["running"].note == "engine not running"
    assert "engine not running" in window.throughput.header.note.full_text


@pytest.mark.parametrize(
    ("command", "kind", "state", "offered"),
    [
        (("python", "--device", "cuda:0"), None, LinkState.DEAD, True),
        (("python", "--device", "auto"), "cuda", LinkState.FAILED, True),
        (("python", "--device", "auto"), "cpu", LinkState.FAILED, False),
        (("python", "--device", "cpu"), "cuda", LinkState.FAILED, False),
        (("python", "--device", "cuda:0"), "cuda", LinkState.UNRESPONSIVE, False),
    ],
)
def test_an_engine_that_cannot_start_on_a_card_may_be_started_on_the_cpu(
    window: MainWindow, link: FeedLink, command: tuple[str, ...], kind: str | None, state: LinkState,
    offered: bool,
) -> None:  # fmt: skip
    console = window.console
    console.launch(LaunchSpec(model="/m", device=command[-1], threads=2))
    link.status = dataclasses.replace(
        link.status, state=state, managed=True, can_restart=True, command_line=command, reason="no driver"
    )
    if kind is not None:
        link.push(device=msgspec.structs.replace(b.DEVICE, kind=kind))
    beat(window)
    message = banner_message(window.session)
    assert message is not None
    assert message.cpu == offered
    assert window.banner.cpu.isVisible() == offered
    if offered:
        window.banner.cpu.click()
        assert console.launch_spec == LaunchSpec(model="/m", device="cpu", threads=2)
        assert link.calls[-1] == "launch /m"


def test_baselines_say_what_else_kept_the_machine_busy(window: MainWindow) -> None:
    quiet = {"steps": 5, "other_cores_mean": 0.02, "other_cores_max": 0.1, "machine_cores": 2}
    busy = quiet | {"other_cores_mean": 0.9, "other_cores_max": 1.4}

    def made(stats: dict[str, float | int | None]) -> tuple[Baseline, BaselineSummary]:
        data = baseline("x", step_stats=stats)
        whole = Baseline(id="0" * 32, created_unix_ms=1, data=data)
        about = BaselineSummary(
            id="0" * 32, name="x", note="", created_unix_ms=1, source=data.source, model="m", device="d",
            requests=1, ttft_p50_s=None, ttft_p99_s=None, tpot_p50_s=None, output_tok_s=None, valid=True,
            locked=False, imported=False,
        )  # fmt: skip
        return whole, about

    told = compare(*made(quiet), *made(busy))
    work = [w for w in told.warnings if "other work" in w]
    assert work == [
        "B was measured while other work went on: other processes kept 0.9 of the machine's 2 cores busy "
        "meanwhile."
    ]
    rows = {metric.name: metric for metric in told.metrics}
    assert (rows["other_cores_mean"].a, rows["other_cores_mean"].b) == (0.02, 0.9)
    assert rows["other_cores_mean"].better is None
    assert "A does not tell what else kept its machine busy." in compare(*made({}), *made(quiet)).warnings
    assert not [w for w in compare(*made({}), *made({})).warnings if "busy" in w]
    table = BaselineTable()
    table.set_rows([msgspec.structs.replace(made(busy)[1], caution=other_work(busy))])
    validity = table.index(0, len(HEADS) - 1)
    assert table.data(validity) == "caution"
    assert "Take its figures with caution: other processes kept 0.9" in str(
        table.data(validity, Qt.ItemDataRole.ToolTipRole)
    )
    table.set_rows([made(quiet)[1]])
    assert table.data(table.index(0, len(HEADS) - 1)) == "valid"
    i18n.use("zh_CN")
    dialog = CompareDialog(told, {}, window)
    shown = i18n.tr_engine(work[0])
    assert "0.9" in shown
    assert "其他进程" in shown
    dialog.close()
