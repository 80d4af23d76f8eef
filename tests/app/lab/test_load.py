"""The load generator against a real engine."""

from __future__ import annotations

import io
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from app.lab import generator as generator_module
from app.lab import load_run as load_run_module
from app.lab.generator import Generator
from app.lab.load_run import LoadError, LoadRun
from app.lab.loadgen import run
from app.lab.orders import Control, Order, Report
from app.lab.stats import LoadRow
from app.lab.workload import WorkloadError, WorkloadSpec, schedule, workload_sha256
from app.store.collect import from_load
from app.store.errors import StoreError
from app.store.store import Store
from ipc.client import Client
from tests.app.engines import Console, ended

SHORT = WorkloadSpec(
    name="short",
    arrival="poisson",
    rate_rps=40.0,
    num_requests=40,
    duration_s=None,
    mix={"chat": 1.0, "shared_prefix": 1.0},
    input_tok=(8, 24),
    prefix_tok=64,
    output_tok=(1, 12),
    ignore_eos=True,
)


@pytest.fixture
def load() -> Iterator[LoadRun]:
    made = LoadRun()
    try:
        yield made
    finally:
        made.close()


def until_ended(load: LoadRun, live: Console, *phases: str) -> None:
    end_s = time.monotonic() + 90
    while load.poll().phase not in (phases or ("done", "failed")):
        assert time.monotonic() < end_s, load.poll()
        live.pump()
        time.sleep(0.02)


def test_a_run_has_a_row_for_each_request_and_counts_ttft_from_the_intended_sending(
    live: Console, load: LoadRun
) -> None:
    """C01, H06: rows are ordered in time, none was sent before its plan, and TTFT has a sample for each
    request that has a token."""
    load.start(SHORT, live.session.link.endpoint)
    with pytest.raises(LoadError, match="running"):
        load.start(SHORT, live.session.link.endpoint)
    until_ended(load, live)
    progress, rows, stats = load.poll(), load.rows(), load.stats()
    assert progress.phase == "done", progress.message
    assert (progress.sent, progress.done, progress.failed, progress.in_flight) == (40, 40, 0, 0)
    assert progress.workload_sha256 == workload_sha256(SHORT)
    assert sorted(row.index for row in rows) == list(range(40))
    assert [r.prompt_sha256 for r in sorted(rows, key=lambda r: r.index)] == [
        plan.prompt_sha256 for plan in schedule(SHORT)
    ]
    for row in rows:
        assert row.sent_ns is not None
        assert row.first_ns is not None
        assert row.last_ns is not None
        assert row.end_ns is not None
        assert row.intended_ns <= row.sent_ns <= row.first_ns <= row.last_ns <= row.end_ns
        assert row.output_tok == row.max_tokens
        assert len(row.itl_us) == row.output_tok - 1
        assert row.queue_s is not None
        assert row.ttft_s is not None
        assert row.e2e_s is not None
        assert row.queue_s <= row.ttft_s <= row.e2e_s
    assert stats.metrics["ttft_s"].n == 40
    single = sum(row.output_tok == 1 for row in rows)
    assert (stats.metrics["tpot_s"].n, stats.metrics["tpot_s"].excluded) == (40 - single, single)
    assert stats.metrics["itl_s"].n == sum(row.output_tok - 1 for row in rows)


def test_a_second_run_in_the_same_engine_does_not_know_the_first(live: Console, load: LoadRun) -> None:
    """C06: the same requests again: own rows only, and no prefix that the first run left behind."""
    runs = []
    for _ in range(2):
        load.start(SHORT, live.session.link.endpoint)
        until_ended(load, live)
        assert load.poll().phase == "done", load.poll().message
        runs.append(load.rows())
    first, second = ({row.index: row for row in rows} for rows in runs)
    assert len(second) == 40
    assert not {row.rid for row in second.values()} & {row.rid for row in first.values()}
    # The first request of a run finds nothing cached, though the run before had the very same one.
    assert first[0].cached_tok == second[0].cached_tok == 0
    began = min(row.intended_ns for row in second.values())
    assert all(row.end_ns is not None and row.end_ns < began for row in first.values())


def test_a_run_is_kept_as_a_baseline_with_its_workload(
    live: Console, load: LoadRun, tmp_path: object
) -> None:
    with pytest.raises(StoreError, match="nothing to keep"):
        from_load(live.session, load, "early")
    load.start(SHORT, live.session.link.endpoint)
    until_ended(load, live)
    live.until(lambda: not live.session.kpis().running.value, "an idle engine")
    data = from_load(live.session, load, "run", "note")
    assert msgspec.convert(data.workload, WorkloadSpec) == SHORT
    assert data.workload_sha256 == workload_sha256(SHORT)
    assert data.stats.ok == len(data.load_rows) == 40
    assert (data.step_stats["steps"] or 0) > 0
    assert data.config == live.knobs.values()
    store = Store(tmp_path / "b.sqlite")  # type: ignore[operator]
    assert store.get(store.save_baseline(data)).data.load_rows == data.load_rows


def test_a_change_of_knobs_during_a_run_marks_its_baseline(live: Console, load: LoadRun) -> None:
    spec = msgspec.structs.replace(SHORT, rate_rps=20.0)
    load.start(spec, live.session.link.endpoint)
    until_ended(load, live, "running")
    live.until(lambda: load.poll().done > 5, "some requests")
    live.knobs.set({"prefix_cache": False})
    until_ended(load, live)
    live.knobs.undo()
    live.until(lambda: not live.knobs.pending, "the old value")
    data = from_load(live.session, load, "mixed")
    assert not data.validity.valid
    assert any("changed while it was measured" in reason for reason in data.validity.reasons)


def test_a_run_is_kept_with_the_configuration_it_ran_under_not_the_present_one(
    live: Console, load: LoadRun
) -> None:
    """C06: what happens after a run, other steps and another configuration, is not in its baseline."""
    load.start(SHORT, live.session.link.endpoint)
    until_ended(load, live)
    ended_ns = time.monotonic_ns()  # an older beat may tell of a pause in the middle of the run

    def all_steps_came() -> bool:
        beat = live.session.heartbeat
        if beat is None or beat.mono_ns < ended_ns or beat.busy != "idle":
            return False
        return beat.step == live.session._last_step

    live.until(all_steps_came, "an idle engine whose steps are all here")
    before = from_load(live.session, load, "at once")
    live.knobs.set({"prefix_cache": False})
    live.until(lambda: not live.knobs.pending, "the change")
    items = live.submit("something else", max_tokens=50)
    live.until(lambda: ended(items), "its end")
    after = from_load(live.session, load, "later")
    live.knobs.undo()
    live.until(lambda: not live.knobs.pending, "the old value")
    assert after.config == before.config
    assert after.config["prefix_cache"] is True
    assert after.cfg_rev == before.cfg_rev
    assert after.validity == before.validity  # a busy machine may have made the generator late
    assert after.step_stats["steps"] == before.step_stats["steps"]


def test_a_closed_loop_keeps_its_concurrency_and_stops_on_request(live: Console, load: LoadRun) -> None:
    spec = WorkloadSpec(
        arrival="concurrency", concurrency=4, duration_s=600.0, input_tok=(4, 8), output_tok=(4, 8)
    )
    load.start(spec, live.session.link.endpoint)
    live.until(lambda: load.poll().done >= 20, "some requests")
    assert load.poll().in_flight <= 4
    load.stop()
    until_ended(load, live)
    assert load.poll().phase == "done"
    assert load.poll().in_flight == 0
    assert all(row.good for row in load.rows())


def test_stopping_at_once_cancels_what_is_in_flight(live: Console, load: LoadRun) -> None:
    spec = WorkloadSpec(
        arrival="concurrency", concurrency=3, duration_s=600.0, output_tok=(3000, 3000), ignore_eos=True
    )
    load.start(spec, live.session.link.endpoint)
    live.until(lambda: load.poll().in_flight == 3, "requests in flight")
    load.stop(drain=False)
    until_ended(load, live)
    stats = load.stats()
    assert stats.errors == {"cancelled": 3}
    assert stats.error_share is None
    assert load.poll().last_error == "", "who cancels has not met a failure"
    live.until(lambda: not live.session.kpis().running.value, "an idle engine")


def test_refused_requests_are_their_own_class_and_no_latency(live: Console, load: LoadRun) -> None:
    """C11: what the engine refuses is counted apart."""
    spec = WorkloadSpec(
        arrival="constant", rate_rps=50.0, num_requests=10, duration_s=None, mix={"long_context": 1.0},
        long_tok=(3000, 3000), output_tok=(2, 2),
    )  # fmt: skip
    load.start(spec, live.session.link.endpoint)
    until_ended(load, live)
    stats = load.stats()
    assert stats.errors == {"refused": 10}
    assert load.poll().last_error == load.rows()[-1].error != ""
    assert stats.metrics["ttft_s"].n == 0
    assert stats.error_share == 1.0
    assert "too_long" in load.rows()[0].error


def test_a_load_that_is_refused_again_and_again_is_slowed_down_and_stopped(
    live: Console, load: LoadRun
) -> None:
    """C11: where no prompt fits the model a closed loop does not run wild, and it says why it was stopped."""
    spec = WorkloadSpec(
        arrival="concurrency", concurrency=4, duration_s=60.0, mix={"long_context": 1.0},
        long_tok=(3000, 3000), output_tok=(2, 2),
    )  # fmt: skip
    load.start(spec, live.session.link.endpoint)
    until_ended(load, live)
    progress = load.poll()
    assert progress.phase == "failed"
    assert not progress.valid
    assert generator_module.GIVE_UP_AFTER <= progress.sent <= generator_module.GIVE_UP_AFTER + 4
    assert progress.failed == progress.sent
    assert "32 requests in a row were refused" in progress.message
    assert "too_long: the prompt has" in progress.message
    # Eight rounds of four, and a rest after each.
    assert progress.elapsed_s >= 0.7


def test_the_most_frequent_failure_is_told_beside_the_last(load: LoadRun) -> None:
    errors = ["too_long: 600 tokens", "too_long: 700 tokens", "rate_limited: too many"]
    rows = [
        LoadRow(index=i, kind="chat", tag="", intended_ns=i, error_class="refused", error=error)
        for i, error in enumerate(errors)
    ]
    load._take(Report(phase="running", sent=3, failed=3, rows=rows))
    assert load._progress.last_error == "rate_limited: too many"
    assert load._progress.common_error == "too_long: 700 tokens"


def test_a_generator_that_is_killed_is_told_and_the_run_invalid(live: Console, load: LoadRun) -> None:
    load.start(WorkloadSpec(arrival="constant", rate_rps=5.0, duration_s=600.0), live.session.link.endpoint)
    until_ended(load, live, "running")
    assert load._process is not None
    os.kill(load._process.pid, signal.SIGKILL)
    until_ended(load, live)
    progress = load.poll()
    assert progress.phase == "failed"
    assert not progress.valid
    assert "-9" in progress.message
    live.until(lambda: not live.session.kpis().running.value, "its requests cancelled")


def test_a_generator_that_hangs_is_ended_once_it_was_told_to_stop(
    live: Console, load: LoadRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be frozen for as long as it likes before that: it may also come back."""
    monkeypatch.setattr(load_run_module, "_SILENT_S", 1.0)
    load.start(msgspec.structs.replace(SHORT, num_requests=4000), live.session.link.endpoint)
    until_ended(load, live, "running")
    assert load._process is not None
    os.kill(load._process.pid, signal.SIGSTOP)
    load.stop(drain=True)
    load.stop(drain=False)
    until_ended(load, live)
    progress = load.poll()
    assert (progress.phase, load.running) == ("failed", False)
    assert "did not stop" in progress.invalid_reasons[0]
    load.start(SHORT, live.session.link.endpoint)
    until_ended(load, live)
    assert load.poll().phase == "done"


def test_closing_ends_the_generator(live: Console, load: LoadRun) -> None:
    load.start(WorkloadSpec(duration_s=600.0), live.session.link.endpoint)
    until_ended(load, live, "running")
    load.close()
    assert not load.running


def test_an_engine_that_is_not_there_fails_the_load_in_words(tmp_path: object) -> None:
    out = io.BytesIO()
    order = Order(ctl=f"ipc://{tmp_path}/nobody.ctl", spec=SHORT)
    client_timeout = Client.hello
    try:
        Client.hello = lambda self, timeout_s=0.3: client_timeout(self, 0.3)  # type: ignore[method-assign]
        assert run(order, queue.Queue(), out) is False
    finally:
        Client.hello = client_timeout  # type: ignore[method-assign]
    last = msgspec.json.decode(out.getvalue().splitlines()[-1], type=Report)
    assert last.phase == "failed"
    assert "nobody.ctl" in last.message


def test_a_clock_that_wakes_early_sends_nothing_early(live: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """H06: sleeps and polls that return too soon give no negative lag and no reply before its plan."""
    monkeypatch.setattr(generator_module.time, "sleep", lambda seconds: None)
    with Client(live.session.link.endpoint, name="early") as client:
        client.hello()
        poll = client.poll
        monkeypatch.setattr(client, "poll", lambda timeout_s=0.0: poll(max(0.0, timeout_s - 0.005)))
        made = Generator(client, Order(ctl="", spec=SHORT), has_chat_template=True)
        while made.step():
            live.pump()
    assert len(made.rows) == 40
    for row in made.rows:
        assert row.lag_s is not None
        assert row.lag_s >= 0
        assert row.ttft_s is not None
        assert row.ttft_s > 0


def test_a_late_generator_marks_its_own_run_invalid(live: Console) -> None:
    """The schedule is absolute: a client that stalls sends late, says how late, and its run is invalid."""
    spec = msgspec.structs.replace(SHORT, arrival="constant", rate_rps=200.0)
    with Client(live.session.link.endpoint, name="late") as client:
        client.hello()
        made = Generator(client, Order(ctl="", spec=spec), has_chat_template=False)
        time.sleep(0.3)  # as a busy machine would
        while made.step():
            live.pump()
    made.judge()
    planned_s = [plan.at_s for plan in schedule(spec)]
    report = made.report("done")
    assert "late" in report.invalid_reasons[0]
    rows = sorted(report.rows, key=lambda row: row.index)
    assert [(row.intended_ns - made.t0_ns) * 1e-9 for row in rows] == pytest.approx(planned_s, abs=1e-6)
    assert max(row.lag_s or 0.0 for row in rows) >= 0.25


def test_reaching_the_clients_own_limit_marks_the_run_invalid(live: Console) -> None:
    spec = msgspec.structs.replace(SHORT, rate_rps=5000.0, max_concurrency=2)
    with Client(live.session.link.endpoint, name="narrow") as client:
        client.hello()
        made = Generator(client, Order(ctl="", spec=spec), has_chat_template=True)
        while made.step():
            assert made.in_flight <= 2
            live.pump()
    assert any("most this client holds" in reason for reason in made.invalid)


_LIMITED = """
import resource, sys
from app.lab.loadgen import LoadFailed, check_descriptors
from app.lab.workload import WorkloadSpec
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    check_descriptors(WorkloadSpec(arrival="concurrency", concurrency=500))
except LoadFailed as error:
    print("refused:", error)
else:
    print("soft", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "said"), [(16, 512, "soft"), (16, 20, "refused: This process may open 20")]
)
def test_too_few_file_descriptors_are_raised_or_told_before_the_start(
    soft: int, hard: int, said: str
) -> None:
    """H09: the soft limit is raised; where the hard limit forbids that, the load does not start."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(soft), str(hard)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(said)
    if said == "soft":
        assert int(done.stdout.split()[1]) > soft


def test_five_hundred_at_once_need_no_more_descriptors_than_one(live: Console) -> None:
    """H09: concurrency 500 on two sockets; no error of the client's own."""
    spec = WorkloadSpec(
        arrival="concurrency", concurrency=500, num_requests=500, duration_s=None, input_tok=(4, 4),
        output_tok=(60, 80), ignore_eos=True,
    )  # fmt: skip
    with Client(live.session.link.endpoint, name="wide") as client:
        client.hello()
        made = Generator(client, Order(ctl="", spec=spec), has_chat_template=True)
        before = len(os.listdir("/proc/self/fd"))
        peak = 0
        while made.step():
            peak = max(peak, made.in_flight)
            live.pump()
        assert len(os.listdir("/proc/self/fd")) <= before + 5
    assert peak > 100
    assert not [row for row in made.rows if row.error_class == "client"]


def test_orders_and_controls_are_read_strictly() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"stop": "maybe"}', type=Control)
    with pytest.raises(WorkloadError):
        LoadRun().start(WorkloadSpec(output_tok=(9, 1)), "ipc:///x")


def test_an_address_that_is_none_fails_in_words(load: LoadRun) -> None:
    """Whatever goes wrong in the generator is told by it, not by an abort of its interpreter."""
    with pytest.raises(LoadError, match="no engine"):
        load.start(SHORT, "")
    load.start(SHORT, "nowhere")
    end_s = time.monotonic() + 90
    while load.poll().phase != "failed":
        assert time.monotonic() < end_s, load.poll()
        time.sleep(0.02)
    assert "nowhere" in load.poll().message
    assert "exit code" not in load.poll().message
