"""The link against a real engine that keeps running."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from app.model.knobs import KnobStatus
from app.net.types import LinkState
from app.store.collect import from_live
from app.store.errors import StoreError
from app.store.store import Store
from ipc.messages import Accepted, CfgSet, Done, Error, Ping, Pong, Reply, Submit, Tokens
from tests.app.engines import Console, ended


def test_an_engine_on_a_path_with_spaces_and_letters_of_all_kinds_becomes_ready(live: Console) -> None:
    """E12: the model's path holds spaces, Cyrillic and Chinese letters."""
    live.pump()
    link = live.session.link
    assert link.state is LinkState.READY
    assert link.managed
    assert link.engine is not None
    assert live.session.model is not None
    assert live.session.model.path.endswith("tiny model")
    assert live.session.device is not None
    assert {view.info.id for view in live.knobs.views()} >= {"prefix_cache", "max_num_seqs", "block_size"}


def test_a_stream_comes_whole_and_in_order(live: Console) -> None:
    items = live.submit("hello", max_tokens=30)
    live.until(lambda: ended(items), "the end of the stream")
    assert isinstance(items[0], Accepted)
    tokens = [item for item in items if isinstance(item, Tokens)]
    done = items[-1]
    assert isinstance(done, Done)
    assert [t.index for t in tokens] == list(np.cumsum([0, *(len(t.ids) for t in tokens)])[:-1])
    assert sum(len(t.ids) for t in tokens) == 30 == done.row.output_tok
    assert done.finish == "length"


def test_what_ran_is_in_the_session(live: Console) -> None:
    """C01: one TTFT sample for the request, ordered with queue and end."""
    items = live.submit("what ran", max_tokens=20)
    live.until(lambda: ended(items), "the end of the stream")
    done = items[-1]
    assert isinstance(done, Done)

    def mine() -> list[float]:
        rows = [v for v in live.session.request_rows() if v.rid == done.rid and v.row.state == "finished"]
        return [t for v in rows for t in (v.queue_s, v.ttft_s, v.e2e_s) if t is not None]

    live.until(lambda: len(mine()) == 3, "the request's last row")
    assert mine() == sorted(mine())
    assert live.session.kpis().ttft_p50_s.n >= 1
    live.until(lambda: (live.session.kpis().output_tok_s.value or 0) > 0, "throughput")
    assert live.session.stages().n > 0
    assert live.session.attention
    assert not live.session.gaps


def test_the_block_map_shows_a_running_requests_blocks(live: Console) -> None:
    items = live.submit("x" * 200, max_tokens=600)
    live.until(lambda: len(items) > 1, "its first token")
    accepted = items[0]
    assert isinstance(accepted, Accepted)
    live.until(lambda: len(live.session.blocks_of(accepted.rid)) >= 200 // 16, "its blocks on the map")
    live.until(lambda: ended(items), "its end")


def test_a_knob_is_applied_while_requests_run_and_undone(live: Console) -> None:
    items = live.submit("flip", max_tokens=400)
    live.until(lambda: len(items) > 1, "its first token")
    markers = len(live.session.markers)
    live.knobs.set({"prefix_cache": False})
    assert live.knobs.view("prefix_cache").status is KnobStatus.PENDING
    live.until(lambda: not live.knobs.pending, "the engine's word")
    view = live.knobs.view("prefix_cache")
    assert (view.status, view.applied) == (KnobStatus.APPLIED, False)
    assert view.took_s is not None
    assert live.knobs.undo() == {"prefix_cache": True}
    live.until(lambda: not live.knobs.pending, "the undo")
    assert live.knobs.view("prefix_cache").applied is True
    assert len(live.session.markers) == markers + 2
    live.until(lambda: ended(items), "its end")
    done = items[-1]
    assert isinstance(done, Done)
    assert done.row.output_tok == 400
    assert done.row.rev_last > done.row.rev_first


def test_a_refused_change_reverts_with_the_engines_reason(live: Console) -> None:
    live.knobs.set({"max_num_seqs": -5, "prefix_cache": False})
    live.until(lambda: not live.knobs.pending, "the engine's word")
    view = live.knobs.view("max_num_seqs")
    assert view.status is KnobStatus.REFUSED
    assert view.reason
    assert live.knobs.view("prefix_cache").applied is True


def test_two_consoles_change_different_knobs_at_once_and_both_succeed(live: Console) -> None:
    other = Console()
    try:
        other.link.attach(live.session.link.endpoint)
        other.until_state(LinkState.READY)
        other.until(lambda: other.knobs.rev == live.knobs.rev, "the same revision")
        live.knobs.set({"max_num_seqs": 32})
        other.knobs.set({"policy": "priority"})
        both = (live, other)
        live.until(lambda: (other.pump(), not any(c.knobs.pending for c in both))[1], "both changes")
        live.until(
            lambda: (other.pump(), all(c.knobs.values()["policy"] == "priority" for c in both))[1],
            "the same picture in both",
        )
        assert all(console.knobs.values()["max_num_seqs"] == 32 for console in both)
    finally:
        other.close()
    live.knobs.set({"max_num_seqs": 64, "policy": "fcfs"})
    live.until(lambda: not live.knobs.pending, "the old values")


def test_consoles_that_ask_at_once_after_connecting_lose_nothing(live: Console) -> None:
    """F04: each late joiner has its stream whole, and a picture without a hole."""
    for number in range(10):
        joiner = Console()
        try:
            joiner.link.attach(live.session.link.endpoint)
            items: list[object] = []
            while not items or isinstance(items[0], Error):  # refused until the welcome is there
                items = joiner.submit(f"join {number}", max_tokens=12)  # type: ignore[assignment]
                joiner.until(lambda found=items: bool(found), "a reply")  # type: ignore[misc]
            joiner.until(lambda found=items: ended(found), "the end of the stream")  # type: ignore[misc, arg-type]
            done = items[-1]
            assert isinstance(done, Done)
            assert sum(len(item.ids) for item in items if isinstance(item, Tokens)) == 12

            def row(rid: int = done.rid, seen: Console = joiner) -> bool:
                return any(v.rid == rid and v.row.state == "finished" for v in seen.session.request_rows())

            joiner.until(row, "its row")
            assert joiner.session.link.lost == {}
            assert not joiner.session.gaps
        finally:
            joiner.close()
    live.pump()
    assert live.session.link.state is LinkState.READY  # an attached console leaves the engine running


def test_each_command_is_answered_once_on_the_draining_thread(live: Console) -> None:
    replies: list[Reply] = []
    for _ in range(50):
        live.link.send(Ping(id=1), replies.append)
    live.link.send(CfgSet(id=1, expect_rev=10**6, patch={"prefix_cache": True}), replies.append)
    live.link.send(Submit(id=1), replies.append)
    assert not replies  # nothing runs before a drain
    live.until(lambda: len(replies) >= 52, "all replies")
    live.pump()
    assert sum(isinstance(reply, Pong) for reply in replies) == 50
    errors = [reply for reply in replies if isinstance(reply, Error)]
    assert {error.code for error in errors} == {"conflict", "invalid"}


def test_a_baseline_of_the_live_window_holds_raw_rows_and_the_configuration(
    live: Console, tmp_path: object
) -> None:
    for number in range(3):
        items = live.submit(f"baseline {number}", max_tokens=5)
        live.until(lambda found=items: ended(found), "its end")  # type: ignore[misc]
    last = items[-1]
    assert isinstance(last, Done)

    def told() -> bool:
        return any(v.rid == last.rid and v.row.state == "finished" for v in live.session.request_rows())

    live.until(told, "its last row")
    data = from_live(live.session, "now", newest=3)
    assert [row.output_tok for row in data.requests] == [5, 5, 5]
    assert data.config == live.knobs.values()
    assert data.stats.metrics["ttft_s"].n == 3
    assert data.identity.model == live.session.model
    assert data.identity.engine is not None
    assert data.validity.valid
    store = Store(tmp_path / "b.sqlite")  # type: ignore[operator]
    made = store.get(store.save_baseline(data))
    assert made.data.requests == data.requests
    live.session.window_s = 30.0
    with pytest.raises(StoreError, match="nothing to keep"):
        from_live(live.session, "none", newest=0)


def test_an_error_in_one_callback_is_reported_and_loses_nothing(
    live: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr("sys.excepthook", lambda kind, error, trace: reported.append(kind))
    replies: list[Reply] = []
    live.link.send(Ping(id=1), lambda reply: 1 / 0)  # type: ignore[arg-type, return-value]
    live.link.send(Ping(id=1), replies.append)
    live.until(lambda: replies, "the second reply")
    assert reported == [ZeroDivisionError]


def test_a_fault_of_the_links_own_thread_is_told_and_a_new_connection_works(
    live: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Console()
    try:
        other.link.attach(live.session.link.endpoint)
        other.until_state(LinkState.READY)
        with monkeypatch.context() as patch:
            patch.setattr(other.link._inbox, "collect", lambda connection: 1 / 0)
            other.until_state(LinkState.DEAD)
        assert "ZeroDivisionError" in other.session.link.reason
        other.link.attach(live.session.link.endpoint)
        other.until(lambda: other.session.link.state is LinkState.READY, "a new connection")
    finally:
        other.close()


def test_lost_telemetry_is_counted_resynced_and_drawn_as_a_gap(live: Console) -> None:
    """A console that misses every third message ends with the requests and the knobs of one that missed
    none; steps that no snapshot brought back are said to be lost, none is made up."""
    other = Console()
    try:
        other.link.attach(live.session.link.endpoint)
        other.until_state(LinkState.READY)
        connection = other.link._connection
        assert connection is not None
        whole = connection.mirror.frame
        numbers = itertools.count()

        def leaky(*frame: Any) -> None:
            if next(numbers) % 3:
                whole(*frame)

        begun_s = live.pump().now_s
        connection.mirror.frame = leaky  # type: ignore[method-assign]
        for number in range(4):
            items = live.submit(f"gap {number}", max_tokens=150)
            live.until(lambda found=items: (other.pump(), ended(found))[1], "its end")  # type: ignore[misc]
        live.knobs.set({"max_num_seqs": 63})
        live.until(lambda: (other.pump(), not live.knobs.pending)[1], "the change")
        connection.mirror.frame = whole  # type: ignore[method-assign]
        other.until(lambda: other.knobs.values().get("max_num_seqs") == 63, "the change in the other picture")
        items = live.submit("whole again", max_tokens=5)  # later steps show that earlier ones are missing
        live.until(lambda: (other.pump(), ended(items))[1], "its end")
        settled_s = live.pump().now_s + 4.5  # holes become gaps, and bins are drawn, by then
        live.until(lambda: (other.pump(), live.session.now_s > settled_s)[1], "quiet")

        assert sum(other.session.link.lost.values()) > 0
        assert [v.rid for v in other.session.request_rows() if v.row.state != "finished"] == []
        missing = sum(int(gap.reason.split()[0]) for gap in other.session.gaps)
        drawn = [
            float(np.nansum(seen.timeline.column("steps")[seen.timeline.times() > begun_s + 0.5]))
            for seen in (live.session, other.session)
        ]
        assert drawn[1] <= drawn[0] + 1e-6  # sums of parts of steps, in another order
        assert drawn[0] - drawn[1] <= missing + 1e-6
    finally:
        other.close()
        live.knobs.set({"max_num_seqs": 64})
        live.until(lambda: not live.knobs.pending, "the old value")
