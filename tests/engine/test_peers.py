"""What the server keeps for each client, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from engine.peers import Job, Peer, PeerTable, TokenBucket, ready
from ipc import codec
from ipc import messages as m
from tests.ipc.samples import request_row

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A ROUTER as the engine has it, and a DEALER named ``me`` that takes a few messages only."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.setsockopt(zmq.SNDHWM, 2)
            socket.setsockopt(zmq.RCVHWM, 2)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://peers")
        dealer.setsockopt(zmq.IDENTITY, b"me")
        dealer.connect("inproc://peers")
        dealer.send(b"hello")
        router.recv_multipart()
        yield router, dealer


def _tokens(rid: int, index: int) -> m.Tokens:
    return m.Tokens(rid=rid, index=index, ids=[index], text=f"{index} ", t_ns=[index])


def test_waiting_tokens_are_merged_in_order_and_the_end_comes_last(pair: Pair) -> None:
    """A36: nothing is lost for a client that reads late."""
    router, dealer = pair
    peer = Peer(b"me", "slow", 0.0)
    for index in range(50):
        for rid in (1, 2):
            peer.send(router, _tokens(rid, index), 1.0)
    for rid in (1, 2):
        peer.send(router, m.Done(rid=rid, finish="length", row=request_row(rid)), 1.0)
    assert peer.blocked
    texts: dict[int, str] = {1: "", 2: ""}
    ended: list[int] = []
    messages = 0
    while len(ended) < 2:
        tries = 0
        while not dealer.poll(10):  # as the server does, again and again
            peer.flush(router, 2.0)
            tries += 1
            assert tries < 1000
        item = codec.decode_reply(dealer.recv_multipart())
        messages += 1
        if isinstance(item, m.Tokens):
            assert item.rid not in ended
            assert item.index == len(texts[item.rid].split())
            texts[item.rid] += item.text
        if isinstance(item, m.Done):
            ended.append(item.rid)
    assert texts[1] == texts[2] == "".join(f"{n} " for n in range(50))
    assert messages < 20
    assert not peer.blocked


def test_a_client_that_lets_too_much_wait_loses_tokens_but_no_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B09, A36: memory for one client is bounded, and when it reads again each of its streams ends."""
    monkeypatch.setattr("engine.peers.MAX_QUEUED_TOKENS", 100)
    router, dealer = pair
    peer = Peer(b"me", "dead", 0.0)
    peer.live[1] = Job(peer, m.Submit(id=1, prompt="x"), 0, rid=1)
    sent = 0
    while not peer.overrun:
        peer.send(router, _tokens(1, sent), 1.0)
        sent += 1
        assert sent < 1000
    assert sent > 100
    assert not peer.blocked, "what waited was thrown away"
    while not peer.blocked:
        peer.send(router, m.Ok(id=5), 1.0)
    peer.send(router, _tokens(1, sent), 1.0)
    peer.send(router, m.Done(rid=1, finish="length", row=request_row(1)), 1.0)
    heard: list[m.Reply] = []
    while not any(isinstance(item, m.Done) for item in heard):
        peer.flush(router, 2.0)
        if dealer.poll(10):
            heard.append(codec.decode_reply(dealer.recv_multipart()))
    assert [item.finish for item in heard if isinstance(item, m.Done)] == ["cancelled"], "it is not whole"
    assert max(item.index for item in heard if isinstance(item, m.Tokens)) < 100
    peer.send(router, _tokens(2, 0), 3.0)
    while not dealer.poll(10):  # the socket may not have room at once
        peer.flush(router, 3.0)
    assert isinstance(codec.decode_reply(dealer.recv_multipart()), m.Tokens), "a later request is served"


def test_answers_that_nobody_reads_are_bounded_by_their_size(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B09: a client that asks for snapshots and reads none must not fill the engine's memory."""
    monkeypatch.setattr("engine.peers.MAX_QUEUED_BYTES", 100_000)
    router, dealer = pair
    peer = Peer(b"me", "deaf", 0.0)
    large = m.LogLines(
        id=3, lines=[m.LogLine(n=1, level="info", unix_ms=1, source="x", message="x" * 4000)] * 3
    )
    most = 0
    for _ in range(200):
        peer.send(router, large, 1.0)
        most = max(most, sum(len(entry) for entry in peer._queue.values() if isinstance(entry, bytes)))
    assert 80_000 < most <= 100_000
    for _ in range(1000):
        if dealer.poll(10):
            dealer.recv_multipart()
        peer.flush(router, 2.0)
        if not peer.blocked:
            break
    assert peer._queued_bytes == 0, "what was read does not count any more"


def test_a_client_that_left_is_noticed_when_something_is_sent(pair: Pair) -> None:
    router, _ = pair
    peer = Peer(b"nobody", "gone", 0.0)
    peer.probe(router, 1, 3.0)
    assert peer.is_gone()
    assert peer.gone_since_s == 3.0
    peer.send(router, _tokens(1, 0), 4.0)
    assert not peer.blocked


@pytest.mark.parametrize("grace_s", [0.0, 2.0, 10.0])
def test_a_client_is_lost_once_the_grace_is_over_since_it_was_found_gone(pair: Pair, grace_s: float) -> None:
    """Its requests only wait, so that nothing but the probes, twice a second, finds that it left."""
    router, dealer = pair
    peers = PeerTable({b"me": Peer(b"me", "here", 0.0), b"nobody": Peer(b"nobody", "gone", 0.0)})
    for peer in peers.values():
        peer.live[1] = Job(peer, m.Submit(id=1, prompt="x"), 0, rid=1)
    found_s = lost_s = None
    now_s = 0.0
    while lost_s is None and now_s < 30.0:
        now_s += 0.5
        peers.probe(router, now_s)
        if found_s is None and peers[b"nobody"].is_gone():
            found_s = now_s
        if peers.take_lost(now_s, grace_s):
            lost_s = now_s
        while dealer.poll(0):  # the other one reads, so that it is asked again and again
            dealer.recv_multipart()
    assert found_s == 1.0, "a client that is busy is asked each second"
    assert lost_s == found_s + grace_s
    assert list(peers) == [b"me"]
    assert not peers[b"me"].is_gone()


def test_those_that_have_gone_make_room_in_the_order_of_what_is_lost(pair: Pair) -> None:
    """First who has nothing running, then who was gone first; never one that is still there."""
    router, _ = pair
    peers = PeerTable()
    for number, name in enumerate((b"me", b"old", b"new", b"idle")):
        peers[name] = Peer(name, name.decode(), 0.0)
        if name != b"idle":
            peers[name].live[number] = Job(peers[name], m.Submit(id=1, prompt="x"), 0, rid=number)
    peers[b"new"].gone_since_s = 3.0
    peers[b"old"].gone_since_s = 2.0
    assert peers.make_room(router, 4.0, most=4) is None
    assert list(peers) == [b"me", b"old", b"new"]
    for most, name in ((3, "old"), (2, "new")):
        removed = peers.make_room(router, 5.0, most=most)
        assert removed is not None
        assert removed.name == name
    assert peers.make_room(router, 5.0, most=1) is None
    assert list(peers) == [b"me"]


def test_only_the_newest_answers_are_kept() -> None:
    peer = Peer(b"me", "x", 0.0)
    for command_id in range(1, 301):
        peer.remember(command_id, b"%d" % command_id)
    assert peer.cached(300) == b"300"
    assert peer.cached(45) == b"45"
    assert peer.cached(44) is None


def test_the_rate_limit_says_when_to_come_back() -> None:
    bucket = TokenBucket(rate=10.0, burst=3.0, now_s=0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [0, 0, 0, 100]
    assert bucket.take(0.05) == 50
    assert bucket.take(0.1) == 0
    assert [bucket.take(100.0) for _ in range(4)] == [0, 0, 0, 100], "rest does not add up beyond the burst"


def test_a_long_error_is_cut_so_that_the_end_arrives() -> None:
    done = m.Done(
        rid=1, finish="error", row=request_row(1, message="x" * 9000), code="oom", message="x" * 9000
    )
    job = Job(Peer(b"me", "x", 0.0), m.Submit(id=1, prompt="x"), 0, rid=1, send_ns=7_999)
    sent = codec.decode_reply([codec.encode(ready(done, job))])
    assert isinstance(sent, m.Done)
    assert len(sent.message) == len(sent.row.message) == 4096
    assert sent.row.send_us == 7


def test_tokens_that_wait_are_never_merged_into_more_than_can_be_read(pair: Pair) -> None:
    """A36: megabytes of text, and log-probabilities with each token, for a client that reads late."""
    router, dealer = pair
    peer = Peer(b"me", "late", 0.0)
    top = [m.TopLogprob(token=n, logprob=-1.0 * n) for n in range(20)]
    count = {1: 0, 2: 0}

    def send(rid: int, text: str, ids: int, logprobs: list[m.TokenLogprob] | None = None) -> None:
        tokens = m.Tokens(
            rid=rid, index=count[rid], ids=[7] * ids, text=text, t_ns=[1] * ids, logprobs=logprobs
        )
        count[rid] += ids
        peer.send(router, tokens, 1.0)

    for _ in range(40):
        send(1, "x" * 100_000, 1)
        send(2, "y", 2000, [m.TokenLogprob(token=7, logprob=-0.5, top=top)] * 2000)
    for rid in (1, 2):
        peer.send(router, m.Done(rid=rid, finish="length", row=request_row(rid)), 1.0)
    assert peer._queued_tokens > 0
    got: dict[int, int] = {1: 0, 2: 0}
    text: dict[int, int] = {1: 0, 2: 0}
    ended: list[int] = []
    while len(ended) < 2:
        while not dealer.poll(10):
            peer.flush(router, 2.0)
        item = codec.decode_reply(dealer.recv_multipart())
        assert isinstance(item, m.Tokens | m.Done)
        if isinstance(item, m.Done):
            ended.append(item.rid)
            continue
        assert item.rid not in ended
        assert item.index == got[item.rid]
        got[item.rid] += len(item.ids)
        text[item.rid] += len(item.text)
        assert item.logprobs is None or len(item.logprobs) == len(item.ids)
    assert got == count
    assert text == {1: 4_000_000, 2: 40}
    assert peer._queued_tokens == 0


def test_what_was_split_is_thrown_away_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.peers.MAX_MERGED_TOKENS", 10)
    monkeypatch.setattr("engine.peers.MAX_QUEUED_TOKENS", 100)
    router, _ = pair
    peer = Peer(b"me", "dead", 0.0)
    peer.live[1] = Job(peer, m.Submit(id=1, prompt="x"), 0, rid=1)
    sent = 0
    while not peer.overrun:
        peer.send(router, _tokens(1, sent), 1.0)
        sent += 1
        assert sent < 1000
    assert not peer.blocked
    assert peer._queued_tokens == 0
