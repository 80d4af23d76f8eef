"""The knob benchmark: its arithmetic, its list of entries, and that it runs against a real engine."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import msgspec
import pytest

from engine.knob import KnobContext
from engine.knobs import BY_ID, KNOBS
from ipc import messages as m
from ipc.client import Client
from tests import tiny_models
from tests.bench import knob_figures as f
from tests.bench import knob_report, knob_workloads, knobs, stages
from tests.bench.engine_process import engine
from tests.bench.knob_report import KnobResult, Report
from tests.bench.knob_run import Answer, KnobRefused, Outcome, Send, Session, Setup
from tests.bench.knob_specs import NOT_MEASURED, SPECS, Spec, chosen, name
from tests.bench.knob_workloads import Draw
from tests.bench.paired import abba, compare, ratio_interval, t_quantile, verdict

SETUP = Setup(vocab_size=49_152, max_model_len=8192, kv_bytes_per_token=23_040)


def step(number: int, **values: object) -> m.StepRow:
    """A step row of zeros but for the values given."""
    fields: dict[str, object] = dict.fromkeys(m.StepRow.__struct_fields__, 0)
    fields |= {
        "v": 3,
        "step": number,
        "drafted_at": [],
        "accepted_at": [],
        "attention": "sdpa",
        "kernels": "",
    }
    fields["output_tok"] = values.get("decode_tok", 0)
    return m.StepRow(**(fields | values))  # type: ignore[arg-type]


def request_row(rid: int, **values: object) -> m.RequestRow:
    return m.RequestRow(rid=rid, tag="", state="finished", arrive_ns=0, prompt_tok=8, **values)  # type: ignore[arg-type]


def outcome(arm: str = "off", pair: int = 0, **values: object) -> Outcome:
    fields: dict[str, object] = {"wall_s": 2.0, "answers": [], "steps": [], "block_size": 16, "memory": {}}
    return Outcome(arm=arm, pair=pair, **(fields | values))  # type: ignore[arg-type]


# --- statistics ----------------------------------------------------------------------------------


def test_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}
    for df, expected in table.items():
        assert t_quantile(df) == pytest.approx(expected, abs=5e-4)
    assert t_quantile(7, 0.99) == pytest.approx(3.499, abs=5e-4)
    with pytest.raises(ValueError, match="degree"):
        t_quantile(0)


def test_the_interval_is_that_of_the_logarithms() -> None:
    """Log ratios 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, half width 4.303 * 0.1 / sqrt 3."""
    off = [1.0, 10.0, 100.0]
    on = [a * math.exp(d) for a, d in zip(off, (0.1, 0.2, 0.3), strict=True)]
    ratio, low, high = ratio_interval(off, on)
    half = t_quantile(2) * 0.1 / math.sqrt(3)
    assert (ratio, low, high) == pytest.approx((math.exp(0.2), math.exp(0.2 - half), math.exp(0.2 + half)))
    back, back_low, back_high = ratio_interval(on, off)
    assert (back, back_low, back_high) == pytest.approx((1 / ratio, 1 / high, 1 / low))  # type: ignore[operator]


def test_one_pair_has_no_interval_and_decides_nothing() -> None:
    one = compare("x", "s", "higher", [1.0], [9.0])
    assert (one.ratio, one.low, one.high) == (pytest.approx(9.0), None, None)
    assert one.verdict == "no clear effect"
    assert "cannot be said" in knob_report.finding(one)


@pytest.mark.parametrize(("better", "low", "high", "expected"), [
    ("higher", 1.01, 1.5, "helps"), ("higher", 0.5, 0.99, "hurts"), ("higher", 0.9, 1.1, "no clear effect"),
    ("lower", 0.5, 0.99, "helps"), ("lower", 1.01, 1.5, "hurts"), ("lower", 0.99, 1.0, "no clear effect"),
])  # fmt: skip
def test_only_an_interval_beside_1_is_an_effect(better: str, low: float, high: float, expected: str) -> None:
    assert verdict(better, (low + high) / 2, low, high) == expected  # type: ignore[arg-type]


def test_counts_that_are_nothing_or_undefined_have_no_ratio() -> None:
    for off, on in (([0.0, 3.0], [5.0, 5.0]), ([None, 1.0], [1.0, 1.0]), ([1.0, 1.0], [-1.0, 1.0])):
        found = compare("x", "", "higher", off, on)
        assert (found.ratio, found.low, found.verdict) == (None, None, "no ratio")
    assert compare("x", "", "lower", [None, 2.0, 4.0], [1.0, None, None]).off_median == 3.0
    assert compare("x", "", "lower", [None], [None]).on_median is None


def test_a_drift_favours_neither_arm() -> None:
    assert list(abba(3)) == [(0, "off"), (0, "on"), (1, "on"), (1, "off"), (2, "off"), (2, "on")]
    times = {arm: [i for i, (_, a) in enumerate(abba(4)) if a == arm] for arm in ("off", "on")}
    assert sum(times["off"]) == sum(times["on"])


def test_what_is_not_shown_is_not_called_absent() -> None:
    wide = compare("x", "", "higher", [1.0, 1.0, 1.0], [1.0, 1.6, 0.9])
    assert "more pairs narrow it" in knob_report.finding(wide)
    same = compare("x", "", "higher", [1.0, 1.0, 1.0], [1.001, 0.999, 1.0])
    assert "stays the same" in knob_report.finding(same)
    worse = compare("x", "", "higher", [1.0, 1.0, 1.0], [0.5, 0.51, 0.49])
    assert "meant to be higher" in knob_report.finding(worse)


# --- figures -------------------------------------------------------------------------------------


def test_figures_of_requests() -> None:
    answers = [
        Answer(kind="a", intended_s=0.0, first_s=0.1, last_s=1.0, tokens=4, messages=2,
               row=request_row(1, itl_us=[1000, 2000, 3000], sched_ns=5)),
        Answer(kind="b", intended_s=0.5, first_s=0.8, last_s=2.0, tokens=2, messages=2,
               row=request_row(2, itl_us=[9000], sched_ns=5)),
        Answer(kind="b", intended_s=0.5, row=request_row(3)),
    ]  # fmt: skip
    run = outcome(answers=answers)
    assert f.OUT_TOK_S.of(run) == pytest.approx(3.0)
    assert f.ttft().of(run) == pytest.approx(200.0)
    assert f.ttft("b").of(run) == pytest.approx(300.0)
    assert f.ttft("nobody").of(run) is None
    assert f.e2e("b").of(run) == pytest.approx(1500.0)
    assert f.itl("a", 50).of(run) == pytest.approx(2.0)
    assert f.itl(percent=100).of(run) == pytest.approx(9.0)
    assert f.BATCH_FILL.of(run) == 2.0
    assert f.MESSAGES.of(run) == pytest.approx(4 / 6)
    assert f.OUT_TOK_S.of(outcome()) is None


def test_figures_of_steps() -> None:
    steps = [
        step(1, t_ns=0, dur_us=10, prefill_reqs=2, running=2, used_blk=2, used_tok=20, prefill_tok=20),
        step(2, t_ns=1_000_000, dur_us=30, decode_reqs=2, decode_tok=2, running=2, used_blk=3, used_tok=22),
        step(3, t_ns=3_000_000, dur_us=30, decode_reqs=2, decode_tok=2, running=3, used_blk=3, used_tok=24),
        step(4, t_ns=9_000_000, dur_us=30, decode_reqs=1, decode_tok=1, running=1, used_blk=1, used_tok=16),
        step(6, t_ns=9_500_000, dur_us=0, decode_reqs=1, decode_tok=1),
    ]
    run = outcome(steps=steps)
    assert f.AT_ONCE.of(run) == 3
    assert f.WASTED.of(run) == pytest.approx((10 * 12 + 30 * 26 + 30 * 24 + 0) / 100)
    assert f.idle_seats(4).of(run) == pytest.approx((10 * 2 + 30 * 2 + 30 * 2 + 30 * 3) / 100)
    assert f.COMPUTED.of(run) == 20
    assert [row.step for row, _ in f.steady(steps)] == [2]  # 3 and 4 differ, 5 is missing
    assert f.DECODE_STEP_MS.of(run) == pytest.approx(2.0)
    assert f.DECODE_TOK_S.of(run) == pytest.approx(1000.0)
    assert f.WASTED.of(outcome()) is None
    assert f.DECODE_STEP_MS.of(outcome(steps=steps[:1])) is None


# --- entries -------------------------------------------------------------------------------------


def test_every_knob_is_measured_or_says_why_not() -> None:
    measured = {spec.knob for spec in SPECS}
    assert not measured & set(NOT_MEASURED)
    assert (measured | set(NOT_MEASURED)) <= set(BY_ID)
    missing = [knob.id for knob in KNOBS if knob.id not in measured | set(NOT_MEASURED)]
    assert not missing


def test_entries_can_be_chosen_by_knob_and_by_name() -> None:
    assert chosen("") == list(SPECS)
    assert [name(spec) for spec in chosen("kv_dtype,policy")] == [
        "policy",
        "kv_dtype=int8",
        "kv_dtype=fp8_e4m3",
    ]
    assert [spec.on for spec in chosen("kv_dtype=int8")] == ["int8"]
    with pytest.raises(
        ValueError, match=r"nonsense: there is no such entry.*max_num_queued: a limit|a limit.*nonsense"
    ):
        chosen("nonsense,max_num_queued")


def test_the_names_of_entries_are_listed_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert knobs.main(["--list"]) == 0
    entries, others = capsys.readouterr().out.split("\n\n")
    assert [line.split("  ")[0] for line in entries.splitlines()] == [name(spec) for spec in SPECS]
    assert all(f"no entry: {knob}: {why}" in others for knob, why in NOT_MEASURED.items())


def test_a_wrong_entry_is_told_before_the_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        knobs.parse(["--only", "nonsense"])
    error = capsys.readouterr().err
    assert "nonsense: there is no such entry" in error
    assert "--json" not in error.splitlines()[-1]


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_an_entry_holds_together(spec: Spec) -> None:
    """Its values are ones the knob takes, its texts are there, and every request fits its pool."""
    assert spec.off != spec.on
    for knob, value in {**spec.base, spec.knob: spec.off}.items():
        assert BY_ID[knob].why_not(value, KnobContext()) == ""
    assert BY_ID[spec.knob].why_not(spec.on, KnobContext()) == ""
    assert spec.expected
    assert spec.otherwise
    sends = [send for wave in spec.workload(Draw("0", SETUP)) for send in wave]
    if spec.pool_tokens is not None:
        assert all(len(send.prompt) + send.out <= spec.pool_tokens for send in sends)
        assert int(SETUP.pool_gib(spec.pool_tokens) * (1 << 30)) // (16 * 23_040) == spec.pool_tokens // 16
    if "pool" in spec.expected:
        assert spec.pool_tokens is not None


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_arms_share_their_prompts_and_pairs_do_not(spec: Spec) -> None:
    def prompts(pair: int) -> list[str]:
        waves = spec.workload(Draw(f"{spec.knob} {pair}", SETUP))
        return [repr(send.prompt) for wave in waves for send in wave]

    assert prompts(0) == prompts(0)
    assert not set(prompts(0)) & set(prompts(1))


# --- report --------------------------------------------------------------------------------------


def _report(results: list[KnobResult]) -> Report:
    model = m.ModelInfo(
        name="m", path="p", architecture="llama", format="gguf", dtype="float32", num_layers=1, hidden_size=1,
        num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=1, max_model_len=1, num_params=1_000_000,
        weight_bytes=1, kv_bytes_per_token=1,
    )  # fmt: skip
    info = m.EngineInfo(version="1", pid=1, host="h", started_unix_ms=0, torch="2")
    return Report(
        date=knob_report.now(), machine=knob_report.machine(), engine=info, model=model, device=None,
        options={"threads": 1}, pairs=2, results=results,
    )  # fmt: skip


def test_a_report_holds_everything_raw_and_reads_back() -> None:
    (spec,) = chosen("kv_allocation")
    runs = [
        outcome(
            arm, pair, steps=[step(1, running=running, dur_us=5)], memory={"kv_bytes": 1 << 20}, flip_us=2000
        )
        for pair, arm, running in ((0, "off", 4), (0, "on", 8), (1, "on", 16), (1, "off", 8))
    ]
    result = knob_report.begin(spec)
    knob_report.conclude(result, spec, runs)
    main = result.figures[0]
    assert (main.off, main.on, main.ratio, main.verdict) == ([4, 8], [8, 16], pytest.approx(2.0), "helps")
    assert result.memory["on"]["kv_bytes"] == 1 << 20
    assert result.flip_ms == {"off": 2.0, "on": 2.0}
    report = _report([result])
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    text = knob_report.text(result)
    assert "HELPS" in text
    assert "KV pool 1.0 -> 1.0 MiB" in text
    assert "FINDING" not in text
    assert "2.000 [2.000 2.000]" in knob_report.summary([result])
    assert "1 M weights" in knob_report.about(report)


def test_arms_with_other_pairs_are_not_compared() -> None:
    (spec,) = chosen("kv_allocation")
    with pytest.raises(ValueError, match="same pairs"):
        knob_report.conclude(knob_report.begin(spec), spec, [outcome("off", 0), outcome("on", 1)])


def test_a_cost_has_a_limit_that_its_whole_interval_must_keep() -> None:
    (spec,) = chosen("forward_timing")
    for slower, within in ((1.0, True), (1.02, False)):
        runs = []
        for pair, arm in abba(3):
            ms = 10.0 * (slower if arm == "on" else 1.0)
            rows = [step(i, t_ns=round(i * ms * 1e6), decode_reqs=2, decode_tok=2) for i in range(3)]
            runs.append(outcome(arm, pair, steps=rows))
        result = knob_report.begin(spec)
        knob_report.conclude(result, spec, runs)
        assert result.within is within
        assert ("NOT SHOWN" in knob_report.text(result)) is not within


def test_what_did_not_run_says_why() -> None:
    result = knob_report.begin(chosen("overlap")[0])
    result.skipped = "made of wood"
    assert "not run: made of wood" in knob_report.text(result)
    assert "not run" in knob_report.summary([result])
    result.skipped, result.failed = "", "fell over"
    assert "BROKE OFF: fell over" in knob_report.text(result)
    assert "broke off" in knob_report.summary([result])


def test_the_stage_table_takes_publishing_from_the_row_after() -> None:
    rows = [
        step(n, dur_us=100, forward_us=80 + n, plan_us=10, publish_us=n, attention_us=None, linear_us=None,
             head_us=None)
        for n in (1, 2, 3, 5)
    ]  # fmt: skip
    table = {row["stage"]: row for row in stages.step_table(rows)}
    assert table["forward"]["steps"] == 2
    assert table["forward"]["mean_ms"] == pytest.approx(0.0815)
    assert table["forward"]["std_ms"] == pytest.approx(0.0005)
    assert table["publish"]["mean_ms"] == pytest.approx(0.0025)
    assert table["forward"]["share_percent"] == pytest.approx(100 * 163 / 205)
    assert table["detokenize"]["where"] == "beside"
    assert not {"attention", "linear", "head"} & set(table)
    by_request = {row["stage"]: row for row in stages.request_table([request_row(1, sched_ns=2_000_000)])}
    assert by_request["queue"]["mean_ms"] == pytest.approx(2.0)


# --- against a real engine -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    model = tiny_models.build(
        tmp_path_factory.mktemp("bench") / "model", num_hidden_layers=1, max_position_embeddings=2048
    )
    options = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-pool-gib", "0.01", "--check"]
    with engine(str(model), *options) as ctl, Client(ctl, silence_s=60.0) as client:
        yield Session(client)


def test_entries_run_against_a_real_engine(session: Session, tmp_path: Path) -> None:
    """What it says of counts is exact; how fast it was is not looked at."""
    report, file = _report([]), tmp_path / "report.json"
    specs = chosen("preemption,prefix_cache,kv_allocation,kv_host_gib,result_cache")
    specs = [  # a GiB of host memory takes seconds to get on a busy machine, and a tiny model fills none
        dataclasses.replace(spec, on=0.01)
        if spec.knob == "kv_host_gib"
        else dataclasses.replace(spec, base={**spec.base, "swap_space_gib": 0.01})
        if spec.knob == "preemption"
        else spec
        for spec in specs
    ]
    with redirect_stdout(io.StringIO()) as printed:
        assert not knobs.run_entries(session, specs, 2, report, file)
    assert msgspec.json.decode(file.read_bytes(), type=Report) == report
    results = {result.knob: result for result in report.results}
    assert not [result.failed for result in report.results if result.failed]
    prefix, pages = results["prefix_cache"], results["kv_allocation"]
    figures = {figure.figure: figure for result in (prefix, pages) for figure in result.figures}
    assert figures["hit tokens"].off == [0, 0]
    assert figures["hit tokens"].on == [9 * 384, 9 * 384]
    assert figures["prompt tokens computed"].off == [10 * 416] * 2, "an arm found what another had computed"
    held = figures["requests at once, most"]
    assert min(held.on) > max(held.off)  # type: ignore[type-var]
    assert max(held.off) <= 2048 // (48 + 256 - 16)  # type: ignore[type-var, operator]
    for result in report.results:
        assert [run.arm for run in result.outcomes] == ["off", "on", "on", "off"]
        assert result.entry in printed.getvalue()
    host, again = results["kv_host_gib"], results["result_cache"]
    assert [figure.on for figure in host.figures if figure.figure == "hit tokens from host"] == [
        [6 * 384] * 2
    ]
    assert host.memory["on"]["host_kv_bytes"] > host.memory["off"]["host_kv_bytes"]
    swap = {figure.figure: figure for figure in results["preemption"].figures}
    assert min(swap["tokens recomputed"].off) >= 768  # type: ignore[type-var]
    assert swap["tokens recomputed"].on == [0, 0]
    assert min(swap["tokens swapped in"].on) >= 768  # type: ignore[type-var]
    given = next(figure for figure in again.figures if figure.figure == "answers given again")
    assert (given.off, given.on) == ([0, 0], [12, 12])
    tokens = {run.arm: sum(answer.tokens for answer in run.answers) for run in prefix.outcomes}
    assert tokens == {"off": 80, "on": 80}


def test_what_cannot_run_and_what_breaks_off_do_not_stop_the_others(session: Session, tmp_path: Path) -> None:
    """A choice that this device does not have is skipped; a pool that is refused breaks off, and says why."""
    (attention,) = chosen("attention=sdpa")
    elsewhere = dataclasses.replace(attention, on="flash_attn")
    too_small = dataclasses.replace(attention, pool_tokens=64)
    works = dataclasses.replace(attention, workload=knob_workloads.batch(2, 8, 2), figures=(f.AT_ONCE,))
    report = _report([])
    with redirect_stdout(io.StringIO()):
        knobs.run_entries(session, [elsewhere, too_small, works], 1, report, tmp_path / "r.json")
    skipped, failed, ran = report.results
    assert "flash_attn" in skipped.skipped
    assert "blocks" in failed.failed
    assert (ran.skipped, ran.failed) == ("", "")
    with pytest.raises(KnobRefused, match="was refused"):
        session.flip({"block_size": 0})


def test_a_knob_is_flipped_under_a_steady_load(session: Session) -> None:
    """Each stretch holds only steps of its own arm, in which everybody decodes."""
    (attention,) = chosen("attention=sdpa")
    spec = dataclasses.replace(attention, workload=knob_workloads.long_streams, segments=2)
    runs = knobs.measure(session, spec, 1)
    assert [run.arm for run in runs] == ["off", "on", "on", "off"]
    for run in runs:
        assert {row.attention for row in run.steps} == {"naive" if run.arm == "off" else "sdpa"}
        assert {row.decode_reqs for row in run.steps} == {16}
        assert len(f.steady(run.steps)) >= knobs.STEADY_STEPS
    revs = [{row.cfg_rev for row in run.steps} for run in runs]
    assert [len(rev) for rev in revs] == [1, 1, 1, 1]
    assert revs[1] == revs[2]
    assert len(set(itertools.chain(*revs))) == 3


def test_a_request_can_be_given_up_by_its_reader(session: Session) -> None:
    sends = [Send(prompt=list(range(32, 64)), out=400, cancel_after=3, kind="given up")]
    (answer,) = session.run([sends], arm="", pair=0, salt="given up").answers
    assert answer.finish == "cancelled"
    assert 3 <= answer.tokens < 400


def test_the_stages_of_a_real_run(session: Session, tmp_path: Path) -> None:
    with redirect_stdout(io.StringIO()) as printed:
        assert stages.report(session, tmp_path / "stages.json") == 0
    found = msgspec.json.decode((tmp_path / "stages.json").read_bytes())
    shares = {row["stage"]: row["share_percent"] for row in found["steps"]}
    inside = [row["share_percent"] for row in found["steps"] if row["where"] == "in the step"]
    assert 0 < shares["forward"] <= 100
    assert sum(inside) <= 101, "stages that follow one another are more than the whole"
    assert found["timing_cost"]["share_percent"] > 0
    assert {row["requests"] for row in found["requests"]} == {stages.REQUESTS}
    assert "forward" in printed.getvalue()
