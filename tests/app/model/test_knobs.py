"""Desired is not applied: pending, applied, refused, undone."""

from __future__ import annotations

import msgspec

from app.model.knobs import KnobModel, KnobStatus
from app.net.types import OnReply
from ipc.messages import ApplyEvent, Cfg, CfgAccepted, CfgGet, CfgSet, Command, Error, KnobValue
from tests.app.builders import batch, cfg, knob


class Wire:
    """Keeps what was sent, and answers as told."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.replies: list[OnReply] = []
        self.applies = 0

    def __call__(self, command: Command, on_reply: OnReply | None = None, /) -> int:
        assert on_reply is not None
        self.sent.append(command)
        self.replies.append(on_reply)
        return len(self.sent)

    @property
    def last_set(self) -> CfgSet:
        command = self.sent[-1]
        assert isinstance(command, CfgSet)
        return command

    def accept(self) -> int:
        self.applies += 1
        patch = self.last_set.patch
        self.replies[-1](CfgAccepted(id=1, apply_id=self.applies, mode="step", changed=patch, running=0))
        return self.applies

    def refuse(self, code: str = "invalid", **keys: str) -> None:
        self.replies[-1](Error(id=1, code=code, message="refused", keys=keys))  # type: ignore[arg-type]


def applied(apply_id: int, from_rev: int, patch: dict[str, KnobValue], result: str = "ok") -> ApplyEvent:
    to_rev = from_rev + 1 if result == "ok" else from_rev
    return ApplyEvent(
        apply_id=apply_id, from_rev=from_rev, to_rev=to_rev, result=result, t_ns=1, at_step=2, took_us=3000,
        mode="step", patch=patch, preempted=2, why="out of memory" if result != "ok" else "",
    )  # type: ignore[arg-type]  # fmt: skip


def model() -> tuple[KnobModel, Wire]:
    wire = Wire()
    made = KnobModel(wire)
    made.load(cfg(5))
    return made, wire


def test_a_click_is_pending_until_the_engine_says_applied() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False})
    view = knobs.view("prefix_cache")
    assert (view.status, view.applied, view.desired) == (KnobStatus.PENDING, True, False)
    assert wire.last_set.expect_rev == 5
    number = wire.accept()
    assert knobs.view("prefix_cache").status is KnobStatus.PENDING
    knobs.ingest(batch(1.0, events=[applied(number, 5, {"prefix_cache": False})]))
    view = knobs.view("prefix_cache")
    assert (view.status, view.applied, view.desired) == (KnobStatus.APPLIED, False, False)
    assert (view.took_s, view.preempted, knobs.rev) == (0.003, 2, 6)


def test_what_can_be_had_may_change_at_the_same_revision() -> None:
    """The engine knows what its model allows only once it is loaded."""
    made, _ = model()
    before = cfg(5)
    after = Cfg(id=1, rev=5, values=before.values, knobs=[
        msgspec.structs.replace(info, available=False, reason="not with this model") for info in before.knobs
    ])  # fmt: skip
    version = made.version
    made.load(before)
    assert made.version == version, "nothing new"
    made.load(after)
    assert made.version > version
    assert made.view("prefix_cache").info.reason == "not with this model"


def test_an_event_may_overtake_its_acceptance() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False})
    knobs.ingest(batch(1.0, events=[applied(1, 5, {"prefix_cache": False})]))
    wire.accept()
    assert knobs.view("prefix_cache").status is KnobStatus.APPLIED
    assert not knobs.pending
    assert knobs.can_undo


def test_a_refusal_reverts_with_its_reason() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False, "max_num_seqs": 0})
    wire.refuse(max_num_seqs="must be 1 or more")
    assert knobs.view("max_num_seqs").status is KnobStatus.REFUSED
    assert knobs.view("max_num_seqs").reason == "must be 1 or more"
    assert knobs.view("max_num_seqs").desired == 64
    assert knobs.view("prefix_cache").applied is True
    assert not knobs.can_undo


def test_a_rollback_reverts_with_its_reason() -> None:
    knobs, wire = model()
    knobs.set({"max_num_seqs": 128})
    number = wire.accept()
    knobs.ingest(batch(1.0, events=[applied(number, 5, {"max_num_seqs": 128}, "rolled_back")]))
    view = knobs.view("max_num_seqs")
    assert (view.status, view.applied) == (KnobStatus.REFUSED, 64)
    assert "out of memory" in view.reason


def test_undo_is_the_inverse_patch_and_redo_the_patch_again() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False, "max_num_seqs": 8})
    knobs.ingest(batch(1.0, events=[applied(wire.accept(), 5, {"prefix_cache": False, "max_num_seqs": 8})]))
    assert knobs.undo() == {"prefix_cache": True, "max_num_seqs": 64}
    assert wire.last_set.expect_rev == 6
    knobs.ingest(batch(2.0, events=[applied(wire.accept(), 6, {"prefix_cache": True, "max_num_seqs": 64})]))
    assert not knobs.can_undo
    assert knobs.redo() == {"prefix_cache": False, "max_num_seqs": 8}
    knobs.ingest(batch(3.0, events=[applied(wire.accept(), 7, {"prefix_cache": False, "max_num_seqs": 8})]))
    assert knobs.can_undo
    assert not knobs.can_redo


def test_a_refused_undo_can_be_tried_again() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False})
    knobs.ingest(batch(1.0, events=[applied(wire.accept(), 5, {"prefix_cache": False})]))
    knobs.undo()
    wire.refuse("not_ready")
    assert knobs.can_undo


def test_a_conflict_is_retried_when_it_does_not_touch_the_same_knobs() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False})
    wire.refuse("conflict")
    assert isinstance(wire.sent[-1], CfgGet)
    wire.replies[-1](cfg(9, prefix_cache=True, max_num_seqs=7))
    assert wire.last_set.expect_rev == 9
    assert wire.last_set.patch == {"prefix_cache": False}
    assert knobs.view("max_num_seqs").applied == 7


def test_a_conflict_over_the_same_knob_is_refused_and_says_what_it_is_now() -> None:
    knobs, wire = model()
    knobs.set({"max_num_seqs": 8})
    wire.refuse("conflict")
    wire.replies[-1](cfg(9, prefix_cache=True, max_num_seqs=7))
    view = knobs.view("max_num_seqs")
    assert (view.status, view.applied) == (KnobStatus.REFUSED, 7)
    assert "7" in view.reason
    assert len(wire.sent) == 2  # the change, and the question: nothing was overwritten


def test_conflicts_are_not_retried_for_ever() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False})
    for rev in range(6, 30):
        wire.refuse("conflict")
        if not knobs.pending:
            break
        wire.replies[-1](cfg(rev))
    assert knobs.view("prefix_cache").status is KnobStatus.REFUSED
    assert len(wire.sent) <= 8


def test_changes_are_sent_one_at_a_time_in_order() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": False})
    knobs.set({"prefix_cache": True})
    assert len(wire.sent) == 1
    assert knobs.view("prefix_cache").desired is True
    knobs.ingest(batch(1.0, events=[applied(wire.accept(), 5, {"prefix_cache": False})]))
    assert wire.last_set.patch == {"prefix_cache": True}
    assert wire.last_set.expect_rev == 6


def test_a_change_that_changes_nothing_ends_at_its_acceptance() -> None:
    knobs, wire = model()
    knobs.set({"prefix_cache": True})
    wire.replies[-1](CfgAccepted(id=1, apply_id=0, mode="step", changed={}, running=0))
    assert not knobs.pending
    assert not knobs.can_undo


def test_a_change_on_its_way_when_the_engine_dies_is_refused() -> None:
    knobs, _ = model()
    knobs.set({"prefix_cache": False})
    knobs.ingest(batch(1.0, new_session=True, cfg=cfg(0)))
    view = knobs.view("prefix_cache")
    assert (view.status, view.desired) == (KnobStatus.REFUSED, True)


def test_a_refusal_ends_with_the_engine_that_gave_it() -> None:
    knobs, wire = model()
    knobs.set({"max_num_seqs": 0})
    wire.refuse(max_num_seqs="must be 1 or more")
    assert KnobStatus.REFUSED in [view.status for view in knobs.views()]
    knobs.ingest(batch(1.0, new_session=True))  # its configuration comes later
    assert KnobStatus.REFUSED not in [view.status for view in knobs.views()]
    assert "".join(view.reason for view in knobs.views()) == ""


def test_a_stored_configuration_gives_what_differs_and_says_what_cannot_be_had() -> None:
    knobs, _ = model()
    stored = {"prefix_cache": True, "max_num_seqs": 4, "gone": 1}
    assert knobs.difference(stored) == {"max_num_seqs": 4}
    assert set(knobs.unavailable(stored)) == {"gone"}


def test_a_stored_configuration_leaves_out_knobs_that_are_unavailable_here() -> None:
    knobs, _ = model()
    odd = cfg(6)
    knobs.load(
        type(odd)(
            id=1,
            rev=6,
            values={"graphs": False},
            knobs=[knob("graphs", available=False, reason="needs a GPU")],
        )
    )
    assert knobs.difference({"graphs": True}) == {}
    assert knobs.unavailable({"graphs": True}) == {"graphs": "needs a GPU"}


def test_a_change_waits_for_one_that_is_being_applied() -> None:
    """Another client was first: its rebuild ends some time later, and this change goes on by itself."""
    knobs, wire = model()
    knobs.ingest(batch(1.0))
    knobs.set({"prefix_cache": False})
    wire.refuse("busy")
    assert knobs.view("prefix_cache").status is KnobStatus.PENDING
    knobs.ingest(batch(1.1))
    assert isinstance(wire.sent[-1], CfgSet)  # nothing has happened yet
    knobs.ingest(batch(1.2, events=[applied(9, 5, {"max_num_seqs": 8})]))
    assert isinstance(wire.sent[-1], CfgGet)
    wire.replies[-1](cfg(6, prefix_cache=True, max_num_seqs=8))
    assert wire.last_set.expect_rev == 6
    wire.refuse("busy")
    knobs.ingest(batch(2.0))  # without an event it asks again after a while
    assert isinstance(wire.sent[-1], CfgGet)
    wire.replies[-1](cfg(6, prefix_cache=True, max_num_seqs=8))
    knobs.ingest(batch(2.1, events=[applied(wire.accept(), 6, {"prefix_cache": False})]))
    assert knobs.view("prefix_cache").applied is False
    assert knobs.view("prefix_cache").status is KnobStatus.APPLIED


def test_a_change_does_not_wait_for_ever() -> None:
    knobs, wire = model()
    knobs.ingest(batch(1.0))
    knobs.set({"prefix_cache": False})
    for tick in range(200):
        if isinstance(wire.sent[-1], CfgSet):
            wire.refuse("busy")
        else:
            wire.replies[-1](cfg(5))
            continue
        if not knobs.pending:
            break
        knobs.ingest(batch(2.0 + tick))
    view = knobs.view("prefix_cache")
    assert (view.status, view.reason) == (KnobStatus.REFUSED, "refused")
    assert 50 <= tick <= 150
