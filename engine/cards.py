"""Which graphics cards there are, and which of them this process sees: by UUID, never by a bare number.

A card that is divided (MIG) has parts with UUIDs of their own. Sources: NVML API reference; CUDA C++
programming guide, "CUDA Environment Variables"; NVIDIA MIG user guide, "CUDA_VISIBLE_DEVICES".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GPU, MIG = "GPU-", "MIG-"


@dataclass(frozen=True, slots=True)
class Card:
    """One card as NVML numbers them, in PCI order. ``parts``: what MIG has divided it into.

    A part has the handle of the ``whole`` card too. ``error``: why the driver tells nothing of a card that it
    counts, as of one that has fallen off the bus: it keeps its place among the others, and has no UUID.
    """

    uuid: str
    name: str
    handle: Any = None
    parts: tuple[Card, ...] = ()
    whole: Any = None
    error: str = ""

    @property
    def is_part(self) -> bool:
        return self.uuid.startswith(MIG)


class CannotMap(Exception):
    """``CUDA_VISIBLE_DEVICES`` does not say for certain which cards are meant."""


def list_cards(nvml: Any) -> list[Card]:
    """All cards of the machine, with their parts; one that cannot be asked has an ``error``."""
    return [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _card(nvml: Any, index: int) -> Card:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    except Exception as error:  # one card's trouble is not the others'
        why = str(error) or type(error).__name__
        return Card("", "", error=f"card {index} cannot be read: {why}")
    return Card(uuid, name, handle, tuple(_parts(nvml, handle, name)))


def _parts(nvml: Any, handle: Any, name: str) -> Iterator[Card]:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
    except Exception:  # cards without MIG say so by an error
        return
    for index in range(count):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except Exception:  # there are gaps between the numbers of parts
            continue
        yield Card(_text(nvml.nvmlDeviceGetUUID(part)), f"{name} (MIG)", part, whole=handle)


def visible_cards(cards: Sequence[Card], environ: Mapping[str, str]) -> list[Card]:
    """The cards, and parts of cards, that CUDA shows this process, in its order. Raises `CannotMap`.

    NVML ignores ``CUDA_VISIBLE_DEVICES``. Numbers there are in PCI order only under
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; an entry that names no card, or is of another kind than the first one,
    hides itself and all that follow. Of a divided card that is not named by a part's UUID the first part is
    shown.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [_shown(card) for card in cards]
    entries = [entry.strip() for entry in wanted.split(",")]
    kind = next((kind for kind in (GPU, MIG) if entries[0].startswith(kind)), None)
    shown: list[Card] = []
    for entry in entries:
        card = _numbered(cards, entry, wanted, environ) if kind is None else _named(cards, entry, kind)
        if card is None:
            break
        if card in shown:
            raise CannotMap(
                f"CUDA_VISIBLE_DEVICES={wanted} names a card twice, and CUDA shows none then; name each once"
            )
        shown.append(card)
    return [_shown(card) for card in shown]


def _shown(card: Card) -> Card:
    return card.parts[0] if card.parts else card


def _numbered(cards: Sequence[Card], entry: str, wanted: str, environ: Mapping[str, str]) -> Card | None:
    """The card that CUDA finds under the number with which an entry begins: it reads no further."""
    digits = re.match(r"\+?([0-9]+)", entry)
    if digits is None:
        return None
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({card.name for card in cards}) > 1:
        why = next((card.error for card in cards if card.error), "") or "the cards differ"
        raise CannotMap(
            f"CUDA_VISIBLE_DEVICES={wanted} counts in CUDA's own order and {why}; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    number = int(digits[1])
    return cards[number] if number < len(cards) else None


def _named(cards: Sequence[Card], entry: str, kind: str) -> Card | None:
    fitting = find(cards, entry) if entry.startswith(kind) else []
    if len(fitting) > 1:
        raise CannotMap(
            f"CUDA_VISIBLE_DEVICES names {entry}, with which {len(fitting)} cards begin; "
            "write the whole UUID, as nvidia-smi -L tells it"
        )
    return fitting[0] if fitting else None


def find(cards: Sequence[Card], uuid: str) -> list[Card]:
    """The cards or parts whose UUID begins with ``uuid``, ``GPU-...`` or ``MIG-...``."""
    every = [card for whole in cards for card in (whole, *whole.parts)]
    return [card for card in every if uuid.startswith((GPU, MIG)) and card.uuid.startswith(uuid)]


def part_in_use(environ: Mapping[str, str]) -> str | None:
    """The part of a card that this process computes on: CUDA shows a process one at most, the first named."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.startswith(MIG) else None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
