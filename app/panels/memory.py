"""What takes the engine's memory, on the device and on the host, and how its linear layers really run."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFrame, QScrollArea, QStackedLayout, QWidget

from app.console import Console
from app.i18n import N_, tr, tr_engine, tr_later
from app.model.memory import Memory, Ran, WhatRan, has_second_form
from app.net.types import LinkState
from app.panels.graph_facts import GraphFacts
from app.units import count, data, percent
from app.widgets.basic import column, label, row, rule, set_role
from app.widgets.empty_state import EmptyState
from app.widgets.facts import Facts, FactSpec, ShareBar
from ipc.messages import EngineState


@dataclass(frozen=True, slots=True)
class Part:
    """A holder of memory. ``host``: in host memory even where the model runs on a card."""

    name: str
    tip: str
    token: str
    host: bool = False


PARTS: dict[str, Part] = {
    "weights": Part(
        N_("Weights"),
        N_(
            "The embedding and the linear layers' weights in every form that is held now, and their "
            "precision. “Weight precision” changes it. On a CPU without bfloat16 units a second form, packed "
            "or in float32, is held beside the first where it is faster and there is room."
        ),
        "stage_forward",
    ),
    "kv_pool": Part(
        N_("KV pool"),
        N_("Keys and values of all blocks, used or not. “KV pool” and “KV precision” change it."),
        "stage_prepare",
    ),
    "draft_weights": Part(
        N_("Draft weights"),
        N_("Weights that are held only to draft with. Given back when speculation is off or ngram."),
        "stage_detokenize",
    ),
    "draft_kv": Part(
        N_("Draft KV"), N_("Keys and values of the model that drafts, as many blocks as the pool has."),
        "stage_tokenize",
    ),
    "originals": Part(
        N_("Kept for changes"),
        N_(
            "Original weights that no layer uses now, and the 4-bit codes that AWQ found: kept in host "
            "memory so that the precision can be changed without reading the files or searching again."
        ),
        "stage_head", host=True,
    ),
    "host_kv": Part(
        N_("Host prefixes"), N_("Host memory for prefix blocks that the pool evicts (“Host KV memory”)."),
        "kv_host", host=True,
    ),
    "swap": Part(
        N_("Swap space"), N_("Host memory for the blocks of preempted requests (“Preemption”: swap)."),
        "kv_swapped", host=True,
    ),
    "results": Part(
        N_("Result cache"), N_("Kept answers of deterministic requests."), "stage_other", host=True,
    ),
}  # fmt: skip
PROCESS = N_(
    "Memory of the engine's whole process (resident): what of the above lies in host memory, and Python, "
    "torch, files that it reads, and intermediate results. Beside it what the machine has."
)
CARD = N_("Memory of the card that is taken, by whatever runs on it, and what it has, by the driver (NVML).")
KEPT_FREE = N_(
    "What the KV pool leaves of the card: for the largest step that settings have allowed since the start, "
    "measured by running it, and for CUDA graphs. It is not taken all the time."
)
CHECKPOINT = N_(
    "The weights as the files gave them: their bytes in the precision they were loaded in, and how they came "
    "quantized. Weights that came quantized run as they are; the precision of such a model cannot be changed."
)
FORMS = N_(
    "What is in the model's own precision, all weights or the layers that keep it, is held in a second form "
    "too, packed or in float32: it is faster for some numbers of tokens, and there is room."
)
RAN = N_(
    "What multiplied in the steps since the last change of the configuration, as the engine names it, by the "
    "tokens of a step (rows), and its share of those steps. Chosen by measuring, at start and for each new "
    "precision. “|” joins what serves different layers."
)
ENDED = (LinkState.DEAD, LinkState.OFFLINE)
LINEAR_LINES, HEAD_LINES = 4, 2  # of kernels; those that ran in most steps are shown


class MemoryPanel(QWidget):
    """Refreshed twice a second."""

    summary_changed = Signal(str)

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.device_bar, self.host_bar = (
            ShareBar(tr("Memory by holder")),
            ShareBar(tr("Host memory by holder")),
        )
        self.device_head = label(tr("On the device"), "section")
        self.host_head = label(tr("In host memory"), "section")
        self.facts = Facts(
            [FactSpec(k, tr_later(p.name), tr_later(p.tip), p.token) for k, p in PARTS.items()]
        )
        self.whole = Facts([
            FactSpec("together", tr("Together"), tr("The sum of what is listed above.")),
            FactSpec("process", tr("Engine process"), tr_later(PROCESS)),
            FactSpec("card", tr("Card"), tr_later(CARD)),
            FactSpec("kept_free", tr("Kept free"), tr_later(KEPT_FREE)),
            FactSpec("forms", tr("Forms"), tr_later(FORMS)),
            FactSpec("checkpoint", tr("As loaded"), tr_later(CHECKPOINT)),
        ])  # fmt: skip
        self.note = label("", "small", wrap=True)
        self.ran_head = label(tr("Linear layers run as"), "section", tr_later(RAN))
        lines = [*(f"linear {i}" for i in range(LINEAR_LINES)), *(f"head {i}" for i in range(HEAD_LINES))]
        tip = tr("The precision of what passes from layer to layer.")
        between = FactSpec("between", tr("between them"), tip, wide=True)
        self.ran = Facts([*(FactSpec(key, tr("head"), tr_later(RAN)) for key in lines), between])
        self.ran_none = label(tr("No step has run since the last change."), "small")
        self.graphs = GraphFacts()
        page = QWidget()
        page.setProperty("role", "page")
        page.setLayout(
            column(
                self.device_head, self.device_bar, self.host_head, self.host_bar, self.facts, self.note,
                rule(), self.whole, row(self.ran_head, None), self.ran_none, self.ran, self.graphs, None,
                spacing=5, margins=(12, 8, 12, 6),
            )
        )  # fmt: skip
        area = QScrollArea()
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setWidget(page)
        empty = EmptyState(
            tr("Nothing is known of the memory yet"),
            tr("What takes memory is told as soon as the engine has loaded its model."),
        )
        self._stack = QStackedLayout(self)
        self._stack.addWidget(empty)
        self._stack.addWidget(area)

    def showEvent(self, event: QShowEvent) -> None:
        self.refresh_figures()

    def refresh_figures(self) -> None:
        """Write everything anew."""
        session = self._console.session
        state = session.state
        if state is None or not state.weight_bytes:
            self._stack.setCurrentIndex(0)
            self.summary_changed.emit("")
            return
        self._stack.setCurrentIndex(1)
        memory = Memory.of(state)
        on_card = session.device is not None and session.device.kind == "cuda"
        remarks = {"weights": weights_text(state), "kv_pool": state.kv_dtype}
        for key in PARTS:
            size = getattr(memory, key)
            self.facts.show_fact(key, str(data(size)) if size else "", remarks.get(key, ""))
        for part in (self.device_head, self.host_head, self.host_bar):
            part.setVisible(on_card)
        self._show_bar(self.device_bar, memory, [k for k, p in PARTS.items() if not (on_card and p.host)])
        self._show_bar(self.host_bar, memory, [k for k, p in PARTS.items() if p.host])
        self._show_note(state)
        self._show_whole(memory, state)
        self._show_ran(session.ran())
        self.graphs.show_use(state.graphs)
        self.summary_changed.emit(str(data(memory.total)))

    def _show_note(self, state: EngineState) -> None:
        """What has to be known of the figures above it."""
        text, role = "", "small"
        if self._console.session.link.state in ENDED:
            text = tr("The engine has ended and gave all of it back. This is what it held last.")
        elif not state.weight_dtype and state.phase != "applying":
            text, role = tr("A conversion failed half way; choose a precision again."), "warning"
        self.note.setText(text)
        set_role(self.note, role)
        self.note.setVisible(bool(text))

    def _show_bar(self, bar: ShareBar, memory: Memory, keys: list[str]) -> None:
        sizes = {key: getattr(memory, key) for key in keys if getattr(memory, key)}
        words = "\n".join(
            tr("{name}: {value}").format(name=tr_later(PARTS[key].name), value=data(size))
            for key, size in sizes.items()
        )
        bar.set_parts([(PARTS[key].token, size) for key, size in sizes.items()], sum(sizes.values()), words)

    def _show_whole(self, memory: Memory, state: EngineState) -> None:
        session = self._console.session
        heartbeat, device, model = session.heartbeat, session.device, session.model
        self.whole.show_fact("together", str(data(memory.total)))
        on_card = device is not None and device.kind == "cuda"
        alive = session.link.state not in ENDED
        rss = heartbeat.rss_bytes if alive and heartbeat is not None else 0
        machine = device.memory_bytes if device is not None and not on_card else 0
        self.whole.show_fact("process", str(data(rss)) if rss else "", _of(machine))
        card = session.cards.own(device) if on_card else None
        if card is None or not card.memory_used_bytes or not alive:
            self.whole.show_fact("card", "")
        else:
            self.whole.show_fact("card", str(data(card.memory_used_bytes)), _of(card.memory_total_bytes))
        free = (state.step_bytes, state.graph_budget_bytes)
        words = tr("step {step}, graphs {graphs}").format(step=data(free[0]), graphs=data(free[1]))
        self.whole.show_fact(
            "kept_free", str(data(sum(free))) if any(free) else "", words if any(free) else ""
        )
        if model is not None:
            self.whole.show_fact("forms", tr("two") if has_second_form(state, model) else "")
            self.whole.show_fact(
                "checkpoint", str(data(model.weight_bytes)), model.quantization or model.dtype
            )

    def _show_ran(self, ran: WhatRan) -> None:
        self.ran_none.setVisible(not ran.steps)
        for group, most, found in (("linear", LINEAR_LINES, ran.linear), ("head", HEAD_LINES, ran.head)):
            shown = sorted(sorted(found, key=lambda each: -each.steps)[:most], key=lambda each: each.least)
            for i in range(most):
                key = f"{group} {i}"
                if i >= len(shown):
                    self.ran.show_fact(key, "")
                    continue
                if group == "linear":
                    self.ran.names[key].setText(rows_text(shown[i]))
                self.ran.show_fact(key, str(percent(shown[i].steps / ran.steps)), shown[i].name)
        self.ran.show_fact("between", ran.activations)


def _of(whole: int | None) -> str:
    """``of 23.5 GiB``, or nothing where that is not known."""
    return tr("of {whole}").format(whole=data(whole)) if whole else ""


def weights_text(state: EngineState) -> str:
    """The precision of the weights, ``int4 awq, head kept``, for a person."""
    return tr("as loaded") if state.weight_dtype == "model" else tr_engine(state.weight_dtype)


def rows_text(ran: Ran) -> str:
    """``1 row``, ``2–31 rows``."""
    if ran.least == ran.most == 1:
        return tr("1 row")
    span = count(ran.most) if ran.least == ran.most else f"{count(ran.least)}–{count(ran.most)}"
    return tr("{n} rows").format(n=span)
