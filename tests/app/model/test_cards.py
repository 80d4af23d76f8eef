"""Which readings of cards are present ones, and whose."""

from __future__ import annotations

import pytest

from app.model.cards import CardBook
from app.model.session import SessionModel
from app.net.types import LinkState, LinkStatus
from ipc.messages import DeviceInfo, GpuRow
from tests.app.builders import batch, state

CPU = DeviceInfo(kind="cpu", name="Test CPU")


def row(uuid: str) -> GpuRow:
    return GpuRow(t_ns=1, uuid=uuid, name="" if not uuid else "H200", error="" if uuid else "no driver")


def on(uuid: str) -> DeviceInfo:
    return DeviceInfo(kind="cuda", name="H200", uuid=uuid)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "b", "a", "b"], ["a", "b"]),
        (["a", "b", "b"], ["b"]),
        (["a", "b", ""], [""]),
        (["", "a"], ["a"]),
    ],
)
def test_readings_of_one_publication_are_kept(told: list[str], kept: list[str]) -> None:
    for size in (1, len(told)):  # in one batch or in several
        book = CardBook()
        for first in range(0, len(told), size):
            book.take(map(row, told[first : first + size]))
        assert [each.uuid for each in book.rows] == kept
    assert book.trouble == ("no driver" if kept == [""] else "")


def test_the_engines_own_card_is_found_by_its_uuid() -> None:
    book = CardBook()
    book.take(map(row, ["GPU-aaaa", "MIG-bbbb-1"]))
    assert book.own(None) is book.rows[0]
    assert book.own(on("GPU-aaaa")) is book.rows[0]
    for part in ("MIG-bbbb-1", "MIG-bbbb", "GPU-bbbb-1"):
        assert book.own(on(part)) is book.rows[1]
    assert book.own(on("GPU-cccc")) is None
    assert book.own(CPU) is None


def test_readings_end_with_their_engine() -> None:
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state(), gpu=[row("GPU-a")]))
    assert len(session.cards.rows) == 1
    session.ingest(batch(101.0, new_session=True, state=state()))
    assert session.cards.rows == []
    session.ingest(batch(102.0, gpu=[row("GPU-a")]))
    session.ingest(batch(103.0, link=LinkStatus(state=LinkState.DEAD)))
    assert session.cards.rows == []
