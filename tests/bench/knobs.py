"""Each optimization flipped off and on in one running engine, on a workload where it should matter.

``python -m tests.bench.knobs --json FILE``. See the README in this folder for how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ipc import messages as m
from ipc.client import Client, EngineError, EngineGone, EngineSilent
from tests import demo_model
from tests.bench import knob_figures, knob_report, stages
from tests.bench.engine_process import engine
from tests.bench.knob_report import KnobResult, Report
from tests.bench.knob_run import KnobRefused, Outcome, Send, Session
from tests.bench.knob_specs import Spec, chosen, listing
from tests.bench.knob_workloads import Draw, batch
from tests.bench.paired import abba

STEADY_STEPS = 10  # of a stretch of a steady load
STRETCH_S = 120.0


def base_values(session: Session, spec: Spec) -> dict[str, m.KnobValue]:
    """Every knob's default, then the entry's own values, then ``off``."""
    values = {**session.defaults, **spec.base}
    if spec.pool_tokens is not None:
        values["kv_pool_gib"] = session.setup.pool_gib(spec.pool_tokens)
    return values | {spec.knob: spec.off}


def measure(session: Session, spec: Spec, pairs: int) -> list[Outcome]:
    """All runs of one entry, in ABBA pairs. Leaves the engine with the last arm's knobs."""
    session.flip(base_values(session, spec))
    if spec.segments:
        return _stretches(session, spec, pairs * spec.segments)
    outcomes = []
    for pair, arm in abba(pairs):
        flipped = session.flip({spec.knob: spec.on if arm == "on" else spec.off})
        _warm_up(session, f"{spec.knob} {spec.on} {pair} {arm}")
        waves = spec.workload(Draw(f"{spec.knob} {pair}", session.setup))
        salt = f"{spec.knob} {spec.on} {pair} {arm}"
        took = None if flipped is None else flipped.took_us
        outcomes.append(session.run(waves, arm=arm, pair=pair, salt=salt, flip_us=took))
    return outcomes


def _warm_up(session: Session, seed: str) -> None:
    """After a flip the pool may be new memory, and caches of the machine are cold."""
    session.run(
        batch(4, 48, 4)(Draw(f"warm up {seed}", session.setup)), arm="", pair=0, salt=f"warm up {seed}"
    )


def _stretches(session: Session, spec: Spec, pairs: int) -> list[Outcome]:
    """One steady load, and the knob flipped under it; an outcome holds the steps of one stretch."""
    draw = Draw(spec.knob, session.setup)
    sends = list(spec.workload(draw)[0])

    def following() -> Send:
        return draw.random.choice(spec.workload(draw)[0])

    salt = f"{spec.knob} {spec.on}"
    session.begin()
    for send in sends:
        session.submit(send, salt)
    session.pump(following, salt, _enough(session, lambda row: row.decode_reqs == len(sends)))
    outcomes = []
    for pair, arm in abba(pairs):
        event = session.flip({spec.knob: spec.on if arm == "on" else spec.off})
        rev = session.client.config().rev
        session.begin()

        def counts(row: m.StepRow, rev: int = rev) -> bool:
            return row.cfg_rev == rev and row.decode_reqs == len(sends)

        session.pump(following, salt, _enough(session, counts))
        session.note_memory(session.client.snapshot().state)
        outcomes.append(
            Outcome(
                arm=arm,
                pair=pair,
                wall_s=0.0,
                answers=[],
                steps=[row for row in session.heard if counts(row)],
                block_size=session.block_size,
                memory=session.memory,
                flip_us=None if event is None else event.took_us,
            )
        )
    session.cancel_all()
    return outcomes


def _enough(session: Session, counts: Callable[[m.StepRow], bool]) -> Callable[[], bool]:
    """Whether enough decode steps that count have come. Raises when they do not."""
    deadline = time.monotonic() + STRETCH_S

    def until() -> bool:
        if time.monotonic() > deadline:
            raise RuntimeError(f"a steady load had no {STEADY_STEPS} steps alike within {STRETCH_S:g} s")
        return len(knob_figures.steady([row for row in session.heard if counts(row)])) >= STEADY_STEPS

    return until


def run_entry(session: Session, spec: Spec, pairs: int) -> KnobResult:
    """Run one entry. What cannot run here or breaks off says so in its result; a lost engine is raised."""
    result = knob_report.begin(spec)
    result.skipped = session.why_not(spec.knob, spec.off, spec.on)
    for knob, value in spec.base.items():
        result.skipped = result.skipped or session.why_not(knob, value)
    if result.skipped:
        return result
    try:
        knob_report.conclude(result, spec, measure(session, spec, pairs))
    except (KnobRefused, EngineError, RuntimeError) as error:
        result.failed = f"{type(error).__name__}: {error}"
        session.cancel_all()
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.knobs", description=__doc__)
    parser.add_argument("--json", type=Path, help="where everything goes, raw")
    parser.add_argument("--only", default="", help="knobs or entries, comma separated (default: all)")
    parser.add_argument("--list", action="store_true", help="instead: the names of the entries")
    parser.add_argument("--pairs", type=int, default=3, help="ABBA pairs (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model folder or a GGUF file; the demo model by default")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--stages", action="store_true", help="instead: where the time of a step goes")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}; it must be at least 1")
    try:
        args.specs = chosen(args.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    if not args.stages and not args.list and args.json is None:
        parser.error("--json is missing: say where the figures go")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        print(listing(args.specs))
        return 0
    model = str(args.model.resolve() if args.model else demo_model.path())
    options = ["--dtype", args.dtype, "--device", args.device, "--threads", str(args.threads)]
    with engine(model, *options) as ctl, Client(ctl, silence_s=60.0) as client:
        session = Session(client)
        if args.stages:
            return stages.report(session, args.json)
        report = Report(
            date=knob_report.now(),
            machine=knob_report.machine(),
            engine=session.welcome.engine,
            model=session.model,
            device=session.device,
            options={"dtype": args.dtype, "device": args.device, "threads": args.threads},
            pairs=args.pairs,
        )
        _warm_up(session, "engine")
        lost = run_entries(session, args.specs, args.pairs, report, args.json)
    print()
    print(knob_report.summary(report.results))
    print(f"\n{knob_report.about(report)}")
    return 1 if lost or any(result.failed for result in report.results) else 0


def run_entries(session: Session, specs: Sequence[Spec], pairs: int, report: Report, file: Path) -> bool:
    """Run them all, writing the file after each. True if the engine was lost."""
    for spec in specs:
        begin = time.monotonic()
        try:
            result = run_entry(session, spec, pairs)
        except (EngineGone, EngineSilent) as error:
            result = knob_report.begin(spec)
            result.failed = f"the engine was lost: {error}"
        report.results.append(result)
        file.write_bytes(msgspec.json.encode(report))
        print(knob_report.text(result))
        print(f"  ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
        if result.failed.startswith("the engine was lost"):
            return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
