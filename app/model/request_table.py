"""A Qt table model over the session's requests: rows change in place, new ones come in at the top.

Requests that were refused stand below all others, the newest first: however many there are, they hide none
that runs. They have a reason where the others have figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, Qt

from app.i18n import N_, tr, tr_engine, tr_later, tr_n
from app.model.refusals import KEPT, RefusedView
from app.model.requests import Key
from app.model.session import RequestView, SessionModel
from app.units import NONE, count, percent, seconds
from app.widgets.basic import plain_tip

AnyIndex = QModelIndex | QPersistentModelIndex
MAX_ROWS = 2000
RID_ROLE = Qt.ItemDataRole.UserRole + 1
REFUSED_ROLE = Qt.ItemDataRole.UserRole + 2
REASON_COLUMN = 3  # from which on a refused request has its reason


@dataclass(frozen=True, slots=True)
class Column:
    """One column: how a cell reads, and what it means."""

    title: str
    tip: str
    text: Callable[[RequestView], str]
    right: bool = True
    width: int = 78
    cell_tip: Callable[[SessionModel, RequestView], str] | None = None  # of one cell, may be empty


def state_text(view: RequestView) -> str:
    """A request's state in a word or two."""
    row = view.row
    if row.state == "prefill":
        total = row.prompt_tok + (row.output_tok if row.preempt_n else 0)
        return tr("prefill {done} of {total}").format(done=count(row.computed_tok), total=count(total))
    if row.result_cached:
        return tr("result cache")
    if row.state == "finished":
        return tr_engine(row.finish or "finished")
    return tr_engine(row.state)


def _preempted(view: RequestView) -> str:
    row = view.row
    if not row.preempt_n:
        return NONE
    waited = seconds(row.preempted_us / 1e6)
    if not row.swap_n:
        return tr("{n} ({time})").format(n=row.preempt_n, time=waited)
    if row.swap_n == row.preempt_n:
        return tr("{n} (swap, {time})").format(n=row.preempt_n, time=waited)
    return tr("{n} ({swaps} swap, {time})").format(n=row.preempt_n, swaps=row.swap_n, time=waited)


REASONS = {
    "blocks": N_("no KV block was left"),
    "priority": N_("a request of higher priority came"),
    "rebuild": N_("the KV pool was rebuilt"),
}


def preemption_lines(session: SessionModel, view: RequestView) -> list[str]:
    """What preemptions did to a request, in lines for a tooltip; none where there was none."""
    row = view.row
    if not row.preempt_n:
        return []
    reason = tr_later(REASONS[row.preempt_reason]) if row.preempt_reason in REASONS else row.preempt_reason
    times = tr_n(
        "preempted once, because {reason}", "preempted {n} times, last because {reason}", row.preempt_n
    )
    lines = [times.format(n=row.preempt_n, reason=reason or NONE)]
    waited = tr_n(
        "waited {time}; {lost} token lost, {again} computed again in {cost}",
        "waited {time}; {lost} tokens lost, {again} computed again in {cost}",
        row.lost_tok,
    )
    lines.append(
        waited.format(
            time=seconds(row.preempted_us / 1e6), lost=count(row.lost_tok), again=count(row.recompute_tok),
            cost=seconds(row.recompute_us / 1e6),
        )
    )  # fmt: skip
    if row.swap_n:
        lines.append(
            tr_n(
                "swapped out once, tokens copied back: {tokens}",
                "swapped out {n} times, tokens copied back: {tokens}",
                row.swap_n,
            ).format(n=row.swap_n, tokens=count(row.swap_in_tok))
        )
    why = next((p.event.why for p in reversed(session.preemptions) if p.key == view.key and p.event.why), "")
    return [*lines, tr_engine(why)] if why else lines


def _preempted_tip(session: SessionModel, view: RequestView) -> str:
    return "\n".join(preemption_lines(session, view))


def _cached(view: RequestView) -> str:
    row = view.row
    if not row.host_hit_tok:
        return str(count(row.cached_tok))
    return tr("{n} ({host} host)").format(n=count(row.cached_tok), host=count(row.host_hit_tok))


def _cached_tip(_session: SessionModel, view: RequestView) -> str:
    row = view.row
    lines = []
    if row.host_hit_tok:
        came = tr_n("{n} token came from host memory.", "{n} tokens came from host memory.", row.host_hit_tok)
        lines.append(came.format(n=count(row.host_hit_tok)))
    if row.resume_hit_tok:
        lines.append(tr("{n} more were found after a preemption.").format(n=count(row.resume_hit_tok)))
    if row.miss_reason:
        lines.append(tr("Not found: {why}").format(why=tr_engine(row.miss_reason)))
    return "\n".join(lines)


def _drafts(view: RequestView) -> str:
    row = view.row
    if not row.drafts_n:
        return NONE
    return f"{percent(row.accepted_tok / row.drafted_tok)} · {1 + row.accepted_tok / row.drafts_n:.1f}"


def _drafts_tip(_session: SessionModel, view: RequestView) -> str:
    row = view.row
    if not row.drafts_n:
        return ""
    steps = tr_n("{n} step with a draft", "{n} steps with a draft", row.drafts_n)
    return tr_n(
        "{accepted} of {drafted} drafted token accepted in {steps}; looking for it took {draft}, verifying "
        "it {verify}.",
        "{accepted} of {drafted} drafted tokens accepted in {steps}; looking for them took {draft}, "
        "verifying them {verify}.",
        row.drafted_tok,
    ).format(
        accepted=count(row.accepted_tok), drafted=count(row.drafted_tok),
        steps=steps.format(n=count(row.drafts_n)),
        draft=seconds(row.draft_us / 1e6), verify=seconds(row.verify_us / 1e6),
    )  # fmt: skip


def _state_tip(_session: SessionModel, view: RequestView) -> str:
    row = view.row
    if row.result_cached:
        return tr("An equal request was answered before: nothing was computed, and it is in no latency.")
    return row.message


def _revision(view: RequestView) -> str:
    row = view.row
    if row.rev_last <= row.rev_first:  # the last one is only known at the end
        return str(row.rev_first)
    return f"{row.rev_first}–{row.rev_last}"


def refusal_text(view: RefusedView) -> str:
    """Why a request was refused: the code, and the reason in words."""
    return f"{view.row.code}: {tr_engine(view.row.message)}"


def _refused_texts(view: RefusedView) -> list[str]:
    row = view.row
    tokens = NONE if row.prompt_tok is None else str(count(row.prompt_tok))
    texts = [row.tag or row.client, tr("refused"), tokens, refusal_text(view)]
    return texts + [""] * (len(COLUMNS) - len(texts))


COLUMNS: tuple[Column, ...] = (
    Column(
        N_("Request"),
        N_("The engine's number of the request, and the label its client gave it."),
        lambda v: f"{v.rid}  {v.row.tag}".rstrip(),
        right=False,
        width=150,
    ),
    Column(
        N_("State"),
        N_("waiting, prefill, decode, preempted; or how it ended."),
        state_text,
        right=False,
        width=148,
        cell_tip=_state_tip,
    ),
    Column(N_("Prompt"), N_("Tokens of the prompt."), lambda v: str(count(v.row.prompt_tok)), width=68),
    Column(
        N_("Cached"),
        N_("Prompt tokens found in the prefix cache at first admission."),
        _cached,
        width=76,
        cell_tip=_cached_tip,
    ),
    Column(N_("Output"), N_("Tokens generated so far."), lambda v: str(count(v.row.output_tok)), width=64),
    Column(
        N_("Queue"),
        N_("From arrival to the first step that worked on it."),
        lambda v: str(seconds(v.queue_s)),
    ),
    Column(
        N_("TTFT"), N_("From arrival at the engine to the first token."), lambda v: str(seconds(v.ttft_s))
    ),
    Column(N_("TPOT"), N_("(last − first token) / (tokens − 1)."), lambda v: str(seconds(v.tpot_s))),
    Column(N_("Total"), N_("From arrival to the end."), lambda v: str(seconds(v.e2e_s))),
    Column(
        N_("Drafts"),
        N_(
            "Speculation: the share of drafted tokens that were accepted, and the tokens that a step with a "
            "draft brought."
        ),
        _drafts,
        width=82,
        cell_tip=_drafts_tip,
    ),
    Column(
        N_("Preempted"),
        N_("How often it lost its place, how often its blocks were swapped, and how long it waited."),
        _preempted,
        width=104,
        cell_tip=_preempted_tip,
    ),
    Column(
        N_("Revision"),
        N_("The configuration revisions under which it ran, first to last."),
        _revision,
        width=68,
    ),
)


def _refused_data(view: RefusedView, column: int, role: int) -> object:
    if role == Qt.ItemDataRole.DisplayRole:
        return _refused_texts(view)[column]
    if role == Qt.ItemDataRole.ToolTipRole:
        told = tr("Refused by the engine, sent by {client}.").format(client=view.row.client)
        return plain_tip(f"{told}\n{refusal_text(view)}")
    if role == Qt.ItemDataRole.TextAlignmentRole:
        right = COLUMNS[column].right and column < REASON_COLUMN
        return (
            Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
        ) | Qt.AlignmentFlag.AlignVCenter
    return None


class RequestTable(QAbstractTableModel):
    """Newest first, then what was refused. `refresh` takes in what changed; a row never moves."""

    def __init__(self, session: SessionModel) -> None:
        super().__init__()
        self._session = session
        self._rows: list[RequestView] = []  # oldest first; shown from the end
        self._at: dict[Key, int] = {}
        self._texts: dict[Key, list[str]] = {}  # of the rows that somebody has read
        self._refused: list[RefusedView] = []  # oldest first; shown from the end, below `_rows`
        self._seen_rev = -1

    def refresh(self) -> None:
        """Bring the table up to date."""
        self._take_refused()
        rev = self._session.requests_rev
        if rev == self._seen_rev:
            return
        changed = self._session.changed_requests(self._seen_rev) if self._seen_rev >= 0 else None
        self._seen_rev = rev
        if changed is None:
            self.rebuild(self._session.request_rows())
            return
        new = sorted((v for v in changed if v.key not in self._at), key=lambda v: v.key)
        if len(self._rows) + len(new) > MAX_ROWS or (new and self._rows and new[0].key < self._rows[-1].key):
            self.rebuild(self._session.request_rows())
            return
        for view in changed:
            at = self._at.get(view.key)
            if at is not None:
                self._rows[at] = view
                self._tell_changed(view, len(self._rows) - 1 - at)
        if new:
            self.beginInsertRows(QModelIndex(), 0, len(new) - 1)
            for view in new:
                self._at[view.key] = len(self._rows)
                self._rows.append(view)
            self.endInsertRows()

    def _take_refused(self) -> None:
        last = self._refused[-1].n if self._refused else 0
        new = [view for view in self._session.refusals.kept if view.n > last]
        if not new:
            return
        surplus = len(self._refused) + len(new) - KEPT
        if surplus > 0 and self._refused:
            lines = self.rowCount()
            gone = min(surplus, len(self._refused))
            self.beginRemoveRows(QModelIndex(), lines - gone, lines - 1)
            del self._refused[:gone]
            self.endRemoveRows()
        first = len(self._rows)
        self.beginInsertRows(QModelIndex(), first, first + len(new) - 1)
        self._refused += new
        self.endInsertRows()

    def _tell_changed(self, view: RequestView, line: int) -> None:
        """Have those cells of a line painted anew that read otherwise now. Nobody saw what was never read."""
        before = self._texts.pop(view.key, None)
        if before is None:
            return
        now = self._texts[view.key] = [spec.text(view) for spec in COLUMNS]
        for column, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new:
                index = self.index(line, column)
                self.dataChanged.emit(index, index)

    def _text(self, view: RequestView, column: int) -> str:
        texts = self._texts.get(view.key)
        if texts is None:
            texts = self._texts[view.key] = [spec.text(view) for spec in COLUMNS]
        return texts[column]

    def rebuild(self, rows: list[RequestView]) -> None:
        """Show these rows, in any order."""
        self.beginResetModel()
        self._texts.clear()
        self._rows = sorted(rows, key=lambda v: v.key)[-MAX_ROWS * 3 // 4 :]
        self._at = {view.key: i for i, view in enumerate(self._rows)}
        self.endResetModel()

    @property
    def num_requests(self) -> int:
        """Lines of requests that were taken; those that were refused come below them."""
        return len(self._rows)

    def view_at(self, line: int) -> RequestView:
        """The request in one of the first `num_requests` lines."""
        return self._rows[len(self._rows) - 1 - line]

    def _refused_at(self, line: int) -> RefusedView | None:
        at = line - len(self._rows)
        return self._refused[len(self._refused) - 1 - at] if at >= 0 else None

    def line_of(self, rid: int) -> int | None:
        """The line of a request of the newest engine, or None."""
        at = self._at.get((self._rows[-1].key[0], rid)) if self._rows else None
        return None if at is None else len(self._rows) - 1 - at

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows) + len(self._refused)

    def columnCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(COLUMNS)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or not 0 <= index.row() < self.rowCount():
            return None
        refused = self._refused_at(index.row())
        if role == REFUSED_ROLE:
            return refused is not None
        if refused is not None:
            return _refused_data(refused, index.column(), role)
        view, spec = self.view_at(index.row()), COLUMNS[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(view, index.column())
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if spec.right else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        if role == Qt.ItemDataRole.ToolTipRole:
            tip = spec.cell_tip(self._session, view) if spec.cell_tip is not None else ""
            return plain_tip(tip or view.row.message) or None
        if role == RID_ROLE:
            return view.rid
        return None

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> object:
        if orientation != Qt.Orientation.Horizontal or not 0 <= section < len(COLUMNS):
            return None
        spec = COLUMNS[section]
        if role == Qt.ItemDataRole.DisplayRole:
            return tr_later(spec.title)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(tr_later(spec.tip))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if spec.right else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None
