"""The server as its clients see it: one real engine process with a tiny model serves this whole file."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from ipc import codec
from ipc import messages as m
from ipc.client import Client, EngineError, Stream
from ipc.mirror import Mirror
from tests.engine.harness import EngineUnderTest, greedy, wait_until, write_model
from tests.ipc.samples import COMMANDS

LONG = m.Sampling(max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """An engine that may open 256 files; ``while_loading`` is what it answered before it had a model."""
    folder = tmp_path_factory.mktemp("Модели ü 空 x")
    running = EngineUnderTest(
        write_model(folder / os.fsdecode(b"no text \xff")),
        "--vanish-grace-s",
        "2",  # longer than the time between two looks at who is still there
        "--check",
        max_files=256,
    )
    with running.client() as client:
        running.while_loading = _ask_everything(client)  # type: ignore[attr-defined]
        client.wait_ready(240.0)
    yield running
    running.end()


def _ask_everything(client: Client) -> dict[str, Any]:
    answers: dict[str, Any] = {"snapshot": client.snapshot(60.0), "cfg": client.config(60.0)}
    for name, ask in {
        "submit": lambda: client.submit("too early"),
        "cfg.set": lambda: client.configure({"policy": "priority"}, expect_rev=0),
    }.items():
        try:
            answers[name] = ask()
        except EngineError as error:
            answers[name] = error
    return answers


@pytest.fixture
def client(engine: EngineUnderTest) -> Iterator[Client]:
    with engine.client() as connected:
        yield connected


def _dealer(context: zmq.Context[zmq.Socket[bytes]], engine: EngineUnderTest) -> zmq.Socket[bytes]:
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.RCVTIMEO, 60_000)
    raw.setsockopt(zmq.SNDTIMEO, 60_000)
    raw.setsockopt(zmq.RCVHWM, 100_000)
    raw.connect(engine.ctl)
    return raw


def _hello(**changes: Any) -> m.Hello:
    values = {"id": 1, "proto_min": 1, "proto_max": m.PROTOCOL, "client": "raw", "version": "1"}
    return m.Hello(**{**values, **changes})


# --- handshake ------------------------------------------------------------------------------------


def test_it_answers_while_it_loads(engine: EngineUnderTest) -> None:
    """B10, E12: before the model is there, from a path with spaces, other alphabets and no text at all."""
    answers = engine.while_loading  # type: ignore[attr-defined]
    assert answers["snapshot"].state.phase in ("starting", "loading")
    assert answers["cfg"].rev == 0
    assert {knob.id for knob in answers["cfg"].knobs} == set(answers["cfg"].values)
    for name in ("submit", "cfg.set"):
        assert answers[name].code == "not_ready"
        assert answers[name].retry_after_ms > 0


def test_welcome_says_who_it_is_and_where_telemetry_is(engine: EngineUnderTest, client: Client) -> None:
    welcome = client.welcome
    assert welcome is not None
    assert welcome.session == engine.ready["session"]
    assert welcome.tel_endpoint == engine.ready["tel"]
    assert welcome.engine.pid == engine.process.pid
    assert welcome.engine.packages["torch"] == welcome.engine.torch != ""


def test_no_common_protocol_is_said_with_both_ranges(engine: EngineUnderTest) -> None:
    with zmq.Context() as context, _dealer(context, engine) as raw:
        raw.send(codec.encode(_hello(proto_min=7, proto_max=9)))
        reply = codec.decode_reply(raw.recv_multipart())
        assert isinstance(reply, m.Error)
        assert reply.code == "proto_mismatch"
        assert "7 to 9" in reply.message
        raw.send(codec.encode(m.Ping(id=2)))
        reply = codec.decode_reply(raw.recv_multipart())
        assert isinstance(reply, m.Error)
        assert (reply.id, reply.code) == (2, "unauthorized")


def test_sockets_and_their_folder_are_private(engine: EngineUnderTest) -> None:
    """F01: nobody but this user can reach them."""
    path = Path(engine.ctl.removeprefix("ipc://"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for suffix in (".ctl", ".tel", ".json", ".lock"):
        assert path.with_suffix(suffix).stat().st_mode & 0o077 == 0


# --- requests -------------------------------------------------------------------------------------


def test_a_streamed_and_a_whole_answer_are_the_same(client: Client) -> None:
    ids, text = greedy(client, "hello", 20)
    assert len(ids) == 20
    whole = client.submit("hello", sampling=m.Sampling(max_tokens=20, ignore_eos=True), stream=False)
    items = list(whole)
    assert [type(item) for item in items] == [m.Done]
    assert (items[0].ids, items[0].text) == (ids, text)


def test_every_token_has_its_index_and_time(client: Client) -> None:
    stream = client.submit("count", sampling=m.Sampling(max_tokens=30, ignore_eos=True))
    items = list(stream)
    tokens = [item for item in items if isinstance(item, m.Tokens)]
    assert [item.index for item in tokens] == list(np.cumsum([0, *(len(t.ids) for t in tokens[:-1])]))
    times = [t for item in tokens for t in item.t_ns]
    assert len(times) == 30
    assert times == sorted(times)
    row = stream.done.row if stream.done else None
    assert row is not None
    assert (row.output_tok, row.first_ns, row.last_ns) == (30, times[0], times[-1])


def test_cancel_ends_the_stream_and_can_be_said_twice(client: Client) -> None:
    stream = client.submit("x", sampling=LONG)
    next(stream)
    command = m.Cancel(id=client.next_id(), rid=stream.rid)
    assert client.call(command, m.Cancelled).n == 1
    assert client.call(command, m.Cancelled).n == 1, "the same command again: the same answer"
    _, _, done = stream.result()
    assert done.finish == "cancelled"
    assert client.call(m.Cancel(id=client.next_id(), rid=stream.rid), m.Cancelled).n == 0


def test_cancel_by_tag_and_all(engine: EngineUnderTest, client: Client) -> None:
    with engine.client() as other:
        mine = [client.submit("a", sampling=LONG, tag="t1"), client.submit("b", sampling=LONG)]
        theirs = [other.submit("c", sampling=LONG, tag="t1"), other.submit("d", sampling=LONG)]
        assert client.call(m.Cancel(id=client.next_id(), tag="t1"), m.Cancelled).n == 2
        assert mine[0].result()[2].finish == theirs[0].result()[2].finish == "cancelled"
        assert client.call(m.Cancel(id=client.next_id(), all=True), m.Cancelled).n == 1
        assert mine[1].result()[2].finish == "cancelled"
        assert theirs[1].done is None
        theirs[1].cancel()
        assert theirs[1].result()[2].finish == "cancelled"


def test_a_command_that_arrives_twice_is_carried_out_once(engine: EngineUnderTest, client: Client) -> None:
    command = client.build_submit("once", sampling=m.Sampling(max_tokens=3, ignore_eos=True))
    for _ in range(3):
        client.send(command)
    accepted, ends = [], []
    deadline = time.monotonic() + 60
    while len(accepted) < 1 or not ends:
        for item in client.poll(0.1):
            (accepted if isinstance(item, m.Accepted) else ends if isinstance(item, m.Done) else []).append(
                item
            )
        assert time.monotonic() < deadline
    client.send(command)
    again = client.poll(30.0)
    assert {item.rid for item in [*accepted, *again] if isinstance(item, m.Accepted)} == {accepted[0].rid}
    assert [item.rid for item in ends] == [accepted[0].rid]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt": None}, "invalid"),
        ({"prompt": "a", "tokens": [1]}, "invalid"),
        ({"prompt": ""}, "invalid"),
        ({"prompt": None, "tokens": []}, "invalid"),
        ({"prompt": None, "tokens": [288]}, "invalid"),
        ({"prompt": None, "messages": [m.ChatMessage(role="user", content="hi")]}, "invalid"),
        ({"prompt": "a" * 9000}, "too_long"),
    ],
)
def test_what_cannot_run_is_refused_at_the_door(client: Client, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(EngineError) as caught:
        client.call(m.Submit(id=client.next_id(), **{"prompt": "a", **changes}), m.Accepted)
    assert caught.value.code == code


def test_equal_labels_never_mix_answers(engine: EngineUnderTest, client: Client) -> None:
    """A35: two clients use the same command id and tag; cancelling one leaves the other its own text."""
    alone = greedy(client, "second", 40)
    with engine.client() as other:
        command_id = 1_000_000
        first = client.submit_command(m.Submit(id=command_id, prompt="first", sampling=LONG, tag="id"))
        second = other.submit_command(
            m.Submit(
                id=command_id, prompt="second", sampling=m.Sampling(max_tokens=40, ignore_eos=True), tag="id"
            )
        )
        assert first.rid != second.rid
        first.cancel()
        assert second.result()[:2] == alone
        assert first.result()[2].finish == "cancelled"
    state = client.snapshot().state
    assert state.running >= 0


def test_streams_read_at_different_speeds_do_not_hold_each_other(client: Client) -> None:
    """A36: one is never read, one is read last, and every iterator ends."""
    sampling = m.Sampling(max_tokens=60, ignore_eos=True)
    streams = [client.submit(f"prompt {n}", sampling=sampling) for n in range(10)]
    for n, stream in enumerate(reversed(streams[1:])):
        for count, _ in enumerate(stream):
            if n % 3 == 0 and count % 20 == 0:
                time.sleep(0.01)
        assert stream.done is not None
        assert list(stream) == [], "an ended stream stays ended"
    assert streams[0].done is not None, "nobody read it, and it ended all the same"


def test_a_thousand_streams_over_one_socket(engine: EngineUnderTest, client: Client) -> None:
    """B09: with 256 files to open, all are answered or refused, later ones work, no file stays open."""
    greedy(client, "warm up")
    files = Path(f"/proc/{engine.process.pid}/fd")
    before = len(list(files.iterdir()))
    sampling = m.Sampling(max_tokens=2, ignore_eos=True)
    for n in range(1000):
        client.send(client.build_submit([n % 250, 1, 2], sampling=sampling))
    ended = refused = 0
    deadline = time.monotonic() + 200
    while ended + refused < 1000:
        for item in client.poll(1.0):
            ended += isinstance(item, m.Done)
            if isinstance(item, m.Error):
                refused += 1
                assert item.retry_after_ms
        assert time.monotonic() < deadline, f"{ended} ended, {refused} refused"
    assert ended > 0
    assert len(greedy(client, "later")[0]) == 12
    wait_until(lambda: len(list(files.iterdir())) <= before + 1, "the engine closes what it opened")


def test_a_client_that_sends_too_fast_is_told_when_to_come_back(client: Client) -> None:
    for _ in range(1400):
        client.send(m.Ping(id=client.next_id()))
    replies: list[m.Reply] = []
    while len(replies) < 1400:
        replies += client.poll(10.0)
    refused = [reply for reply in replies if isinstance(reply, m.Error)]
    assert refused
    assert all(reply.code == "rate_limited" and reply.retry_after_ms for reply in refused)
    assert sum(isinstance(reply, m.Pong) for reply in replies) >= 1200


def test_requests_of_a_client_that_vanished_are_ended(engine: EngineUnderTest, client: Client) -> None:
    """A grace of 2 s passes, though the client is found gone anew by each look at it in that time."""
    sampling = m.Sampling(max_tokens=8000, ignore_eos=True)  # not at its end before the grace is

    def live_tags() -> set[str]:
        return {row.tag for row in client.snapshot().requests if row.state != "finished"}

    with engine.client() as other:
        other.submit("a", sampling=sampling, tag="vanishing")
        other.submit_command(
            m.Submit(id=other.next_id(), prompt="b", sampling=sampling, tag="detached", detach=True)
        )
        wait_until(lambda: {"vanishing", "detached"} <= live_tags(), "both are live")
    wait_until(lambda: "vanishing" not in live_tags(), "the orphan is cancelled")
    assert "detached" in live_tags()
    lines = client.call(m.LogTail(id=client.next_id(), max=50), m.LogLines).lines
    assert any("1 request of " in line.message and "its client has gone" in line.message for line in lines)
    assert client.call(m.Cancel(id=client.next_id(), tag="detached"), m.Cancelled).n == 1


# --- configuration --------------------------------------------------------------------------------


def test_a_race_for_the_configuration_has_one_winner(engine: EngineUnderTest, client: Client) -> None:
    with engine.client() as other:
        for n in range(150):
            rev = client.config().rev
            patch: dict[str, m.KnobValue] = {"max_num_seqs": 10 + n % 2}
            ids = {}
            for racer in (client, other) if n % 2 else (other, client):
                ids[racer] = racer.next_id()
                racer.send(m.CfgSet(id=ids[racer], expect_rev=rev, patch=patch))
            replies = [_reply_to(racer, command_id) for racer, command_id in ids.items()]
            codes = sorted(r.code if isinstance(r, m.Error) else "accepted" for r in replies)
            assert codes in (["accepted", "busy"], ["accepted", "conflict"])
            wait_until(lambda rev=rev: client.config().rev == rev + 1, "it is applied once")
            time.sleep(0.01)


def _reply_to(client: Client, command_id: int) -> m.Reply:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for reply in client.poll(1.0):
            if not isinstance(reply, m.Tokens | m.Done | m.Probe) and reply.id == command_id:
                return reply
    raise AssertionError(f"command {command_id} was never answered")


def test_only_a_change_on_its_way_can_be_cancelled(client: Client) -> None:
    with pytest.raises(EngineError) as caught:
        client.call(m.CfgCancel(id=client.next_id(), apply_id=1 << 40), m.Ok)
    assert caught.value.code == "not_found"


def test_a_patch_is_taken_whole_or_refused_with_a_reason_for_each_key(client: Client) -> None:
    cfg = client.config()
    with pytest.raises(EngineError) as caught:
        client.configure({"policy": "priority", "block_size": 0, "nonsense": 1, "cuda_graphs": True})
    assert caught.value.code == "invalid"
    assert set(caught.value.keys) == {"block_size", "nonsense", "cuda_graphs"}
    told = str(caught.value)
    assert [told.count(f"{key}: {why}") for key, why in caught.value.keys.items()] == [1, 1, 1], told
    assert client.config().values == cfg.values


def test_a_change_while_requests_run_is_told_and_cuts_the_step_rows(client: Client) -> None:
    client.subscribe(["event", "step", "state"])
    stream = client.submit("go on", sampling=LONG)
    next(stream)
    old = client.config()
    accepted = client.configure({"prefix_cache": not old.values["prefix_cache"]}, expect_rev=old.rev)
    assert accepted.mode == "step"
    for _ in range(200):
        next(stream)
    stream.cancel()
    assert stream.result()[2].finish == "cancelled"
    time.sleep(0.2)
    seen = [message for _, _, message in client.telemetry(5.0)]
    event = next(e for e in seen if isinstance(e, m.ApplyEvent) and e.apply_id == accepted.apply_id)
    assert (event.result, event.from_rev, event.to_rev) == ("ok", old.rev, old.rev + 1)
    rows = [row for message in seen if isinstance(message, m.StepRows) for row in message.rows]
    assert {row.cfg_rev for row in rows if row.step < event.at_step} <= {old.rev}
    assert {row.cfg_rev for row in rows if row.step >= event.at_step} == {event.to_rev}
    client.configure({"prefix_cache": old.values["prefix_cache"]})


# --- telemetry ------------------------------------------------------------------------------------


def _join(client: Client, mirror: Mirror) -> None:
    """Subscribe, wait for proof that it works, then take the snapshot."""
    assert client.welcome is not None
    mirror.begin(client.welcome.session)
    client.subscribe(m.TOPICS)
    while mirror.heartbeat is None:
        _feed(client, mirror, 1.0)
    mirror.snapshot(client.snapshot())


def _feed(client: Client, mirror: Mirror, timeout_s: float = 0.0) -> None:
    for frame in client.telemetry(timeout_s):
        mirror.frame(*frame)


def _settled(client: Client, mirror: Mirror) -> None:
    """Feed until everything published up to now was read, three heartbeats long, and nothing is missing."""
    for _ in range(3):
        now_ns = client.call(m.Ping(id=client.next_id()), m.Pong, 60.0).mono_ns
        while mirror.needs_snapshot or mirror.heartbeat is None or mirror.heartbeat.mono_ns < now_ns:
            if mirror.needs_snapshot:
                mirror.snapshot(client.snapshot())
            _feed(client, mirror, 1.0)


def _assert_mirrors(mirror: Mirror, snapshot: m.SnapshotReply) -> None:
    assert {row.rid for row in snapshot.requests if row.state != "finished"} == set(mirror.live)
    assert {row.rid for row in snapshot.requests if row.state == "finished"} <= set(mirror.ended)
    assert {row.step: row for row in snapshot.steps}.items() <= mirror.steps.items()
    assert mirror.cfg is not None
    assert (mirror.cfg.rev, mirror.cfg.values) == (snapshot.cfg.rev, snapshot.cfg.values)
    assert snapshot.blocks is not None
    assert mirror.blocks.keyframe().state == snapshot.blocks.state
    assert mirror.blocks.keyframe().owner == snapshot.blocks.owner
    assert mirror.state is not None
    assert (mirror.state.ended, mirror.state.decode_tok) == (snapshot.state.ended, snapshot.state.decode_tok)


def test_snapshot_then_deltas_equal_the_next_snapshot(client: Client) -> None:
    mirror = Mirror()
    _join(client, mirror)
    sampling = m.Sampling(max_tokens=50, ignore_eos=True)
    streams = [client.submit(f"request {n}", sampling=sampling, tag=f"r{n}") for n in range(6)]
    client.configure({"max_num_seqs": 7})
    assert [stream.result()[2].finish for stream in streams] == ["length"] * 6
    _settled(client, mirror)
    assert not mirror.gaps
    _assert_mirrors(mirror, client.snapshot())
    rows = [mirror.ended[stream.rid] for stream in streams]
    assert all(len(row.itl_us) == 49 for row in rows)
    steps = sorted(mirror.steps)
    assert steps == list(range(steps[0], steps[-1] + 1))


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_a_late_joiner_misses_nothing(engine: EngineUnderTest, delay_s: float) -> None:
    """F04: clients that connect at once or late and send at once see their request's whole life."""
    for _ in range(10 if delay_s == 0 else 1):
        time.sleep(delay_s)
        with engine.client() as client:
            mirror = Mirror()
            client.subscribe(m.TOPICS)
            stream = client.submit("at once", sampling=m.Sampling(max_tokens=5, ignore_eos=True))
            _join(client, mirror)
            ids, _, done = stream.result()
            assert len(ids) == 5
            while stream.rid not in mirror.ended:
                _feed(client, mirror, 1.0)
                if mirror.needs_snapshot:
                    mirror.snapshot(client.snapshot())
            assert mirror.ended[stream.rid] == done.row


def test_a_frozen_reader_holds_nobody_up_and_sees_its_gap(engine: EngineUnderTest, client: Client) -> None:
    """F02: a subscriber that stops reading loses messages, sees that, and is right after the resync."""
    mirror = Mirror()
    with Client(engine.ctl, silence_s=120.0) as frozen, engine.client() as third:
        frozen.tel.setsockopt(zmq.RCVHWM, 4)
        frozen.hello(60.0)
        _join(frozen, mirror)
        stream = client.submit("runs on", sampling=m.Sampling(max_tokens=300, ignore_eos=True))
        flood = [threading.Thread(target=_flip_knobs, args=(engine, 600, n)) for n in range(6)]
        for thread in flood:
            thread.start()
        for thread in flood:
            thread.join()
        assert len(stream.result()[0]) == 300, "the stream does not go through the frozen socket"
        assert len(greedy(third, "others are served")[0]) == 12
        _settled(frozen, mirror)
        assert sum(mirror.gaps.values()) > 0
        _assert_mirrors(mirror, frozen.snapshot())


def _flip_knobs(engine: EngineUnderTest, times: int, number: int) -> None:
    """Make the engine publish many apply events."""
    with engine.client(name=f"flip {number}") as client:
        for n in range(times):
            try:
                rev = client.config().rev
                client.configure({"max_num_queued": 1000 + n}, expect_rev=rev)
            except EngineError as error:
                if error.code == "rate_limited":
                    return


def test_a_client_that_never_reads_its_streams_gets_them_coalesced(
    engine: EngineUnderTest, client: Client
) -> None:
    """A36: its queue is its own; nothing of it is lost, and it comes in fewer, larger messages."""
    sampling = m.Sampling(max_tokens=250, ignore_eos=True)
    count = 24
    with zmq.Context() as context:
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVHWM, 1)
        raw.setsockopt(zmq.RCVTIMEO, 60_000)
        raw.connect(engine.ctl)
        raw.send(codec.encode(_hello()))
        assert isinstance(codec.decode_reply(raw.recv_multipart()), m.Welcome)
        for n in range(count):
            raw.send(codec.encode(m.Submit(id=2 + n, prompt=f"slow {n}", sampling=sampling, tag="slow")))
        assert len(greedy(client, "others go on")[0]) == 12
        wait_until(lambda: _ended(client, "slow") == count, "the engine finishes them all the same", 200)
        ids: dict[int, list[int]] = {}
        messages = ended = 0
        while ended < count:
            item = codec.decode_reply(raw.recv_multipart())
            if isinstance(item, m.Tokens):
                known = ids.setdefault(item.rid, [])
                assert item.index == len(known)
                known += item.ids
                messages += 1
            ended += isinstance(item, m.Done)
        raw.close()
    assert [len(each) for each in ids.values()] == [250] * count
    assert messages < 250 * count


def _ended(client: Client, tag: str) -> int:
    return sum(row.tag == tag and row.state == "finished" for row in client.snapshot().requests)


def test_log_lines_are_kept_and_numbered(client: Client) -> None:
    lines = client.call(m.LogTail(id=client.next_id()), m.LogLines).lines
    assert lines
    assert any("is ready on" in line.message for line in lines)
    after = lines[len(lines) // 2].n
    later = client.call(m.LogTail(id=client.next_id(), after=after, max=3), m.LogLines).lines
    assert all(line.n > after for line in later)
    assert len(later) <= 3
    assert not [line for line in lines if "Traceback" in line.message]


def test_heartbeats_come_while_nothing_happens_and_idle_is_no_stall(client: Client) -> None:
    """B10: idle is a normal state."""
    client.telemetry()
    beats: list[m.Heartbeat] = []
    while len(beats) < 5:
        beats += [message for _, _, message in client.telemetry(2.0) if isinstance(message, m.Heartbeat)]
    assert {beat.busy for beat in beats} == {"idle"}
    assert all(beat.rss_bytes > 1 << 20 for beat in beats)
    assert len(greedy(client, "awake")[0]) == 12


# --- hostile input --------------------------------------------------------------------------------


def _bad_frames(client: Client) -> int:
    client.telemetry()
    while True:
        for _, _, message in client.telemetry(2.0):
            if isinstance(message, m.Heartbeat):
                return message.bad_frames


def test_a_pickle_is_dropped_and_counted(engine: EngineUnderTest, client: Client, tmp_path: Path) -> None:
    """F01: on every socket; what the payload would have created is not there."""
    victim = tmp_path / "pwned"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return os.open, (str(victim), os.O_CREAT)

    before = _bad_frames(client)
    with zmq.Context() as context, _dealer(context, engine) as raw:
        for frames in ([pickle.dumps(Payload())], [b"", pickle.dumps(Payload())]):
            raw.send_multipart(frames)
            reply = codec.decode_reply(raw.recv_multipart())
            assert isinstance(reply, m.Error)
            assert reply.code == "bad_message"
        with context.socket(zmq.SUB) as sub:  # a PUB socket takes only subscriptions
            sub.setsockopt(zmq.LINGER, 0)
            sub.setsockopt(zmq.SUBSCRIBE, pickle.dumps(Payload()))
            sub.connect(engine.ready["tel"])
            assert len(greedy(client, "meanwhile")[0]) == 12
    assert _bad_frames(client) >= before + 2
    assert not victim.exists()


def test_twenty_thousand_mutated_frames_leave_the_engine_right(
    engine: EngineUnderTest, client: Client
) -> None:
    """F01: golden frames with bytes changed, noise, and wrong frame counts: each answered or counted."""
    expected = greedy(client, "what is right", 30)
    rng = random.Random(4711)
    golden = [codec.encode(c) for c in COMMANDS if not isinstance(c, m.Shutdown)]
    bad_before = _bad_frames(client)
    unreadable = 0
    with zmq.Context() as context:
        for round_number in range(25):
            with _dealer(context, engine) as raw:
                unanswered = {999_999_999}
                if round_number % 5:  # every fifth stranger says no hello
                    raw.send(codec.encode(_hello()))
                    raw.recv_multipart()
                for _ in range(800):
                    frames = _mutated(rng, golden)
                    raw.send_multipart(frames)
                    try:
                        unanswered.add(codec.decode_command(frames).id)
                    except codec.BadMessage:
                        unreadable += 1
                raw.send(codec.encode(m.Ping(id=999_999_999)))
                while unanswered:
                    reply = codec.decode_reply(raw.recv_multipart())
                    if not isinstance(reply, m.Tokens | m.Done | m.Probe):
                        unanswered.discard(reply.id)
    assert 10_000 < unreadable < 20_000
    assert _bad_frames(client) == bad_before + unreadable
    client.request(m.Cancel(id=client.next_id(), tag="x"))
    client.request(m.Cancel(id=client.next_id(), tag=""))
    assert greedy(client, "what is right", 30) == expected
    assert engine.process.poll() is None


def _mutated(rng: random.Random, golden: list[bytes]) -> list[bytes]:
    frame = bytearray(rng.choice(golden))
    kind = rng.random()
    if kind < 0.1:
        return [rng.randbytes(rng.randint(0, 200))]
    if kind < 0.15:
        return [bytes(frame)] * rng.choice([2, 3, 4, 40])
    for _ in range(rng.randint(1, 5)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    if kind < 0.3:
        del frame[rng.randrange(len(frame)) :]
    elif kind < 0.35:
        frame += rng.randbytes(rng.randint(1, 30))
    return [bytes(frame)]


def test_oversized_and_raw_bytes_end_only_their_own_connection(
    engine: EngineUnderTest, client: Client
) -> None:
    with zmq.Context() as context:
        with _dealer(context, engine) as raw:
            raw.send(codec.encode(_hello()))
            raw.recv_multipart()
            raw.send(b"\x81\xa4type\xa4ping" + b"x" * (300 << 10))
            reply = codec.decode_reply(raw.recv_multipart())
            assert isinstance(reply, m.Error)
            assert reply.code == "too_large"
            raw.send_multipart([b"x"] * 1000)
            reply = codec.decode_reply(raw.recv_multipart())
            assert isinstance(reply, m.Error)
        with _dealer(context, engine) as raw:
            raw.send(b"x" * (5 << 20))  # above the largest frame: the connection is closed
            assert len(greedy(client, "still there")[0]) == 12
    for url in (engine.ctl, engine.ready["tel"]):
        for payload in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", random.Random(1).randbytes(5000)):
            with socket.socket(socket.AF_UNIX) as plain:
                plain.connect(url.removeprefix("ipc://"))
                plain.sendall(payload)
                assert len(greedy(client, "still there")[0]) == 12


def test_clients_come_and_go_without_leaving_anything(engine: EngineUnderTest) -> None:
    files = Path(f"/proc/{engine.process.pid}/fd")
    with engine.client() as first:
        greedy(first, "x")
    before = len(list(files.iterdir()))
    for _ in range(60):  # more than may be connected at a time
        with engine.client() as client:
            client.call(m.Ping(id=client.next_id()), m.Pong)
    wait_until(lambda: len(list(files.iterdir())) <= before + 2, "descriptors are given back")


def test_too_many_clients_are_refused_with_a_reason(engine: EngineUnderTest) -> None:
    clients: list[Client] = []
    try:
        for _ in range(16):
            clients.append(Client(engine.ctl, silence_s=60.0))
            clients[-1].hello(60.0)
        clients.append(Client(engine.ctl, silence_s=60.0))
        with pytest.raises(EngineError, match="clients are connected"):
            clients[-1].hello(60.0)
        assert clients[0].snapshot().state.phase == "ready"
    finally:
        for client in clients:
            client.close()


def test_the_place_of_a_client_that_has_gone_is_given_to_another(engine: EngineUnderTest) -> None:
    """Its requests hold it no longer than until somebody else needs it, whatever is left of the grace."""
    for _ in range(16):
        with engine.client() as leaving:
            leaving.submit("a", sampling=LONG, tag="leaving")

    def is_welcome() -> bool:
        try:
            return bool(client.hello(60.0))
        except EngineError as error:
            return error.code != "busy"  # it is not known yet that the last ones have gone

    def is_told() -> bool:
        lines = client.call(m.LogTail(id=client.next_id(), max=50), m.LogLines).lines
        return any("1 request of " in line.message and "took its place" in line.message for line in lines)

    with Client(engine.ctl, silence_s=60.0) as client:
        wait_until(is_welcome, "there is room")
        wait_until(is_told, "a request is cancelled for it", timeout_s=5.0)
        client.call(m.Cancel(id=client.next_id(), tag="leaving"), m.Cancelled)


# --- the end --------------------------------------------------------------------------------------


def test_sigterm_ends_it_cleanly(engine: EngineUnderTest) -> None:
    """B10, F06: the last test of this file: streams end, the exit code is 0, no file is left behind."""
    path = Path(engine.ctl.removeprefix("ipc://"))
    with engine.client() as client:
        stream: Stream = client.submit("until the end", sampling=LONG)
        next(stream)
        engine.process.send_signal(signal.SIGTERM)
        assert stream.result()[2].finish == "cancelled"
    assert engine.process.wait(60) == 0
    assert not [suffix for suffix in (".ctl", ".tel", ".json", ".lock") if path.with_suffix(suffix).exists()]
