"""Workloads: the same specification is the same list of requests."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from app.lab.workload import (
    CHARS_PER_TOKEN,
    PROMPT_KINDS,
    PromptKind,
    WorkloadError,
    WorkloadSpec,
    chars_per_token,
    fitted,
    planned,
    schedule,
    workload_sha256,
)

ALL_KINDS = WorkloadSpec(mix=dict.fromkeys(PROMPT_KINDS, 1.0), num_requests=60, duration_s=None, seed=5)


def test_the_list_depends_on_the_specification_alone() -> None:
    assert list(schedule(ALL_KINDS)) == list(schedule(ALL_KINDS))
    assert workload_sha256(ALL_KINDS) == workload_sha256(ALL_KINDS)
    other = msgspec.structs.replace(ALL_KINDS, seed=6)
    assert workload_sha256(other) != workload_sha256(ALL_KINDS)


def test_the_hash_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import msgspec, sys; from app.lab.workload import *;"
        "print(workload_sha256(msgspec.json.decode(sys.argv[1], type=WorkloadSpec)))"
    )
    spec = msgspec.json.encode(ALL_KINDS).decode()
    out = subprocess.run(
        [sys.executable, "-c", code, spec],
        env={**os.environ, "PYTHONHASHSEED": "77", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == workload_sha256(ALL_KINDS)


def test_a_request_does_not_depend_on_those_before_it() -> None:
    whole = list(schedule(ALL_KINDS))
    assert planned(ALL_KINDS, 33, whole[33].at_s) == whole[33]


def test_every_kind_of_the_mix_occurs_in_proportion() -> None:
    spec = WorkloadSpec(
        mix={"chat": 3.0, "code": 1.0, "long_context": 0.0}, num_requests=400, duration_s=None
    )
    kinds = [request.kind for request in schedule(spec)]
    assert set(kinds) == {"chat", "code"}
    assert 0.65 < kinds.count("chat") / 400 < 0.85


def test_shared_prefix_requests_share_their_system_prompt_and_nothing_else() -> None:
    spec = WorkloadSpec(mix={"shared_prefix": 1.0}, num_requests=20, duration_s=None, prefix_tok=384)
    requests = list(schedule(spec))
    systems = {request.messages[0].content for request in requests}
    assert len(systems) == 1
    assert len(systems.pop()) >= 384 * CHARS_PER_TOKEN * 0.9
    assert len({request.messages[1].content for request in requests}) > 5


def test_lengths_stay_near_what_was_asked_for() -> None:
    spec = WorkloadSpec(
        mix={"long_context": 1.0}, num_requests=30, duration_s=None, long_tok=(600, 900), output_tok=(5, 9)
    )
    for request in schedule(spec):
        assert 500 <= len(request.raw_prompt) / CHARS_PER_TOKEN <= 950
        assert 5 <= request.max_tokens <= 9


def test_poisson_gaps_have_the_rate_and_spread_of_a_poisson_process() -> None:
    spec = WorkloadSpec(rate_rps=50.0, num_requests=2000, duration_s=None)
    at = np.array([request.at_s for request in schedule(spec)])
    gaps = np.diff(at)
    assert gaps.mean() == pytest.approx(0.02, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)


def test_constant_arrivals_are_on_an_absolute_schedule() -> None:
    spec = WorkloadSpec(arrival="constant", rate_rps=4.0, duration_s=2.5)
    assert [request.at_s for request in schedule(spec)] == [i / 4 for i in range(10)]


def test_a_closed_loop_has_no_times_and_may_be_endless() -> None:
    spec = WorkloadSpec(arrival="concurrency", duration_s=1.0)
    assert [r.at_s for r in itertools.islice(schedule(spec), 5)] == [None] * 5
    assert len(workload_sha256(spec)) == 64


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (WorkloadSpec(input_tok=(9, 3)), "input_tok"),
        (WorkloadSpec(mix={"chat": 0.0}), "mix"),
        (WorkloadSpec(num_requests=None, duration_s=None), "num_requests"),
    ],
)
def test_a_specification_that_is_no_load_is_refused_by_name(spec: WorkloadSpec, named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        list(schedule(spec))


def test_numbers_out_of_range_are_refused() -> None:
    for bad in (b'{"rate_rps": 0}', b'{"rate_rps": 1e9}', b'{"seed": -1}', b'{"arrival": "soon"}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(bad, type=WorkloadSpec)


@pytest.mark.parametrize("kind", PROMPT_KINDS)
@pytest.mark.parametrize(("limit", "vocab"), [(256, 49152), (512, 49152), (1024, 320)])
def test_a_load_is_cut_to_a_short_model(kind: PromptKind, limit: int, vocab: int) -> None:
    """No prompt with its answer is longer than the model, and what is asked for stays."""
    wanted = WorkloadSpec(mix={kind: 1.0}, num_requests=60, duration_s=None, input_tok=(32, 256))
    spec = fitted(wanted, limit, vocab)
    assert spec != wanted
    assert spec.output_tok[0] <= spec.output_tok[1]
    whole = {request.index: request for request in schedule(wanted)}
    for request in schedule(spec):
        tokens = len(request.raw_prompt) / chars_per_token(vocab)
        assert tokens + request.max_tokens + 48 <= limit
        before = whole[request.index].messages
        asked = slice(0, 20) if kind == "code" else slice(-20, None)
        assert request.messages[-1].content[asked] == before[-1].content[asked], "what is asked"
        assert request.messages[-1].content[-4:] == before[-1].content[-4:], "and how it ends"
        assert len(request.messages) == len(before)
    texts = {request.messages[0].content for request in schedule(spec)}
    assert (len(texts) == 1) == (kind == "shared_prefix")
    assert min(map(len, texts)) > 60, "there is still something to read"


def test_a_load_that_fits_is_left_as_it_is() -> None:
    spec = WorkloadSpec(mix=dict.fromkeys(PROMPT_KINDS, 1.0), input_tok=(32, 256))
    assert fitted(spec, 8192, 49152) == spec
    cut = fitted(spec, 512, 49152)
    assert fitted(cut, 512, 49152) == cut
    # A kind that is not sent cuts nothing.
    short = WorkloadSpec(mix={"chat": 1.0, "long_context": 0.0}, input_tok=(8, 24))
    assert fitted(short, 512, 49152) == short
