"""The newest readings of graphics cards, and which of them is the one the engine computes on."""

from __future__ import annotations

from collections.abc import Iterable

from ipc.messages import DeviceInfo, GpuRow


class CardBook:
    """Readings of one publication: those before it, of cards that are not told of any more, are gone."""

    def __init__(self) -> None:
        self.rows: list[GpuRow] = []

    def take(self, rows: Iterable[GpuRow]) -> None:
        """Take in readings in the order in which they were published.

        A publication has a row for each card, or one without a UUID that says why there is none. So a card
        that comes again begins another one.
        """
        for row in rows:
            told = {each.uuid for each in self.rows}
            if row.uuid in told or "" in told or not row.uuid:
                self.rows = []
            self.rows.append(row)

    def clear(self) -> None:
        """Forget everything: another engine, or none."""
        self.rows = []

    def own(self, device: DeviceInfo | None) -> GpuRow | None:
        """The card of ``device``; while that is not known the first; None where nothing is told of it.

        torch tells the UUID of a part of a card without its kind, and a part may be named by its beginning.
        """
        if device is not None and device.kind != "cuda":
            return None
        wanted = "" if device is None else _number(device.uuid)
        return next((row for row in self.rows if row.uuid and _number(row.uuid).startswith(wanted)), None)

    @property
    def trouble(self) -> str:
        """Why there are no readings at all, "" if there are some or nothing was heard yet."""
        return next((row.error for row in self.rows if not row.uuid), "")


def _number(uuid: str) -> str:
    """A UUID without its kind, ``GPU-`` or ``MIG-``."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")
