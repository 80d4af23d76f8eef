"""Our engine beside others, on the same token ids. ``python -m tests.bench.peers --json FILE``.

All peers are loaded; then each repetition of each workload runs on one after the other, never on two at once.
Nothing else should run on the machine. See the README in this folder for what the figures mean, and for
``--setup``, which gives a peer an environment of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from tests import demo_model
from tests.bench import knob_report, peer_files, peer_report, peer_setup, peer_specs
from tests.bench.engine_process import ROOT
from tests.bench.peer_loop import Order
from tests.bench.peer_process import PeerFailed, PeerProcess, PeerRefused
from tests.bench.peer_report import Outcome, Report, ratios_of, rows_of
from tests.bench.peer_setup import Environment
from tests.bench.peer_specs import Spec
from tests.bench.timing import Run
from tests.bench.workloads import TITLES, arms

START_TIMEOUT_S = 900.0  # vLLM compiles its model for minutes
PEERS = (*peer_specs.OWN, *peer_setup.SETUPS)


class Loaded:
    """A peer that takes orders, until it fails."""

    def __init__(self, spec: Spec, outcome: Outcome, process: PeerProcess | None) -> None:
        self.spec = spec
        self.outcome = outcome
        self.process = process

    def run(self, order: Order, timeout_s: float) -> Run | None:
        """None where it failed; its outcome says how."""
        if self.process is None or not self.takes(order):
            return None
        place = order.workload if order.arm == "plain" else f"{order.workload} {order.arm}"
        say(f"{self.spec.name} {place} {order.index}")
        try:
            times, others = self.process.ask(order, timeout_s)
        except PeerRefused as error:
            self.outcome.failed[place] = f"failed: {error}"
            return None
        except PeerFailed as error:
            self.outcome.failed[place] = f"failed: {error}; it was not started again"
            self.process.close()
            self.process = None
            return None
        if order.workload == "W1":
            self.outcome.pass_bytes = times.weight_bytes or self.outcome.pass_bytes
        return Run(
            engine=self.spec.engine,
            version=self.outcome.version,
            dtype=self.spec.dtype,
            workload=order.workload,
            arm=order.arm,
            requests=times.requests,
            index=order.index,
            steps=times.steps,
            others_cores=others,
        )

    def takes(self, order: Order) -> bool:
        if order.arm != "plain" and order.arm not in self.spec.arms:
            return False
        return order.index == 0 or order.workload not in self.spec.once


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def weights(spec: Spec, model: Path, folder: Path) -> Path:
    """The model in the peer's format, made now if need be. Raises `NoFile`."""
    if not spec.files:
        return model
    path = peer_files.place(spec.files, model, folder)
    if path.exists():
        return path
    say(f"making {spec.files} of {model.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if spec.files in peer_files.OPENVINO_FORMATS:
            hf = peer_files.place("hf", model, folder)
            if not hf.exists():
                _make("hf", model, hf)
            unfinished = path.with_name(f"unfinished-{path.name}")
            environment = Environment(folder, spec.peer)
            peer_setup.run(peer_files.export_command(spec.files, hf, unfinished, environment.bin))
            unfinished.rename(path)
        else:
            _make(spec.files, model, path)
    except subprocess.CalledProcessError as error:
        raise peer_files.NoFile(f"its weights could not be made: {error}") from error
    return path


def _make(kind: str, model: Path, path: Path) -> None:
    peer_setup.run([sys.executable, "-m", "tests.bench.peer_files", kind, str(model), str(path)], cwd=ROOT)


def load(spec: Spec, stack: ExitStack, args: argparse.Namespace, plan: Path, model: Path) -> Loaded | Outcome:
    """Start a peer, or say why it is missing."""
    outcome = Outcome(peer=spec.engine, dtype=spec.dtype)
    outcome.missing = peer_specs.absent(spec, args.peers_dir)
    if outcome.missing:
        return outcome
    begin = time.monotonic()
    try:
        path = weights(spec, model, args.peers_dir)
        say(f"loading {spec.name}")
        begin = time.monotonic()
        process = PeerProcess(
            peer_specs.command(spec, args.peers_dir, plan, path, args.threads),
            ROOT,
            peer_specs.environment_of(spec, args.peers_dir, ROOT),
        )
        stack.callback(process.close)
        ready = process.ready(START_TIMEOUT_S)
        if path.suffix == ".gguf" and spec.peer not in peer_specs.OWN:
            outcome.pass_bytes = peer_files.pass_bytes(path)
    except (PeerFailed, peer_files.NoFile) as error:
        outcome.missing = f"failed: {error}"
        return outcome
    outcome.load_s = time.monotonic() - begin
    outcome.version, outcome.note, outcome.ceilings = ready.version, ready.note, ready.ceilings
    return Loaded(spec, outcome, process)


def orders(workloads: Sequence[str], repeats: int) -> list[Order]:
    """All repetitions of one kind before the next kind, so that what is compared ran close together."""
    return [
        Order(workload, arm, index)
        for workload in workloads
        for arm in arms(workload)
        for index in range(repeats)
    ]


def turns(loaded: Sequence[Loaded], index: int) -> list[Loaded]:
    """Who runs after whom: each repetition begins with another peer."""
    start = index % len(loaded) if loaded else 0
    return [*loaded[start:], *loaded[:start]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--json", type=Path, help="where everything goes, raw")
    parser.add_argument("--model", type=Path, help="a Llama; the demo model by default")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma separated (default: %(default)s)")
    parser.add_argument(
        "--workloads", default=",".join(TITLES), help="comma separated (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repetitions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=20, help="of W2's sizes (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every peer (default: %(default)s)")
    parser.add_argument(
        "--dtype", default="bfloat16,int8,int4", help="ours, comma separated (default: %(default)s)"
    )
    parser.add_argument(
        "--peer-dtypes", default="", help="of the peers with environments of their own; empty: all they have"
    )
    parser.add_argument("--hf-dtype", default="float32", help="transformers', comma separated")
    parser.add_argument("--hf-modes", default=",".join(peer_specs.HF_MODES), help="comma separated")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run (default: 900)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed or has no figure")
    parser.add_argument(
        "--peers-dir", type=Path, default=peer_setup.default_folder(), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--setup", metavar="PEER,..", help="set peers up and end; can take many minutes: "
        + ", ".join(peer_setup.SETUPS),
    )  # fmt: skip
    args = parser.parse_args(argv)
    unknown = [name for name in args.peers.split(",") if name not in PEERS]
    unknown += [name for name in args.workloads.split(",") if name not in TITLES]
    unknown += [mode for mode in args.hf_modes.split(",") if mode and mode not in peer_specs.HF_MODES]
    unknown += [name for name in (args.setup or "").split(",") if name and name not in peer_setup.SETUPS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if not args.setup and args.json is None:
        parser.error("--json FILE says where the figures go")
    args.peers_dir = args.peers_dir.resolve()
    return args


def specs_of(args: argparse.Namespace) -> list[Spec]:
    wanted = args.peers.split(",")
    dtypes = [dtype for dtype in args.peer_dtypes.split(",") if dtype]
    others = [spec for spec in peer_specs.others() if not dtypes or spec.dtype in dtypes]
    everything = [
        *peer_specs.ours(args.dtype),
        *peer_specs.transformers(args.hf_modes, args.hf_dtype),
        *others,
    ]
    return [spec for spec in everything if spec.peer in wanted]


def compare(args: argparse.Namespace, model: Path, plan: Path, stack: ExitStack) -> Report:
    """Load everybody, run everything; the file is written again after each round."""
    report = Report(
        date=knob_report.now(),
        machine=knob_report.machine(),
        cpu_flags=peer_report.cpu_flags(),
        model=model.name,
        threads=args.threads,
        peers=[],
    )
    loaded: list[Loaded] = []
    for spec in specs_of(args):
        found = load(spec, stack, args, plan, model)
        if isinstance(found, Loaded):
            loaded.append(found)
            report.peers.append(found.outcome)
            report.ceilings = report.ceilings or found.outcome.ceilings
        else:
            say(f"{spec.name}: {found.missing}")
            report.peers.append(found)
    for order in orders(args.workloads.split(","), args.repeats):
        for peer in turns(loaded, order.index):
            run = peer.run(order, args.timeout)
            if run is not None:
                report.runs.append(run)
        report.rows = rows_of(report.runs, report.ceilings)
        report.ratios = ratios_of(report.runs)
        args.json.write_bytes(msgspec.json.encode(report))
    return report


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.setup:
        for name in args.setup.split(","):
            peer_setup.set_up(args.peers_dir, name)
        return 0
    model = args.model.resolve() if args.model else demo_model.path()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plan = Path(folder) / "plan.json"
        asked = [str(plan), str(model), args.workloads, str(args.repeats), str(args.seed)]
        subprocess.run([sys.executable, "-m", "tests.bench.make_plan", *asked], cwd=ROOT, check=True)
        report = compare(args, model, plan, stack)
    print(peer_report.text(report))
    for workload in args.workloads.split(","):
        print(f"{workload}: {TITLES[workload]}")
    missed = any(not ratio.holds for ratio in report.ratios)
    unknown = any(peer.missing or peer.failed for peer in report.peers)
    return 1 if args.check and (missed or unknown) else 0


if __name__ == "__main__":
    raise SystemExit(main())
