"""The KV map: every physical block, its state, its fill and whose it is."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QGridLayout, QStackedLayout, QWidget

from app.console import Console
from app.i18n import N_, tr, tr_later
from app.units import count, data, percent
from app.widgets.basic import ElidedLabel, button, column, label, plain_tip, row, set_tip
from app.widgets.block_map import STATE_TOKENS, BlockMap, Swatch
from app.widgets.empty_state import EmptyState
from ipc.messages import BLOCK_CACHED, BLOCK_FREE, BLOCK_HOST, BLOCK_RESERVED, BLOCK_SHARED, BLOCK_USED

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
    BLOCK_HOST: (N_("on host"), N_("Moved to the machine's memory.")),
}
ALWAYS_SHOWN = (BLOCK_USED, BLOCK_SHARED, BLOCK_CACHED, BLOCK_FREE)


class KvMapPanel(QWidget):
    """Refreshed in each frame that brought a new map."""

    summary_changed = Signal(str)

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._shown_t_s = -1.0
        self.map = BlockMap()
        self.map.setAccessibleName(tr("Map of the KV blocks"))
        self.map.describe = self.describe
        self.map.picked.connect(self._on_picked)
        self._counts = {state: label("0") for state in NAMES}
        self._entries: dict[int, QWidget] = {}
        self.waste = label("", "dim")
        set_tip(
            self.waste,
            tr(
                "Token places in used blocks that hold no token, of all their places: internal fragmentation."
            ),
        )
        self.owner = ElidedLabel(tr("Point at a block to see its owner; click to pick it."), "small")
        self.clear = button(tr("Show all"), lambda: console.select(None), "flat")
        self.clear.hide()
        page = QWidget()
        page.setLayout(
            column(
                self.map,
                self._legend(),
                row(self.owner, self.clear),
                margins=(10, 10, 10, 6),
                spacing=6,
            )
        )
        self.empty = EmptyState(
            tr("No KV blocks yet"), tr("The map appears as soon as the engine has loaded its model.")
        )
        self._stack = QStackedLayout()
        self._stack.addWidget(self.empty)
        self._stack.addWidget(page)
        self.setLayout(self._stack)
        console.selected.connect(self._on_selected)

    def _legend(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(2)
        for i, (state, (name, tip)) in enumerate(NAMES.items()):
            entry = QWidget()
            entry.setLayout(
                row(
                    Swatch(STATE_TOKENS[state]),
                    label(tr_later(name), "dim"),
                    self._counts[state],
                    None,
                    spacing=5,
                )
            )
            set_tip(entry, tr_later(tip))
            entry.setVisible(state in ALWAYS_SHOWN)
            self._entries[state] = entry
            grid.addWidget(entry, i // 2, i % 2)
        grid.addWidget(self.waste, 3, 0, 1, 2)
        return grid

    def refresh(self) -> None:
        """Draw the newest map, if it is new."""
        blocks = self._console.session.blocks
        if blocks is None or blocks.num_blocks == 0:
            self._stack.setCurrentIndex(0)
            self.summary_changed.emit("")
            return
        if blocks.t_s == self._shown_t_s and blocks.num_blocks == self.map.num_blocks:
            return
        self._shown_t_s = blocks.t_s
        self._stack.setCurrentIndex(1)
        self.map.set_blocks(blocks.state, blocks.fill, blocks.block_size)
        if self._console.selected_rid is not None:
            self.map.set_chosen(self._console.session.blocks_of(self._console.selected_rid))

    def refresh_figures(self) -> None:
        """Write counts, waste and what the pool is."""
        blocks = self._console.session.blocks
        if blocks is None or blocks.num_blocks == 0:
            return
        counts = np.bincount(blocks.state, minlength=BLOCK_HOST + 1)
        for state, shown in self._counts.items():
            shown.setText(str(count(int(counts[state]))))
            self._entries[state].setVisible(state in ALWAYS_SHOWN or bool(counts[state] > 0))
        used = int(counts[BLOCK_USED] + counts[BLOCK_SHARED] + counts[BLOCK_RESERVED])
        live = (
            (blocks.state == BLOCK_USED) | (blocks.state == BLOCK_SHARED) | (blocks.state == BLOCK_RESERVED)
        )
        held = int(blocks.fill[live].sum())
        places = used * blocks.block_size
        if places:
            text = tr("waste {share} · {held} of {places} token places used")
            share = percent(1 - held / places)
            self.waste.setText(text.format(share=share, held=count(held), places=count(places)))
        else:
            self.waste.setText(tr("no block is in use"))
        self.summary_changed.emit(
            self._summary(blocks.num_blocks, blocks.block_size, used / blocks.num_blocks)
        )
        self._show_selection()

    def _summary(self, number: int, size: int, share: float) -> str:
        model = self._console.session.model
        text = tr("{n} × {size} tokens · {share}").format(n=count(number), size=size, share=percent(share))
        if model is not None:
            text += f" · {data(number * size * model.kv_bytes_per_token)}"
        return text

    def describe(self, block: int) -> str:
        """The tooltip of one block."""
        blocks = self._console.session.blocks
        if blocks is None or block >= blocks.num_blocks:
            return ""
        state = int(blocks.state[block])
        lines = [tr("Block {n}: {state}").format(n=block, state=tr_later(NAMES[state][0]))]
        lines.append(
            tr("{fill} of {size} tokens").format(fill=int(blocks.fill[block]), size=blocks.block_size)
        )
        owner = int(blocks.owner[block])
        if owner:
            lines.append(tr("owner: request {rid}").format(rid=owner))
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
    def _on_selected(self, rid: int | None) -> None:
        self.map.set_chosen(None if rid is None else self._console.session.blocks_of(rid))
        self._show_selection()

    def _show_selection(self) -> None:
        rid = self._console.selected_rid
        self.clear.setVisible(rid is not None)
        if rid is None:
            self.owner.set_full_text(tr("Point at a block to see its owner; click to pick it."))
        else:
            number = len(self._console.session.blocks_of(rid))
            self.owner.set_full_text(tr("Request {rid} owns {n} blocks.").format(rid=rid, n=number))
