"""Which of what a draft model computed still holds: nothing that another may have written over."""

from __future__ import annotations

import random

import pytest

from engine.request import NO_BLOCK, Request
from engine.speculation import mirror as mirrors
from engine.speculation.mirror import Mirror
from ipc.messages import Sampling

SIZE = 4


def request(tokens: int, blocks: list[int], rid: int = 1) -> Request:
    made = Request(rid, list(range(100, 100 + tokens)), Sampling())
    made.block_table = blocks
    return made


def followed(of: Request, drafted: int = 0, window: int | None = None) -> Mirror:
    """A mirror that has computed everything of a request, and so many draft tokens behind it."""
    mirror = Mirror([], [], rid=of.rid)
    mirror.follow(of, SIZE, window)
    mirror.token_ids += [900 + i for i in range(drafted)]
    mirror.num_computed = mirror.num_tokens
    return mirror


def test_a_request_is_computed_from_its_begin_until_its_newest_token() -> None:
    of = request(10, [3, 1, 2])
    mirror = Mirror([], [], rid=1)
    mirror.follow(of, SIZE, None)
    assert (mirror.token_ids, mirror.num_computed, mirror.block_table) == (of.token_ids, 0, [3, 1, 2])
    assert followed(of).num_computed == 10
    again = followed(of)
    again.follow(of, SIZE, None)
    assert again.num_computed == 9  # its logits are needed again


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_of_a_draft_what_was_accepted_stays(accepted: int) -> None:
    """A41: what was rejected is computed over."""
    of = request(9, [3, 1, 2])
    mirror = followed(of, drafted=2)
    of.token_ids += [*[900, 901][:accepted], 7]
    mirror.follow(of, SIZE, None)
    assert mirror.num_computed == 9 + accepted
    assert mirror.token_ids == of.token_ids


@pytest.mark.parametrize("held", [False, True])
def test_what_lies_in_lent_blocks_is_computed_again(held: bool) -> None:
    """They may have been taken back and given to others between two looks, and be there again; but not from
    one plan to the next, as far as they are needed there."""
    of = request(7, [3, 1])
    of.block_table.append(2)  # lent for a draft
    mirror = followed(of, drafted=4)  # positions 7 to 10, of which 8 and later lie in block 2
    of.token_ids += [900, 901, 902, 903, 7]
    mirror.follow(of, SIZE, None, held=held)
    assert mirror.num_computed == (11 if held else 8)


def test_a_block_that_is_another_now_holds_nothing() -> None:
    of = request(14, [3, 1, 2, 5])
    mirror = followed(of)
    of.block_table = [3, 8, 2, 5]
    mirror.follow(of, SIZE, None)
    assert mirror.num_computed == 4
    mirror = followed(of)
    of.block_table = [3, 8]
    of.token_ids = of.token_ids[:8]
    mirror.follow(of, SIZE, None)
    assert mirror.num_computed == 7


def test_an_output_that_was_cut_and_went_on_differently_is_followed() -> None:
    of = request(14, [3, 1, 2, 5])
    mirror = followed(of)
    of.token_ids[9:] = [1, 2, 3, 4, 5, 6]
    mirror.follow(of, SIZE, None)
    assert mirror.num_computed <= 9
    assert mirror.token_ids == of.token_ids


def test_blocks_outside_every_window_need_not_be_there() -> None:
    of = request(30, [*range(8)])
    mirror = followed(of, window=8)
    of.block_table[:5] = [NO_BLOCK] * 5
    mirror.follow(of, SIZE, 8)
    assert (mirror.num_computed, mirror.first_block) == (29, 0)


@pytest.mark.parametrize(("short", "begin"), [(8, 5), (7, 6)])
def test_a_request_that_gave_up_blocks_is_begun_behind_them(
    short: int, begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the newer half of a long window."""
    monkeypatch.setattr(mirrors, "SHORT_WINDOW", short)
    of = request(30, [NO_BLOCK] * 5 + [5, 6, 7])
    mirror = Mirror([], [], rid=1)
    mirror.follow(of, SIZE, 8)
    assert mirror.first_block == begin
    assert mirror.token_ids == of.token_ids[4 * begin :]
    assert mirror.block_table == [5, 6, 7][begin - 5 :]
    mirror.num_computed = mirror.num_tokens
    of.token_ids += [7]
    mirror.follow(of, SIZE, 8)
    seen = 30 - 4 * begin
    assert (mirror.first_block, mirror.num_computed, mirror.num_tokens) == (begin, seen, seen + 1)


def test_one_that_lost_blocks_while_it_was_caught_up_with_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirrors, "SHORT_WINDOW", 31)
    of = request(60, [NO_BLOCK] * 7 + list(range(8)))
    mirror = Mirror([], [], rid=1)
    mirror.follow(of, SIZE, 32)
    assert mirror.first_block == 10
    mirror.num_computed = 3
    of.block_table[:12] = [NO_BLOCK] * 12
    mirror.follow(of, SIZE, 32)
    assert (mirror.first_block, mirror.num_computed) == (12, 0)


@pytest.mark.parametrize("seed", range(20))
def test_what_holds_was_written_last_by_the_draft_model_for_this_request(seed: int) -> None:
    """Two requests over few blocks, lent, taken back, given up and given on, looked at now and then. Each
    slot of the pool remembers the token written there: what a mirror relies on must be what it wrote."""
    rng = random.Random(seed)
    written: dict[int, tuple[int, int, int]] = {}  # slot of the pool -> rid, position, token
    free = list(range(12))
    live: dict[int, tuple[Request, Mirror]] = {}
    rid = 0
    relied = held = 0
    at_once: dict[int, bool] = {}  # rid -> whether it was looked at the last time it had its turn
    for _ in range(400):
        while len(live) < 2:
            rid += 1
            fresh = request(rng.randrange(1, 9), [], rid)
            live[rid] = fresh, Mirror([], [], rid=rid)
        of, mirror = live[rng.choice(list(live))]
        needed = -(-of.num_tokens // SIZE)
        while len(of.block_table) > needed:  # what was lent is taken back
            free.append(of.block_table.pop())
        rng.shuffle(free)
        lent = rng.randrange(3)
        while len(of.block_table) < needed + lent and free:
            of.block_table.append(free.pop())
        if len(of.block_table) < needed or of.num_tokens > 24 or rng.random() < 0.03:
            free += of.block_table
            del live[of.rid]
            continue
        if rng.random() < 0.7:
            owned = mirror.owned
            mirror.follow(of, SIZE, None, held=at_once.get(of.rid, False))
            held += mirror.num_computed > owned
            at_once[of.rid] = True
            for at in range(mirror.num_computed):
                where = mirror.block_table[at // SIZE] * SIZE + at % SIZE
                assert written[where] == (of.rid, at, of.token_ids[at])
                relied += 1
            room = len(of.block_table) * SIZE - of.num_tokens
            mirror.token_ids += [rng.randrange(3) for _ in range(min(room, 3))]
            for at in range(mirror.num_computed, mirror.num_tokens):
                where = mirror.block_table[at // SIZE] * SIZE + at % SIZE
                written[where] = of.rid, at, mirror.token_ids[at]
            mirror.num_computed = mirror.num_tokens
        else:
            at_once[of.rid] = False
        for _ in range(rng.randrange(1, 4)):  # as often as not what was drafted
            guess = mirror.token_ids[of.num_tokens :][:1] if rng.random() < 0.8 else []
            of.token_ids += guess or [rng.randrange(3)]
    assert relied > 500
    assert held > 5
