"""The KV map: every block of the pool and of host memory, its state, its fill and whose it is."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QGridLayout, QStackedLayout, QWidget

from app.console import Console
from app.i18n import N_, tr, tr_later, tr_n
from app.net.types import BlockView, LinkState
from app.units import NONE, count, data, percent
from app.widgets.basic import ElidedLabel, FigureLabel, button, column, label, plain_tip, row, set_tip
from app.widgets.block_map import STATE_TOKENS, BlockMap, Swatch
from app.widgets.empty_state import EmptyState
from app.widgets.focus import set_visible
from ipc.messages import (
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_HOST,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    BLOCK_SWAPPED,
    BLOCK_USED,
)

NAMES = {
    BLOCK_USED: (N_("used"), N_("A live request keeps tokens in it.")),
    BLOCK_SHARED: (N_("shared"), N_("Two or more live requests read the same content.")),
    BLOCK_CACHED: (
        N_("cached"),
        N_("No live request; its content is kept for a later prompt that begins alike."),
    ),
    BLOCK_FREE: (N_("free"), N_("Empty.")),
    BLOCK_RESERVED: (
        N_("reserved"),
        N_("Set aside for a request and not yet filled (contiguous allocation)."),
    ),
    BLOCK_HOST: (
        N_("on host"),
        N_("Evicted from the pool and kept in host memory; a prompt that begins alike has it copied back."),
    ),
    BLOCK_SWAPPED: (
        N_("swapped out"),
        N_("Of a preempted request, kept in host memory until it is back in the batch."),
    ),
}
STALE = {
    LinkState.DEAD: N_("The pool as it was at {time}: its engine has stopped, and the memory is free."),
    LinkState.FAILED: N_("The pool as it was at {time}: its engine has failed."),
    LinkState.OFFLINE: N_("The pool as it was at {time}: no engine is connected."),
    LinkState.UNRESPONSIVE: N_("The pool as it was at {time}: the engine does not respond."),
}
POOL = (BLOCK_USED, BLOCK_SHARED, BLOCK_CACHED, BLOCK_FREE, BLOCK_RESERVED)
HOST = (BLOCK_HOST, BLOCK_SWAPPED, BLOCK_FREE)
LIVE = (BLOCK_USED, BLOCK_SHARED, BLOCK_RESERVED)


class Legend(QWidget):
    """The states of a map with their counts, those of ``optional`` only while there are any."""

    def __init__(self, states: Sequence[int], columns: int, optional: Sequence[int] = ()) -> None:
        super().__init__()
        self._optional = optional
        self.counts = {state: FigureLabel("count") for state in states}
        self._entries: dict[int, QWidget] = {}
        self._swatches: list[Swatch] = []
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(1)
        for i, state in enumerate(states):
            name, tip = NAMES[state]
            entry = QWidget()
            swatch = Swatch(STATE_TOKENS[state])
            self._swatches.append(swatch)
            entry.setLayout(row(swatch, label(tr_later(name), "small"), self.counts[state], None, spacing=4))
            set_tip(entry, tr_later(tip))
            self._entries[state] = entry
            grid.addWidget(entry, i // columns, i % columns)
            entry.setVisible(state not in optional)

    def set_stale(self, stale: bool) -> None:
        """As the map is drawn."""
        for swatch in self._swatches:
            swatch.set_stale(stale)

    def show_counts(self, counts: Sequence[int]) -> None:
        """Blocks by state."""
        for state, shown in self.counts.items():
            shown.setText(str(count(counts[state])))
            self._entries[state].setVisible(state not in self._optional or counts[state] > 0)


class KvMapPanel(QWidget):
    """Refreshed in each frame that brought a new map."""

    summary_changed = Signal(str)

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._shown_t_s = -1.0
        self._stale_state: LinkState | None = None
        self._pool = ""  # what the pool is made of, in words
        self.map = BlockMap()
        self.map.setAccessibleName(tr("Map of the KV blocks"))
        self.map.describe = self.describe
        self.map.picked.connect(self._on_picked)
        self.host_map = BlockMap(32)
        self.host_map.setAccessibleName(tr("Map of the blocks in host memory"))
        self.host_map.describe = lambda block: self.describe(block + self.map.num_blocks)
        self.host_map.picked.connect(self._on_host_picked)
        self.stale = label("", "warning", wrap=True)
        self.stale.hide()
        self.legend, self.host_legend = Legend(POOL, 4, (BLOCK_RESERVED,)), Legend(HOST, 3)
        self.owner = ElidedLabel("", "small")
        self.clear = button(tr("Show all"), lambda: console.select(None), "flat")
        self.clear.hide()
        self.host = QWidget()
        self.host_bytes = label("", "small")
        host_head = row(label(tr("Host memory"), "section"), None, self.host_bytes)
        self.host.setLayout(column(host_head, self.host_map, self.host_legend, spacing=4))
        self.host.hide()
        self.maps = column(self.map, self.legend, self.host, spacing=6)
        page = QWidget()
        page.setLayout(
            column(
                self.stale,
                self.maps,
                self._figures(),
                row(self.owner, self.clear),
                margins=(10, 10, 10, 6),
                spacing=6,
            )
        )
        self.empty = EmptyState(
            tr("No KV blocks yet"), tr("The map appears as soon as the engine has loaded its model.")
        )
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(page)
        console.selected.connect(self._on_selected)

    def _figures(self) -> QGridLayout:
        """What the used blocks were set aside for and what they hold, to compare allocations by."""
        grid = QGridLayout()
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(0)
        self.figures: dict[str, FigureLabel] = {}
        heads = (
            ("places", tr("places"), tr("Tokens that the used blocks could hold: blocks × block size.")),
            ("held", tr("held"), tr("Tokens that they hold.")),
            (
                "waste",
                tr("wasted"),
                tr(
                    "Token places in used blocks that hold no token, of all their places: internal "
                    "fragmentation. Contiguous allocation reserves the most a request may reach; paged "
                    "wastes less than a block for each request."
                ),
            ),
        )
        for i, (key, name, tip) in enumerate(heads):
            value = FigureLabel()
            value.setText(NONE)
            for part, line in ((label(name, "small"), 0), (value, 1)):
                set_tip(part, tip)
                grid.addWidget(part, line, i)
            self.figures[key] = value
            grid.setColumnStretch(i, 1)
        return grid

    def refresh(self) -> None:
        """Draw the newest map, if it is new."""
        blocks = self._console.session.blocks
        if blocks is None or blocks.num_blocks == 0:
            self._stack.setCurrentIndex(0)
            self.summary_changed.emit("")
            return
        self._show_stale(blocks)
        if blocks.t_s == self._shown_t_s and blocks.num_pool == self.map.num_blocks:
            return
        self._shown_t_s = blocks.t_s
        self._stack.setCurrentIndex(1)
        pool = blocks.num_pool
        self.map.set_blocks(blocks.state[:pool], blocks.fill[:pool], blocks.block_size)
        if blocks.num_host != self.host_map.num_blocks:
            self.host.setVisible(blocks.num_host > 0)
            self.maps.setStretch(0, max(2, round(10 * pool / max(1, blocks.num_blocks))))
            self.maps.setStretch(2, max(3, round(10 * blocks.num_host / max(1, blocks.num_blocks))))
        self.host_map.set_blocks(blocks.state[pool:], blocks.fill[pool:], blocks.block_size)
        if self._console.selected_rid is not None:
            self._choose(self._console.selected_rid)

    def _show_stale(self, blocks: BlockView) -> None:
        """Say where the blocks are those of an engine that is not there any more, or not heard of."""
        session = self._console.session
        state = session.link.state
        told = STALE.get(state)
        if told is not None and state is not self._stale_state:  # the moment is told once, it stands still
            # A map that did not change is not told anew: it was so until the engine was last heard of.
            heard_s = session.link.data_age_s
            age_s = session.now_s - blocks.t_s if heard_s is None else heard_s
            when = time.localtime(time.time() - max(0.0, age_s))
            self.stale.setText(tr_later(told).format(time=time.strftime("%H:%M:%S", when)))
        self._stale_state = state
        set_visible(self.stale, told is not None)
        for each in (self.map, self.host_map, self.legend, self.host_legend):
            each.set_stale(told is not None)

    def refresh_figures(self) -> None:
        """Write counts, waste and what the pool is."""
        blocks = self._console.session.blocks
        if blocks is None or blocks.num_blocks == 0:
            return
        pool = blocks.num_pool
        state = blocks.state[:pool]
        counts = np.bincount(state, minlength=BLOCK_SWAPPED + 1).tolist()
        self.legend.show_counts(counts)
        self.host_legend.show_counts(np.bincount(blocks.state[pool:], minlength=BLOCK_SWAPPED + 1).tolist())
        used = sum(counts[kind] for kind in LIVE)
        held = int(blocks.fill[:pool][np.isin(state, LIVE)].sum())
        places = used * blocks.block_size
        self.figures["places"].setText(str(count(places, tr("tokens"))) if places else NONE)
        self.figures["held"].setText(str(count(held, tr("tokens"))) if places else NONE)
        waste = f"{count(places - held)} · {percent((places - held) / places)}" if places else NONE
        self.figures["waste"].setText(waste)
        self._show_memory()
        self.summary_changed.emit(self._summary(pool, blocks.block_size, used / pool if pool else 0.0))
        self._show_selection()

    def _show_memory(self) -> None:
        """Precision and bytes of the pool, and of what lies in host memory."""
        state = self._console.session.state
        if state is None:
            return
        parts = [tr("keys and values in {dtype}").format(dtype=state.kv_dtype)] if state.kv_dtype else []
        if state.kv_bytes:
            parts.append(tr("pool {size}").format(size=data(state.kv_bytes)))
        self._pool = " · ".join(parts)
        host = []
        if state.host_kv_bytes:
            host.append(tr("prefixes {size}").format(size=data(state.host_kv_bytes)))
        if state.swap_bytes:
            host.append(tr("swap space {size}").format(size=data(state.swap_bytes)))
        self.host_bytes.setText(" · ".join(host))

    def _summary(self, number: int, size: int, share: float) -> str:
        text = tr_n("{n} × {size} token · {share}", "{n} × {size} tokens · {share}", size)
        return text.format(n=count(number), size=size, share=percent(share))

    def describe(self, block: int) -> str:
        """The tooltip of one block."""
        blocks = self._console.session.blocks
        if blocks is None or block >= blocks.num_blocks:
            return ""
        state = int(blocks.state[block])
        name = tr_later(NAMES[state][0])
        if block < blocks.num_pool:
            lines = [tr("Block {n}: {state}").format(n=block, state=name)]
        else:
            lines = [tr("Host block {n}: {state}").format(n=block - blocks.num_pool, state=name)]
        lines.append(
            tr_n("{fill} of {size} token", "{fill} of {size} tokens", blocks.block_size).format(
                fill=int(blocks.fill[block]), size=blocks.block_size
            )
        )
        owner = int(blocks.owner[block])
        if owner:
            lines.append(tr("owner: request {rid}; click to pick it").format(rid=owner))
        return plain_tip("\n".join(lines))

    @Slot(object)
    def _on_picked(self, block: int | None) -> None:
        blocks = self._console.session.blocks
        if block is None or blocks is None or block >= blocks.num_blocks:
            self._console.select(None)
            return
        owner = int(blocks.owner[block])
        self._console.select(owner or None)

    @Slot(object)
    def _on_host_picked(self, block: int | None) -> None:
        self._on_picked(None if block is None else block + self.map.num_blocks)

    @Slot(object)
    def _on_selected(self, rid: int | None) -> None:
        self._choose(rid)
        self._show_selection()

    def _choose(self, rid: int | None) -> None:
        pool = self.map.num_blocks
        owned = None if rid is None else self._console.session.blocks_of(rid)
        self.map.set_chosen(owned)
        self.host_map.set_chosen(None if owned is None else [b - pool for b in owned if b >= pool])

    def _show_selection(self) -> None:
        rid = self._console.selected_rid
        self.clear.setVisible(rid is not None)
        if rid is None:
            self.owner.set_full_text(self._pool)
        else:
            number = len(self._console.session.blocks_of(rid))
            text = tr_n("Request {rid} owns {n} block.", "Request {rid} owns {n} blocks.", number)
            self.owner.set_full_text(text.format(rid=rid, n=number))
