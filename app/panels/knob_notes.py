"""What is measured of a group of optimizations, below its knobs: what the weights take, how drafts do."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QProgressBar, QWidget

from app import status
from app.console import Console
from app.i18n import N_, tr, tr_engine, tr_later, tr_n
from app.model.drafts import DraftFigures
from app.model.memory import has_second_form
from app.panels.memory import CHECKPOINT, FORMS, PARTS, weights_text
from app.units import NONE, count, data, percent, seconds, span
from app.widgets.basic import ElidedLabel, button, column, keep_room, label, row, set_tip
from app.widgets.facts import Facts, FactSpec
from ipc.messages import KnobInfo

ACCEPTED = N_(
    "Of the drafted tokens that were verified, those that the model agreed with, and how many were verified, "
    "in the trailing window."
)
LENGTH = N_(
    "Mean accepted length: the tokens that a step with a draft brought its request, the model's own token "
    "included. Without drafts it is 1."
)
BY_PLACE = N_(
    "Of the drafts that had a first, second, third … token, those that had it accepted. A token holds only "
    "after all before it; but long drafts are made where much holds, so a later place need not be lower."
)
DRAFTING = N_("Mean time a step with drafts spent on making them, on top of the forward pass.")
VERIFYING = N_(
    "Mean share of such a step's forward pass that drafted tokens had by their number: what verifying cost."
)
DRAFT_MODEL = N_(
    "The smaller model that drafts with speculation = draft. It is read and checked when the engine starts, "
    "so choosing another one starts the engine anew with the configuration it has."
)


class WeightsNote(QWidget):
    """What the weights take, and how far a conversion is."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.facts = Facts(
            [
                FactSpec("weights", tr("In memory"), tr_later(PARTS["weights"].tip)),
                FactSpec("originals", tr("Kept for changes"), tr_later(PARTS["originals"].tip)),
                FactSpec("forms", tr("Forms"), tr_later(FORMS)),
                FactSpec("checkpoint", tr("As loaded"), tr_later(CHECKPOINT)),
            ],
            "count",
        )
        self.stage = ElidedLabel("", "warning")
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("Progress of the conversion"))
        for part in (self.stage, self.progress):  # so that rows below do not move
            keep_room(part)
        self.setLayout(column(self.facts, self.stage, self.progress, spacing=4, margins=(0, 2, 0, 4)))
        self.refresh()

    def refresh(self) -> None:
        """Write everything anew."""
        session = self._console.session
        state, model = session.state, session.model
        facts = self.facts
        if state is None or model is None or not state.weight_bytes:
            for key in facts.values:
                facts.show_fact(key, "")
        else:
            facts.show_fact("weights", str(data(state.weight_bytes)), weights_text(state))
            facts.show_fact("forms", tr("two") if has_second_form(state, model) else "")
            facts.show_fact("originals", str(data(state.original_bytes)) if state.original_bytes else "")
            facts.show_fact("checkpoint", str(data(model.weight_bytes)), model.quantization or model.dtype)
        share = status.applying_share(session) if state is not None and state.phase == "applying" else None
        self.stage.setVisible(share is not None)
        self.progress.setVisible(share is not None)
        if share is not None and state is not None:
            self.stage.set_full_text(f"{tr_engine(state.stage)} · {percent(share)}")
            self.progress.setRange(0, 1000)
            self.progress.setValue(round(share * 1000))


class SpeculationNote(QWidget):
    """How drafts do, why there are none, and which model drafts."""

    choose_asked = Signal()

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.why = label("", "warning", wrap=True)
        self.facts = Facts(
            [
                FactSpec("accepted", tr("Accepted"), tr_later(ACCEPTED)),
                FactSpec("length", tr("Tokens a step"), tr_later(LENGTH)),
                FactSpec("places", tr("Accepted by place"), tr_later(BY_PLACE), wide=True),
                FactSpec("draft", tr("Drafting"), tr_later(DRAFTING)),
                FactSpec("verify", tr("Verifying"), tr_later(VERIFYING)),
                FactSpec("weights", tr("Draft weights"), tr_later(PARTS["draft_weights"].tip)),
                FactSpec("kv", tr("Draft KV"), tr_later(PARTS["draft_kv"].tip)),
            ],
            "count",
        )
        self.none = label("", "small")
        self.model = ElidedLabel("", "small")
        head = label(tr("Draft model"), "dim")
        self.choose = button(tr("Choose…"), self.choose_asked.emit)
        for part in (head, self.model, self.choose):
            set_tip(part, tr_later(DRAFT_MODEL))
        line = row(head, self.model, self.choose, spacing=6)
        line.setStretchFactor(self.model, 1)
        self.setLayout(column(self.facts, self.why, self.none, line, spacing=3, margins=(0, 2, 0, 4)))
        self.refresh()

    def refresh(self) -> None:
        """Write everything anew."""
        console = self._console
        session, state = console.session, console.session.state
        on = console.knobs.values().get("speculation", "off") != "off"
        why = state.speculation if state is not None else ""
        self.why.setText(tr("No drafts: {why}").format(why=tr_engine(why)) if why and on else "")
        found = session.drafts()
        self._show_figures(found, on)
        nothing = tr("No drafts in the last {window}.").format(window=span(session.window_s))
        share = status.applying_share(session)
        if state is not None and state.phase != "applying" and share is not None:  # steps go on meanwhile
            self.none.setText(f"{tr_engine(state.stage)} · {percent(share)}")
        else:
            self.none.setText(nothing if on and found is None else "")
        self._hold(on)
        held = (state.draft_weight_bytes, state.draft_kv_bytes) if state is not None else (0, 0)
        for key, size in zip(("weights", "kv"), held, strict=True):
            self.facts.show_fact(key, str(data(size)) if size else "")
        self.model.set_full_text(draft_model_text(console))

    def _hold(self, on: bool) -> None:
        """What says why there are no drafts keeps its room while speculation is on: rows below stay put."""
        for part in (self.why, self.none):
            part.setVisible(on or bool(part.text()))
            tall = part.heightForWidth(self.width()) if part.text() and part.wordWrap() else 0
            line = part.fontMetrics().height() if part is self.none or part.minimumHeight() else 0
            part.setMinimumHeight(max(part.minimumHeight(), tall, line) if on else 0)

    def _show_figures(self, found: DraftFigures | None, on: bool) -> None:
        facts = self.facts
        if found is None or not on:
            for key in ("accepted", "length", "places", "draft", "verify"):
                facts.show_fact(key, NONE if on else "")
            return
        of = tr_n("of {n} token", "of {n} tokens", found.drafted).format(n=count(found.drafted))
        facts.show_fact("accepted", str(percent(found.acceptance)), of)
        facts.show_fact("length", f"{found.length:.2f}")
        facts.show_fact("places", places_text(found.by_place))
        facts.show_fact("draft", str(seconds(found.draft_s)), tr("a step"))
        facts.show_fact("verify", str(seconds(found.verify_s)), tr("a step"))


def places_text(shares: tuple[float, ...], most: int = 6) -> str:
    """Shares by place as one line: ``84 71 60 %``, the last ones left out where there are many."""
    text = " ".join(f"{share * 100:.0f}" for share in shares[:most])
    return f"{text}{' …' if len(shares) > most else ''}\u00a0%"


def draft_model_text(console: Console) -> str:
    """The draft model of the present engine, as far as this console knows."""
    path = console.draft_model
    if path is not None:
        return path.rstrip("/").rpartition("/")[2]
    if console.session.link.can_restart:
        return tr("none")
    reason = _draft_reason(next((v.info for v in console.knobs.views() if v.info.id == "speculation"), None))
    if reason is None:
        return ""
    return tr("none") if reason else tr("chosen where the engine was started")


def _draft_reason(info: KnobInfo | None) -> str | None:
    """Why the engine has no draft model, "" where it has one, None where that is not known."""
    return None if info is None or "draft" not in info.choices else info.choice_reasons.get("draft", "")
