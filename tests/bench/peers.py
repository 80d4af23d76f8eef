"""Our engine beside transformers, on the same token ids. ``python -m tests.bench.peers --json FILE``.

Every peer runs in its own process, one after the other, and nothing else should run on the machine. See the
README in this folder for what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests import demo_model
from tests.bench.engine_process import ROOT, environment
from tests.bench.timing import Row, Run, Spread, row
from tests.bench.workloads import TITLES

HF_MODES = ("generate", "generate_batch", "generate_batch_tuned")


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio that must be reached: ``ours / theirs`` of the medians of one figure."""

    text: str
    ours: float
    theirs: float
    at_least: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def holds(self) -> bool:
        return self.ratio >= self.at_least


def run_peer(name: str, module: str, *arguments: str) -> None:
    """One peer in its own process. Raises with its name when it fails."""
    print(f"--- {name}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment(), check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed with exit status {done.returncode}; its output is above")


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """One row for each peer, workload and arm, in the order they ran."""
    groups: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.dtype, run.workload, run.arm), []).append(run)
    return [row(group) for group in groups.values()]


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Those goals that these rows allow to be computed; transformers at its better setting."""

    def rate(engines: Sequence[str], workload: str) -> float | None:
        found = [r.out_tok_s.median for r in rows if r.engine in engines and r.workload == workload]
        return max(found, default=None)

    ours = ["decodeck"]
    one_by_one = ["transformers generate"]
    batched = ["transformers generate_batch", "transformers generate_batch_tuned"]
    wanted = (
        (
            "W2, output tokens/s: decodeck / generate_batch at its better setting",
            3.0,
            ours,
            "W2",
            batched,
            "W2",
        ),
        ("W1, output tokens/s: decodeck / generate", 1.2, ours, "W1", one_by_one, "W1"),
        ("W3, output tokens/s: prefix_cache on / off", 3.0, ours, "W3 cache_on", ours, "W3 cache_off"),
    )
    found: list[Goal] = []
    for text, at_least, our_engines, our_workload, their_engines, their_workload in wanted:
        a, b = rate(our_engines, our_workload), rate(their_engines, their_workload)
        if a is not None and b is not None:
            found.append(Goal(text=text, ours=a, theirs=b, at_least=at_least))
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows for a person: median and, in brackets, least and greatest."""

    def cell(value: Spread | None, digits: int = 1) -> str:
        if value is None:
            return "-"
        return f"{value.median:.{digits}f} [{value.min:.{digits}f} {value.max:.{digits}f}]"

    head = ["engine", "dtype", "workload", "n", "TTFT ms", "TPOT ms", "out tok/s", "prefill tok/s", "wall s"]
    body = [
        [
            r.engine, r.dtype, r.workload, str(r.wall_s.n), cell(r.ttft_ms, 0), cell(r.tpot_ms),
            cell(r.out_tok_s), cell(r.prefill_tok_s, 0), cell(r.wall_s, 2),
        ]
        for r in rows
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--model", type=Path, help="a GGUF file of a Llama; the demo model by default")
    parser.add_argument(
        "--workloads", default=",".join(TITLES), help="comma separated (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repetitions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=20, help="of W2's sizes (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every peer (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="ours, comma separated (default: %(default)s)")
    parser.add_argument("--hf-dtype", default="float32", help="transformers', comma separated")
    parser.add_argument("--hf-modes", default=",".join(HF_MODES), help="comma separated; empty: ours alone")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--raw", type=Path, help="also write every request's token times here")
    args = parser.parse_args(argv)
    unknown = [w for w in args.workloads.split(",") if w not in TITLES]
    unknown += [mode for mode in args.hf_modes.split(",") if mode and mode not in HF_MODES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    model = args.model.resolve() if args.model else demo_model.path()
    runs: list[Run] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        plan, out = str(Path(folder) / "plan.json"), Path(folder) / "runs.json"
        run_peer(
            "plan",
            "tests.bench.make_plan",
            plan,
            str(model),
            args.workloads,
            str(args.repeats),
            str(args.seed),
        )
        peers = [
            (f"decodeck {dtype}", "tests.bench.peer_decodeck", [dtype, str(args.threads)])
            for dtype in args.dtype.split(",")
        ]
        peers += [
            (
                f"transformers {mode} {dtype}",
                "tests.bench.peer_transformers",
                [mode, dtype, str(args.threads)],
            )
            for mode in args.hf_modes.split(",")
            if mode
            for dtype in args.hf_dtype.split(",")
        ]
        for name, module, arguments in peers:
            run_peer(name, module, plan, str(out), *arguments)
            runs += msgspec.json.decode(out.read_bytes(), type=list[Run])
            rows = rows_of(runs)  # written after each peer: a later one that fails takes nothing along
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    if args.raw:
        args.raw.write_bytes(msgspec.json.encode(runs))
    print(table(rows))
    print(f"\n{os.cpu_count()} CPUs, {args.threads} threads for each peer, model {model.name}")
    for workload in args.workloads.split(","):
        print(f"{workload}: {TITLES[workload]}")
    missed = 0
    for goal in goals(rows):
        verdict = "holds" if goal.holds else "DOES NOT HOLD"
        missed += not goal.holds
        print(
            f"{goal.text}: {goal.ours:.1f} / {goal.theirs:.1f} = {goal.ratio:.2f}, "
            f"at least {goal.at_least:g} wanted: {verdict}"
        )
    return 1 if missed and args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
