"""What memory is held at a time, and which kernels ran: from the engine's messages, nothing guessed."""

from __future__ import annotations

import pytest

from app.model.memory import KernelBook, Memory, MemoryBook, Ran, WhatRan, kernel_parts
from app.model.session import SessionModel
from tests.app.builders import batch, state, step_row


def test_memory_of_a_past_time_is_what_was_held_then() -> None:
    book = MemoryBook()
    assert book.at(5.0) is None
    book.take(state(weight_bytes=400), 1.0)
    book.take(state(weight_bytes=400), 2.0)
    book.take(state(weight_bytes=100, original_bytes=400), 3.0)
    assert book.at(0.5) is None
    assert book.at(2.9) == Memory(weights=400)
    assert book.at(9.0) == Memory(weights=100, originals=400)
    assert Memory(weights=100, originals=400, draft_kv=7).total == 507


def test_what_is_held_in_the_middle_of_a_conversion_is_no_figure() -> None:
    book = MemoryBook()
    book.take(state(weight_bytes=400), 1.0)
    book.take(state(weight_bytes=250, phase="applying"), 2.0)
    assert book.at(3.0) == Memory(weights=400)


def test_a_baseline_of_a_finished_stretch_keeps_the_bytes_of_that_stretch() -> None:
    """A precision that is flipped after a load has ended must not enter its baseline."""
    session = SessionModel()
    session.ingest(batch(100.0, state=state(weight_bytes=400), new_session=True))
    rows = [
        step_row(n, 100.0 + n / 10, draft_reqs=2, drafted_tok=6, accepted_tok=3, drafted_at=[2, 2, 2],
                 accepted_at=[2, 1, 0], draft_us=200, verify_us=4000)
        for n in range(1, 20)
    ]  # fmt: skip
    session.ingest(batch(102.0, steps=rows))
    session.ingest(batch(103.0, state=state(weight_bytes=100, original_bytes=400, cfg_rev=1)))
    then, now = session.step_stats(100.0, 102.0), session.step_stats(100.0)
    assert (then["weight_bytes"], then["original_bytes"]) == (400, 0)
    assert (now["weight_bytes"], now["original_bytes"]) == (100, 400)
    places = [then[f"draft_acceptance_place_{place}"] for place in (1, 2, 3)]
    assert places == [pytest.approx(1.0), pytest.approx(0.5), pytest.approx(0.0)]
    assert (then["draft_mean_s"], then["verify_mean_s"]) == (pytest.approx(2e-4), pytest.approx(4e-3))


def test_kernels_are_told_by_the_rows_that_they_served_under_the_present_configuration() -> None:
    """One that serves one row and many, but not a few, is no range from one to many."""
    book = KernelBook()
    many, few = "linear=int8:dequant,head=bf16,activations=float32", "linear=int8:pack,activations=float32"
    for step, (rows, kernels) in enumerate([(1, many), (2, few), (300, many), (4, few), (2, few), (7, many)]):
        book.take(step_row(step, 1.0, decode_tok=1, prefill_tok=rows - 1, kernels=kernels, cfg_rev=2))
    ran = book.ran(2)
    assert ran.linear == (
        Ran("int8:dequant", 1, 1, 1), Ran("int8:pack", 2, 4, 3), Ran("int8:dequant", 7, 300, 2)
    )  # fmt: skip
    assert ran.head == (Ran("bf16", 1, 300, 3),)
    assert (ran.activations, ran.steps) == ("float32", 6)
    assert book.ran(3) == WhatRan()
    book.take(step_row(9, 1.0, kernels="linear=bf16", cfg_rev=3))
    assert [each.name for each in book.ran(3).linear] == ["bf16"]


def test_drafted_tokens_are_rows_too_and_an_empty_step_ran_nothing() -> None:
    book = KernelBook()
    book.take(step_row(1, 1.0, decode_tok=0, kernels="linear=a"))
    book.take(step_row(1, 1.0, decode_tok=1, kernels=""))
    assert book.ran(0).steps == 0
    book.take(step_row(2, 1.0, decode_tok=2, drafted_tok=6, kernels="linear=a"))
    assert book.ran(0).linear == (Ran("a", 8, 8, 1),)


def test_kernels_are_read_by_name() -> None:
    assert kernel_parts("linear=a|b&c,head=d,new") == {"linear": "a|b&c", "head": "d"}


def test_another_engine_process_has_run_nothing_yet() -> None:
    session = SessionModel()
    session.ingest(
        batch(100.0, state=state(), new_session=True, steps=[step_row(1, 99.0, kernels="linear=a")])
    )
    assert session.ran().steps == 1
    session.ingest(batch(101.0, state=state(), new_session=True))
    assert session.ran().steps == 0
