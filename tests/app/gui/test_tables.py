"""Table models keep Qt's rules, and the baselines panel does what its buttons say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from PySide6.QtCore import Qt
from pytestqt.modeltest import ModelTester
from pytestqt.qtbot import QtBot

from app.dialogs.compare import CompareDialog, metric_name
from app.dialogs.save_baseline import SaveBaselineDialog
from app.main_window import MainWindow
from app.model.log_table import DEPTH, LogEntry, LogFilter, LogModel
from app.model.request_table import COLUMNS
from app.net.types import LinkState, LinkStatus
from app.panels.baselines import safe_name
from app.units import count
from ipc.messages import CfgSet, LogLine, Refusal
from tests.app import builders as b
from tests.app.gui.conftest import beat, until
from tests.app.gui.feed import FeedLink


def test_requests_change_in_place_and_new_ones_come_on_top(
    window: MainWindow, link: FeedLink, qtmodeltester: ModelTester
) -> None:
    model = window.requests.model
    link.ready()
    beat(window, 1)
    link.push(
        requests=[b.request_row(1, window.session.now_s, state="decode", end_ns=None, finish=None, tokens=3)]
    )
    beat(window, 2)
    assert model.index(0, 1).data() == "decode"
    resets: list[int] = []
    model.modelReset.connect(lambda: resets.append(1))
    link.push(
        requests=[b.request_row(1, window.session.now_s, tokens=3), b.request_row(2, window.session.now_s)]
    )
    beat(window, 2)
    assert model.rowCount() == 2
    assert model.index(0, 0).data() == "2  t/2"
    assert model.index(1, 1).data() == "length"
    assert model.index(1, 6).data() == "50.0\u00a0ms"
    assert not resets
    qtmodeltester.check(model)
    qtmodeltester.check(window.requests.proxy)


def test_a_request_shows_how_its_drafts_did(window: MainWindow, link: FeedLink) -> None:
    at = [spec.title for spec in COLUMNS].index("Drafts")
    link.ready()
    beat(window, 1)
    with_drafts = {
        "drafts_n": 10,
        "drafted_tok": 40,
        "accepted_tok": 30,
        "draft_us": 1500,
        "verify_us": 90_000,
    }
    now_s = window.session.now_s
    link.push(requests=[b.request_row(1, now_s, **with_drafts), b.request_row(2, now_s)])
    beat(window, 2)
    model = window.requests.model
    assert [model.index(line, at).data() for line in (1, 0)] == ["75\u00a0% · 4.0", "–"]
    tip = model.index(1, at).data(Qt.ItemDataRole.ToolTipRole)
    assert "30 of 40 drafted tokens accepted in 10 steps" in tip
    assert "looking for them took" in tip


def test_the_throughput_chart_tells_of_drafts_and_why_there_are_none(
    window: MainWindow, link: FeedLink
) -> None:
    link.ready()
    beat(window, 1)
    now_s = window.session.now_s
    row = b.step_row(
        1, now_s, draft_reqs=4, drafted_tok=16, accepted_tok=8, output_tok=12, drafted_at=[4] * 4,
        accepted_at=[2] * 4,
    )  # fmt: skip
    link.push(steps=[row])
    beat(window, 2)
    window.throughput.refresh_figures()
    assert window.throughput.header.note.full_text.startswith("drafts: 50\u00a0% accepted, 3.0 tokens a step")
    assert window.session.state is not None
    link.push(state=msgspec.structs.replace(window.session.state, speculation="nothing repeats"))
    beat(window, 2)
    window.throughput.refresh_figures()
    assert window.throughput.header.note.full_text.startswith("no drafts: nothing repeats · running")


def test_requests_end_with_their_engine_and_the_next_ones_numbers_are_their_own(
    window: MainWindow, link: FeedLink
) -> None:
    model = window.requests.model
    live = {"state": "decode", "end_ns": None, "finish": None}
    link.ready()
    beat(window, 1)
    link.push(requests=[b.request_row(i, window.session.now_s, tag=f"old/{i}", **live) for i in (1, 2, 3)])
    beat(window, 2)
    link.status = LinkStatus(state=LinkState.DEAD, session="s1", can_restart=True)
    beat(window, 2)
    assert [model.index(line, 1).data() for line in range(3)] == ["error"] * 3
    link.ready()
    beat(window, 1)
    link.push(requests=[b.request_row(2, window.session.now_s, tag="new/2", **live)])
    beat(window, 2)
    assert [model.index(line, 0).data() for line in range(4)] == [
        "2  new/2",
        "3  old/3",
        "2  old/2",
        "1  old/1",
    ]
    assert [model.index(line, 1).data() for line in range(4)] == ["decode", "error", "error", "error"]
    assert model.line_of(2) == 0


def refusal(i: int, **changes: Any) -> Refusal:
    values: dict[str, Any] = {
        "t_ns": i, "client": "a <client>", "tag": f"chat/{i}", "code": "too_long", "prompt_tok": 300,
        "message": "the prompt has 300 tokens, the limit is 256 with the new ones; shorten it to 255",
    }  # fmt: skip
    return Refusal(**(values | changes))


def test_refused_requests_stand_below_those_that_run_with_their_reason(
    window: MainWindow, link: FeedLink, qtmodeltester: ModelTester
) -> None:
    """Whoever sends too long prompts saw a load fail and nothing in the table."""
    panel, model = window.requests, window.requests.model
    window.show_panel("requests")
    live = {"state": "decode", "end_ns": None, "finish": None}
    link.ready()
    beat(window, 1)
    link.push(
        requests=[b.request_row(i, window.session.now_s, **live) for i in (1, 2)],
        refusals=[refusal(i) for i in range(3)], refused=3,
    )  # fmt: skip
    beat(window, 2)
    panel.refresh_figures()
    assert [model.index(line, 0).data() for line in range(5)] == [
        "2  t/2", "1  t/1", "chat/2", "chat/1", "chat/0",
    ]  # fmt: skip
    assert [model.index(2, column).data() for column in (1, 2)] == ["refused", "300"]
    assert model.index(2, 3).data().startswith("too_long: the prompt has 300 tokens, the limit is 256")
    assert "a &lt;client&gt;" in model.index(2, 0).data(Qt.ItemDataRole.ToolTipRole)
    assert panel.refused_line.isVisible()
    assert panel.refused.full_text.startswith("3 refused, the last one for too_long: the prompt has 300")
    told: list[str] = []
    panel.summary_changed.connect(told.append)
    panel.refresh_figures()
    assert told == ["2 live · 0 ended · 3 refused"]
    qtmodeltester.check(model)
    panel.table.selectRow(2)
    assert window.console.selected_rid is None
    # The reason is painted across the cells that have no figure of it.
    picture = panel.table.viewport().grab().toImage()
    line = panel.table.rowViewportPosition(2) + panel.table.rowHeight(2) // 2
    header = panel.table.horizontalHeader()
    ink = [
        header.logicalIndexAt(x)
        for x in range(picture.width())
        if any(picture.pixelColor(x, line + dy).lightness() > 110 for dy in (-4, -2, 0, 2, 4))
    ]
    assert {3, 4, 5, 6, 7} <= set(ink)
    panel.show_refused()
    assert panel.proxy.rowCount() == 3
    panel.toggle_filter()
    assert panel.proxy.rowCount() == 5


def test_a_flood_of_refusals_hides_nothing_and_is_counted(window: MainWindow, link: FeedLink) -> None:
    panel, model = window.requests, window.requests.model
    window.show_panel("requests")
    live = {"state": "decode", "end_ns": None, "finish": None}
    link.ready()
    beat(window, 1)
    link.push(requests=[b.request_row(7, window.session.now_s, **live)])
    beat(window, 2)
    panel.table.selectRow(0)
    resets: list[int] = []
    model.modelReset.connect(lambda: resets.append(1))
    for start in range(0, 1000, 250):
        link.push(refusals=[refusal(start + i) for i in range(60)], refused=start + 250)
        beat(window, 2)
    panel.refresh_figures()
    assert model.rowCount() == 101
    assert model.index(0, 0).data().startswith("7")
    assert model.index(1, 0).data() == "chat/809"
    assert model.index(100, 0).data() == "chat/520"
    assert window.console.selected_rid == 7
    assert not resets
    assert panel.refused.full_text.startswith(f"{count(1000)} refused")
    panel._put_away()
    panel.refresh_figures()
    assert not panel.refused_line.isVisible()
    link.push(refusals=[refusal(1000)], refused=1001)
    beat(window, 2)
    panel.refresh_figures()
    assert panel.refused_line.isVisible()
    link.ready()  # another engine counts from 0, and has refused nothing yet
    beat(window, 1)
    panel.refresh_figures()
    assert not panel.refused_line.isVisible()
    link.push(refusals=[refusal(1)], refused=1)
    beat(window, 2)
    panel.refresh_figures()
    assert window.session.refusals.total == 1002
    assert panel.refused.full_text.startswith("1 refused")


def test_requests_whose_end_was_lost_leave_the_table(window: MainWindow, link: FeedLink) -> None:
    live = {"state": "decode", "end_ns": None, "finish": None}
    link.ready()
    beat(window, 1)
    link.push(requests=[b.request_row(i, window.session.now_s, **live) for i in (1, 2, 3)])
    beat(window, 2)
    link.push(resynced=True, live=frozenset({2}))
    beat(window, 2)
    assert window.requests.model.rowCount() == 1
    assert window.requests.model.view_at(0).rid == 2


def test_the_request_table_is_bounded(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    for start in range(0, 6000, 500):
        link.push(requests=[b.request_row(start + i + 1, window.session.now_s - 20) for i in range(500)])
        beat(window, 1)
    assert 1000 <= window.requests.model.rowCount() <= 2000
    assert window.requests.model.index(0, 0).data().startswith("6000")


def test_cells_tell_what_was_reused_and_what_preemptions_cost(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    now = window.session.now_s
    lost = {"preempted_us": 40_000, "preempt_n": 2}
    rows = [
        b.request_row(1, now - 3, swap_n=2, preempt_reason="priority", **lost),
        b.request_row(2, now - 3, swap_n=1, preempt_reason="blocks", lost_tok=9, **lost),
        b.request_row(3, now - 3, preempt_reason="rebuild", recompute_us=2500, **lost),
        b.request_row(4, now - 3, cached_tok=64, host_hit_tok=16, resume_hit_tok=8),
        b.request_row(5, now - 3, miss_reason="another salt"),
    ]  # fmt: skip
    link.push(requests=rows)
    beat(window)
    model = window.requests.model
    titles = [model.headerData(i, Qt.Orientation.Horizontal) for i in range(model.columnCount())]

    def cell(rid: int, title: str) -> tuple[str, str]:
        line = model.line_of(rid)
        assert line is not None
        index = model.index(line, titles.index(title))
        tip = index.data(Qt.ItemDataRole.ToolTipRole) or ""
        return str(index.data()).replace("\u00a0", " "), tip.replace("\u00a0", " ")

    assert [cell(i, "Preempted")[0] for i in (1, 2, 3, 4)] == [
        "2 (swap, 40.0 ms)", "2 (1 swap, 40.0 ms)", "2 (40.0 ms)", "–"
    ]  # fmt: skip
    assert "a request of higher priority came" in cell(1, "Preempted")[1]
    assert "9 tokens lost" in cell(2, "Preempted")[1]
    assert "the KV pool was rebuilt" in cell(3, "Preempted")[1]
    assert "computed again in 2.50 ms" in cell(3, "Preempted")[1]
    assert cell(4, "Preempted")[1] == ""
    shown, tip = cell(4, "Cached")
    assert shown == "64 (16 host)"
    assert "8 more were found after a preemption" in tip
    assert cell(5, "Cached")[1] == "<qt>Not found: another salt</qt>"


def test_requests_are_filtered(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    link.push(
        requests=[b.request_row(i, window.session.now_s, tag="chat" if i % 2 else "code") for i in (1, 2, 3)]
    )
    beat(window, 2)
    window.action("filter_requests").trigger()
    window.requests.filter.setText("CODE")
    assert window.requests.proxy.rowCount() == 1


def lines(n: int, level: str = "info", start: int = 0) -> list[LogEntry]:
    return [
        LogEntry.of_line(
            LogLine(n=start + i, level=level, unix_ms=start + i, source="engine", message=f"line {start + i}")
        )
        for i in range(n)
    ]


def test_the_log_is_bounded_and_filtered(qtmodeltester: ModelTester, qtbot: QtBot) -> None:
    model = LogModel()
    shown = LogFilter(model)
    model.append(lines(DEPTH - 5))
    model.append(lines(10, "error", DEPTH))
    assert model.rowCount() == DEPTH
    shown.set_least("error")
    assert shown.rowCount() == 10
    shown.set_text(f"LINE {DEPTH + 3}")
    assert shown.rowCount() == 1
    qtmodeltester.check(model)
    model.append(lines(3 * DEPTH))
    assert model.rowCount() == DEPTH


def test_the_log_takes_the_engines_lines_and_the_consoles_own(window: MainWindow, link: FeedLink) -> None:
    window.show_panel("log")
    link.ready()
    link.push(logs=[LogLine(n=1, level="info", unix_ms=0, source="engine", message="hello <i>\nthere")])
    beat(window, 2)
    window.console.errors.put("went wrong", "Traceback")
    beat(window, 3)
    texts = [window.log.filter.index(i, 0).data() for i in range(window.log.filter.rowCount())]
    assert any("hello <i> there" in text for text in texts)
    assert any("ERROR" in text and "went wrong" in text for text in texts)


def test_baselines_are_saved_compared_restored_and_carried_over(
    window: MainWindow, link: FeedLink, tmp_path: Path
) -> None:
    """E12 too: data folder, and export file, with spaces and letters of every kind."""
    console, panel = window.console, window.baselines
    link.ready()
    beat(window, 2)
    assert panel.empty.isVisible() or panel.model.rowCount() == 0
    console.shelf.save(b.baseline("first", config={"prefix_cache": True, "max_num_seqs": 64}))
    console.shelf.save(b.baseline("second", config={"prefix_cache": False, "max_num_seqs": 32}))
    until(window, lambda: panel.model.rowCount() == 2)
    window.show_panel("baselines")
    panel.table.selectAll()
    assert panel.compare.isEnabled()
    assert not panel.restore.isEnabled()
    panel.compare.click()
    until(window, lambda: panel.dialog is not None)
    dialog = panel.dialog
    assert isinstance(dialog, CompareDialog)
    settings = [dialog.config.model().index(i, 0).data() for i in range(dialog.config.model().rowCount())]
    assert settings[:2] == ["Running requests", "Prefix cache"], "as the window calls them"
    metrics = dialog.metrics.model()
    assert metrics.rowCount() > 5
    cells = [[metrics.index(i, j).data() for j in (1, 2, 6)] for i in range(metrics.rowCount())]
    assert {better for a, b, better in cells if a == b} == {"–"}
    assert dialog.comparison.warnings
    dialog.close()

    second = next(item for item in console.shelf.items if item.name == "second")
    console.restore_configuration(second.id)
    until(window, lambda: any(isinstance(c, CfgSet) for c in link.sent))
    assert link.last(CfgSet)[1].patch == {"prefix_cache": False, "max_num_seqs": 32}

    out = tmp_path / "обзор #1.json"
    console.shelf.export(second.id, "json", out)
    until(window, out.exists)
    console.shelf.delete(second.id)
    until(window, lambda: panel.model.rowCount() == 1)
    console.shelf.import_(out)
    until(window, lambda: panel.model.rowCount() == 2)
    for form in ("csv", "md"):
        path = tmp_path / f"обзор #1.{form}"
        console.shelf.export(second.id, form, path)  # type: ignore[arg-type]
        until(window, path.exists)


def test_what_goes_wrong_with_a_file_is_told(window: MainWindow, tmp_path: Path) -> None:
    bad = tmp_path / "not a bundle.json"
    bad.write_text("{}", encoding="utf-8")
    window.console.shelf.import_(bad)
    until(window, lambda: window.toasts.toasts)
    assert window.toasts.toasts[0].level == "error"
    assert window.toasts.toasts[0].text


def test_saving_needs_traffic_and_a_name(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 2)
    dialog = SaveBaselineDialog(window.console, window)
    assert not dialog.save.isEnabled()
    assert "No request ended" in dialog.caution.text()
    link.traffic()
    beat(window, 2)
    dialog._check()
    assert dialog.save.isEnabled()
    dialog.name.setText("  ")
    assert not dialog.save.isEnabled()
    dialog.name.setText("mine")
    got: list[object] = []
    dialog.accepted_values.connect(got.append)
    dialog.save.click()
    assert got == [("mine", "", "live", 30)]


def test_file_names_are_made_of_any_name() -> None:
    assert safe_name("a/b: c?") == "a_b_ c_"
    assert safe_name(" ... ") == "baseline"
    assert safe_name("обзор #1") == "обзор #1"
    assert len(safe_name("x" * 300)) == 80


def test_metrics_are_named_for_people() -> None:
    assert metric_name("ttft_p50_s") == "TTFT p50"
    assert metric_name("output_tok_s") == "Output"


def test_exporting_by_key_without_a_baseline_chosen_says_what_to_do(
    window: MainWindow, link: FeedLink
) -> None:
    """The keys worked, the panel came to the front, and nothing else happened."""
    link.ready()
    beat(window)
    window.action("export_baseline").trigger()
    assert [toast.text for toast in window.toasts.toasts] == ["Select one baseline in the list to export it."]
