"""The KV pool as a map: one cell a physical block, in the order of their numbers.

A cell's colour is the block's state; its height filled from below is the share of its token places that hold
a token; a picked request's blocks keep their colour while all others fade. The whole map is one image that
numpy writes, about a millisecond for some thousand blocks. Pools with more blocks than fit are scrolled,
never merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import QEvent, QPoint, QPointF, QSize, Qt, Signal, Slot
from PySide6.QtGui import (
    QColor,
    QHelpEvent,
    QImage,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    qGray,
)
from PySide6.QtWidgets import QAbstractScrollArea, QFrame, QToolTip, QWidget

from app import theme
from ipc.messages import (
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_HOST,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    BLOCK_SWAPPED,
    BLOCK_USED,
)

MIN_CELL, MAX_CELL = 3, 16
STATE_TOKENS = {
    BLOCK_FREE: "kv_free", BLOCK_CACHED: "kv_cached", BLOCK_USED: "kv_used", BLOCK_SHARED: "kv_shared",
    BLOCK_RESERVED: "kv_reserved", BLOCK_HOST: "kv_host", BLOCK_SWAPPED: "kv_swapped",
}  # fmt: skip


def cell_size(blocks: int, width: int, height: int) -> int:
    """The largest cell, in pixels, with which ``blocks`` fit into the area; never below `MIN_CELL`."""
    for cell in range(MAX_CELL, MIN_CELL, -1):
        if (width // cell) * (height // cell) >= blocks:
            return cell
    return MIN_CELL


class BlockMap(QAbstractScrollArea):
    """``picked`` emits the block number that was clicked; ``describe`` gives the text for one on hover."""

    picked = Signal(object)

    def __init__(self, least_height: int = 60) -> None:
        super().__init__()
        self._least_height = least_height
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.viewport().setMouseTracking(True)
        self.viewport().setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)  # nothing is painted below it
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.describe: Callable[[int], str] = lambda _block: ""
        self._state: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._fill: NDArray[np.uint16] = np.empty(0, np.uint16)
        self._block_size = 16
        self._chosen: NDArray[np.bool_] | None = None
        self._stale = False
        self._image: QImage | None = None
        self._pixels: NDArray[np.uint32] = np.empty((0, 0), np.uint32)
        self._cell, self._columns = MAX_CELL, 1
        theme.manager().changed.connect(self._on_theme)
        self.verticalScrollBar().valueChanged.connect(self._invalidate)

    def sizeHint(self) -> QSize:
        return QSize(300, 220)

    def minimumSizeHint(self) -> QSize:
        return QSize(140, self._least_height)

    @property
    def num_blocks(self) -> int:
        return int(self._state.shape[0])

    def set_blocks(self, state: NDArray[np.uint8], fill: NDArray[np.uint16], block_size: int) -> None:
        """Show states [N] and the tokens held [N] in blocks of ``block_size``. The arrays are kept."""
        resized = state.shape != self._state.shape
        self._state, self._fill, self._block_size = state, fill, max(1, block_size)
        if self._chosen is not None and self._chosen.shape != state.shape:
            self._chosen = None
        if resized:
            self._lay_out()
        self._invalidate()

    def set_stale(self, stale: bool) -> None:
        """Draw the blocks without colour: they are not what is, but what was."""
        if stale != self._stale:
            self._stale = stale
            self._invalidate()

    def set_chosen(self, blocks: list[int] | None) -> None:
        """Let these blocks stand out, or none."""
        if blocks is None:
            self._chosen = None
        else:
            self._chosen = np.zeros(self._state.shape, np.bool_)
            self._chosen[[b for b in blocks if b < self.num_blocks]] = True
        self._invalidate()

    def block_at(self, point: QPoint) -> int | None:
        """The number of the block under a point of the viewport."""
        column = point.x() // self._cell
        line = (point.y() + self.verticalScrollBar().value()) // self._cell
        block = line * self._columns + column
        return int(block) if 0 <= column < self._columns and 0 <= block < self.num_blocks else None

    def _lay_out(self) -> None:
        area = self.viewport().size()
        self._cell = cell_size(self.num_blocks, area.width(), area.height())
        self._columns = max(1, area.width() // self._cell)
        lines = math.ceil(self.num_blocks / self._columns)
        bar = self.verticalScrollBar()
        bar.setPageStep(max(1, area.height()))
        bar.setSingleStep(self._cell * 3)
        bar.setRange(0, max(0, lines * self._cell - area.height()))

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._lay_out()
        self._invalidate()

    @Slot()
    def _on_theme(self) -> None:
        self._invalidate()

    @Slot()
    def _invalidate(self) -> None:
        self._image = None
        self.viewport().update()

    def _render(self) -> QImage | None:
        """Write the visible lines of cells into one image."""
        if not self.num_blocks:
            return None
        cell, columns = self._cell, self._columns
        first = self.verticalScrollBar().value() // cell
        lines = min(math.ceil(self.num_blocks / columns) - first, self.viewport().height() // cell + 2)
        start, stop = first * columns, min((first + lines) * columns, self.num_blocks)
        count = lines * columns
        table = _colour_table(self._stale)
        state = self._state[start:stop]
        ground = QColor(theme.tokens().panel).rgba()
        full = np.full(count, ground, np.uint32)
        empty = np.full(count, ground, np.uint32)
        full[: stop - start] = table[0][np.minimum(state, BLOCK_SWAPPED)]
        empty[: stop - start] = table[1][np.minimum(state, BLOCK_SWAPPED)]
        if self._chosen is not None:
            others = ~self._chosen[start:stop]
            others &= state != BLOCK_FREE
            full[: stop - start][others] = table[1][np.minimum(state, BLOCK_SWAPPED)][others]
        inner = cell - 1
        fill = np.zeros(count, np.int64)
        fill[: stop - start] = self._fill[start:stop]
        levels = np.where(fill > 0, np.maximum(1, np.ceil(fill / self._block_size * inner)), 0)
        levels[: stop - start][state == BLOCK_FREE] = inner
        levels[: stop - start][state == BLOCK_RESERVED] = inner
        rows = np.arange(inner)[None, :] >= (inner - levels)[:, None]
        cells = np.full((count, cell), ground, np.uint32)
        cells[:, :inner] = np.where(rows, full[:, None], empty[:, None])
        picture = np.full((lines, cell, columns, cell), ground, np.uint32)
        picture[:, :, :, :inner] = cells.reshape(lines, columns, cell).transpose(0, 2, 1)[:, :, :, None]
        self._pixels = np.ascontiguousarray(picture.reshape(lines * cell, columns * cell))
        height, width = self._pixels.shape
        return QImage(self._pixels.data, width, height, width * 4, QImage.Format.Format_RGB32)

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._image is None:
            self._image = self._render()
        painter = QPainter(self.viewport())
        painter.fillRect(event.rect(), QColor(theme.tokens().panel))
        if self._image is not None:
            offset = self.verticalScrollBar().value() % self._cell
            painter.drawImage(QPointF(0, -offset), self._image)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        self.picked.emit(self.block_at(event.position().toPoint()))

    def viewportEvent(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            block = self.block_at(event.pos())
            text = self.describe(block) if block is not None else ""
            if text:
                QToolTip.showText(event.globalPos(), text, self)
            else:
                QToolTip.hideText()
            return True
        return super().viewportEvent(event)


def _shade(token: str, stale: bool) -> QColor:
    colour = theme.colour(token)
    grey = qGray(colour.rgb())
    return QColor(grey, grey, grey) if stale else colour


def _colour_table(stale: bool) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """ARGB of each state where it holds tokens, and where it holds none (or is not of the picked request).

    ``stale``: shades of grey.
    """
    panel = QColor(theme.tokens().panel)
    full, pale = [], []
    for token in STATE_TOKENS.values():
        colour = _shade(token, stale)
        full.append(colour.rgba())
        pairs = (
            (colour.red(), panel.red()),
            (colour.green(), panel.green()),
            (colour.blue(), panel.blue()),
        )
        mix = [round(0.28 * own + 0.72 * ground) for own, ground in pairs]
        pale.append(QColor(*mix).rgba())
    return np.array(full, np.uint32), np.array(pale, np.uint32)


class Swatch(QWidget):
    """A small square in a token's colour, for legends."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token, self._stale = token, False
        self.setFixedSize(11, 11)

    def set_stale(self, stale: bool) -> None:
        """As the map draws it while what it shows is over."""
        if stale != self._stale:
            self._stale = stale
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(QColor(theme.tokens().line))
        painter.setBrush(_shade(self._token, self._stale))
        painter.drawRect(0, 0, 10, 10)
