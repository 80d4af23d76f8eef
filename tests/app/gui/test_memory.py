"""The memory panel, the figures below the weights' knobs, and how a conversion shows that it goes on."""

from __future__ import annotations

import dataclasses
import re
import time

import msgspec
import pytest

from app import i18n, status
from app.dialogs.compare import metric_name, quantity
from app.main_window import MainWindow
from app.model.session import SessionModel
from app.net.types import LinkState
from app.panels.optimizations import OptimizationsPanel
from app.widgets.facts import ShareBar
from ipc.messages import CfgSet, GpuRow, GraphUse, Heartbeat
from tests.app import builders as b
from tests.app.gui import feed
from tests.app.gui.conftest import beat
from tests.app.gui.feed import KNOBS, FeedLink

MIB = 1 << 20
INT8 = {
    "weight_bytes": 264 * MIB, "weight_dtype": "int8, head kept", "original_bytes": 202 * MIB,
    "kv_bytes": 128 * MIB, "kv_dtype": "bfloat16",
}  # fmt: skip
WEIGHTS = b.knob(
    "weight_dtype", group="weights", title="Weight precision", type="choice", default="model",
    choices=["model", "int8"], apply="reload", lossy=True,
)  # fmt: skip


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the knob of the weights' precision."""
    monkeypatch.setattr(feed, "KNOBS", [*KNOBS, WEIGHTS])
    monkeypatch.setattr(feed, "VALUES", {**feed.VALUES, "weight_dtype": "model"})


def show(window: MainWindow, link: FeedLink, **changes: object) -> None:
    link.push(state=b.state(model=b.MODEL, device=b.DEVICE, **changes))
    beat(window)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_what_takes_memory_is_listed_with_its_precision(window: MainWindow, link: FeedLink) -> None:
    window.show_panel("memory")
    beat(window)
    panel = window.memory
    assert panel._stack.currentIndex() == 0, "no engine: a sentence, no zeros"
    link.ready()
    beat(window)
    show(window, link, **INT8)
    assert panel._stack.currentIndex() == 1
    assert plain(panel.facts.value("weights")) == "264 MiB"
    assert panel.facts.remarks["weights"].full_text == "int8, head kept"
    assert plain(panel.facts.value("originals")) == "202 MiB"
    assert panel.facts.value("draft_weights") == ""
    assert not panel.facts.names["draft_weights"].isVisible(), "what takes nothing is not listed"
    assert plain(panel.whole.value("together")) == "594 MiB"
    assert "AWQ" in panel.facts.values["originals"].accessibleDescription()
    assert [token for token, _, _ in panel.device_bar.spans()] == [
        "stage_forward",
        "stage_prepare",
        "stage_head",
    ]
    assert not panel.host_bar.isVisible(), "on a CPU all of it is host memory"


def test_on_a_card_what_lies_on_the_host_is_apart(window: MainWindow, link: FeedLink) -> None:
    window.show_panel("memory")
    link.ready()
    beat(window)
    card = GpuRow(t_ns=1, uuid="g", name="H", memory_used_bytes=38 << 30, memory_total_bytes=80 << 30)
    display = msgspec.structs.replace(card, uuid="d", memory_used_bytes=1 << 30)
    device = msgspec.structs.replace(b.DEVICE, kind="cuda", uuid="g")
    kept = {"step_bytes": 3 << 30, "graph_budget_bytes": 1 << 30}
    link.push(state=b.state(model=b.MODEL, device=device, **INT8, **kept), device=device, gpu=[display, card])
    beat(window)
    panel = window.memory
    assert plain(panel.whole.value("kept_free")) == "4.00 GiB"
    assert plain(panel.whole.remarks["kept_free"].full_text) == "step 3.00 GiB, graphs 1.00 GiB"
    assert plain(panel.whole.value("together")) == "594 MiB", "what is kept free is not held"
    assert [token for token, _, _ in panel.device_bar.spans()] == ["stage_forward", "stage_prepare"]
    assert [token for token, _, _ in panel.host_bar.spans()] == ["stage_head"]
    assert panel.host_head.isVisible()
    assert plain(panel.whole.value("card")) == "38.0 GiB"
    assert plain(panel.whole.remarks["card"].full_text) == "of 80.0 GiB"


def test_the_process_is_told_with_what_the_machine_has(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    device = msgspec.structs.replace(b.DEVICE, memory_bytes=32 << 30)
    heartbeat = Heartbeat(mono_ns=1, step=1, busy="idle", last_step_age_us=1, rss_bytes=2 << 30)
    link.status = dataclasses.replace(link.status, heartbeat=heartbeat)
    link.push(state=b.state(**INT8), device=device)
    window.show_panel("memory")
    beat(window)
    assert plain(window.memory.whole.value("process")) == "2.00 GiB"
    assert plain(window.memory.whole.remarks["process"].full_text) == "of 32.0 GiB"
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD)
    beat(window)
    assert window.memory.whole.value("process") == ""
    assert "what it held last" in window.memory.note.text()


def test_a_checkpoint_that_came_quantized_says_so(window: MainWindow, link: FeedLink) -> None:
    """Weights that are in a low precision already are named where the memory is looked at."""
    link.ready()
    model = msgspec.structs.replace(b.MODEL, quantization="gptq, 4 bits <b>x</b>", weight_bytes=90 * MIB)
    link.push(model=model)
    window.show_panel("memory")
    show(window, link, weight_bytes=90 * MIB, weight_dtype="model")
    remark = window.memory.whole.remarks["checkpoint"]
    assert remark.full_text == "gptq, 4 bits <b>x</b>"
    assert remark.textFormat().name == "PlainText"
    assert "gptq" in status.engine_line(window.session)


def test_linear_layers_and_head_are_told_as_they_ran(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    window.show_panel("memory")
    show(window, link, **INT8)
    assert window.memory.ran_none.isVisible()
    now = time.monotonic()
    kernels = ["linear=int8:int8pack,head=bf16,activations=float32"] * 3 + [
        "linear=int8:dequant-fp32gemm,head=bf16"
    ]
    rows = [
        b.step_row(i, now - 1 + i / 10, decode_tok=1 if i < 3 else 40, kernels=kernels[i]) for i in range(4)
    ]
    link.push(steps=rows)
    beat(window)
    ran = window.memory.ran
    assert not window.memory.ran_none.isVisible()
    shown = [(ran.names[key].text(), ran.remarks[key].full_text, plain(ran.value(key))) for key in ran.values]
    assert [line for line in shown if line[2]] == [
        ("1 row", "int8:int8pack", "75 %"),
        ("40 rows", "int8:dequant-fp32gemm", "25 %"),
        ("head", "bf16", "100 %"),
        ("between them", "", "float32"),
    ]


def test_steps_from_graphs_are_told_with_what_stood_against_them(window: MainWindow, link: FeedLink) -> None:
    """Hits, misses by reason and padding, as the engine counts them; nothing while graphs are off."""
    link.ready()
    window.show_panel("memory")
    show(window, link, **INT8)
    panel = window.memory.graphs
    assert not panel.isVisible()
    use = GraphUse(
        replayed_n=1500, replayed_tok=4000, padded_tok=1000, missed_n={"prefill": 400, "new word": 100},
        logits_n={"penalties": 150}, ahead_n=1800, graphs_n=5, graph_bytes=96 * MIB, budget_bytes=1 << 30,
        drafted_n=90, drafts_missed_n={"rejection": 10}, drafts_read_n=9,
        drafts_waited_n={"room": 20, "text": 5},
    )  # fmt: skip
    show(window, link, **INT8, graphs=use)
    assert panel.isVisible()
    facts = panel.facts
    shown = [(facts.names[k].text(), facts.remarks[k].full_text, plain(facts.value(k))) for k in facts.values]
    assert [(name, plain(remark), value) for name, remark, value in shown if value] == [
        ("replayed", "1,500", "75 %"),
        ("launched ahead", "1,800", "90 %"),
        ("by itself", "prompts to compute", "20 %"),
        ("by itself", "new word", "5.0 %"),
        ("chosen outside", "penalties on long texts", "10 %"),
        ("drafted", "90", "90 %"),
        ("drafted with waits", "drafts drawn by chance", "10 %"),
        ("drafts read first", "9", "10 %"),
        ("drafted later", "a request could start, or blocks lack", "20 %"),
        ("drafted later", "drafts read first", "5.0 %"),
        ("padding", "", "25 %"),
        ("graphs", "96.0 MiB of 1.00 GiB", "5"),
    ]
    show(window, link, **INT8, graphs=GraphUse())
    assert [k for k in facts.values if facts.value(k)] == ["graphs"], "no share of no steps"
    show(window, link, **INT8)
    assert not panel.isVisible()


@pytest.mark.usefixtures("weights")
def test_a_conversion_shows_its_progress_and_what_was_asked_for(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    show(window, link, **INT8 | {"weight_dtype": "model"})
    panel: OptimizationsPanel = window.optimizations
    note = panel.notes["weights"]
    assert note.progress.isHidden()  # type: ignore[union-attr]
    window.console.knobs.set({"weight_dtype": "int8"})
    beat(window, 2)
    assert panel.rows["weight_dtype"].status.full_text == "applying…"
    since_ns = time.monotonic_ns() - 65_000_000_000
    show(
        window, link, phase="applying", stage="converting weights to int8", done_bytes=86 * MIB, running=3,
        total_bytes=200 * MIB, since_ns=since_ns, weight_bytes=500 * MIB,
    )  # fmt: skip
    assert plain(panel.rows["weight_dtype"].status.full_text) == "43 % done"
    assert not panel.rows["weight_dtype"].editor.isEnabled()
    assert plain(note.stage.full_text) == "converting weights to int8 · 43 %"  # type: ignore[union-attr]
    assert note.progress.value() == 430  # type: ignore[union-attr]
    assert window.change_banner.isVisible()
    assert re.fullmatch(  # a busy machine may take a moment to come here
        r"Weight precision: int8 · converting weights to int8 · 43 % · for 1:\d\d",
        plain(window.change_banner.text.full_text),
    )
    assert window.change_banner.title.text() == "Applying a change · 3 requests wait"
    assert window.change_banner.progress.value() == 430
    link.apply(*link.last(CfgSet))
    show(window, link, **INT8)
    beat(window)
    assert note.progress.isHidden()  # type: ignore[union-attr]
    assert window.change_banner.isHidden()
    assert plain(note.facts.value("weights")) == "264 MiB"
    assert "weights int8, head kept" in status.engine_line(window.session)


def test_a_change_without_a_measure_is_busy_and_says_what_it_is() -> None:
    session = SessionModel()
    state = b.state(phase="applying", since_ns=0)
    session.ingest(b.batch(1.0, state=state, new_session=True))
    message = status.banner_message(session, "Block size: 32")
    assert message is not None
    assert (message.busy, message.share, message.text) == (True, None, "Block size: 32")


def test_a_conversion_that_failed_half_way_says_what_to_do(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    window.show_panel("memory")
    show(window, link, weight_bytes=300 * MIB, weight_dtype="")
    assert "choose a precision again" in window.memory.note.text()
    show(window, link, **INT8)
    assert window.memory.note.isHidden()


def test_small_parts_of_a_bar_can_be_seen_and_it_never_overflows() -> None:
    bar = ShareBar("x")
    bar.resize(100, 12)
    bar.set_parts([("alarm", 999.0), ("ok_text", 0.0), ("warning", 1.0)], 1000.0, "tip")
    spans = bar.spans()
    assert [token for token, _, _ in spans] == ["alarm", "warning"]
    assert all(width > 1.5 for _, _, width in spans)
    assert sum(width for _, _, width in spans) <= 100.001
    bar.set_parts([], 0.0, "")
    assert bar.spans() == []


def test_precisions_are_told_in_chinese(window: MainWindow) -> None:
    i18n.use("zh_CN")
    assert i18n.tr_engine("int4 awq, head kept") == "int4 awq，保留输出头"
    assert i18n.tr_engine("making a draft in int8") == "正在制作 int8 草稿"


def test_a_comparison_writes_bytes_and_shares_as_such() -> None:
    assert metric_name("weight_bytes") == "Weights"
    assert plain(str(quantity(276_824_064.0, "B"))) == "264 MiB"
    assert plain(str(quantity(0.6, "share"))) == "60 %"
    assert plain(str(quantity(2.5, "tokens"))) == "2.50 tokens"
