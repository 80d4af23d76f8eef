"""What a step costs besides the model, and what the console costs. ``python -m tests.bench.overhead``.

32 requests decode at once on the real engine; the engine's own step rows tell where the time went. A step
runs from its plan until its rows are ready, and what publishing took is in the row of the step after. Then
the console attaches, offscreen and drawing at its usual rate, while the same load goes on, and leaves again,
several times: what the engine generates with it is compared with what it generates alone, pair by pair, and
the operating system's account of the console's processor time is read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from ipc import messages as m
from ipc.client import Client
from tests import demo_model
from tests.bench import paired
from tests.bench.engine_process import ROOT, engine, environment
from tests.bench.workloads import english_text

STREAMS = 32
SETTLE_S = 5.0  # until the console's window is up
STAGES = ("plan_us", "prepare_us", "forward_us", "sample_us", "detokenize_us")


class Load:
    """Keeps `STREAMS` requests decoding: each that ends is followed by another.

    The first ones have different lengths, so that requests end one by one and each second is like any other.
    """

    def __init__(self, client: Client, out: int) -> None:
        self._client = client
        self._out = out
        self._text = english_text()
        self._next = 0
        for stream in range(STREAMS):
            self._send(max(1, out * (stream + 1) // STREAMS))

    def _send(self, out: int) -> None:
        prompt = self._text[self._next : self._next + 200]
        self._next = (self._next + 200) % (len(self._text) - 200)
        sampling = m.Sampling(max_tokens=out, ignore_eos=True)
        self._client.send(self._client.build_submit(prompt, sampling=sampling))

    def run(self, seconds: float) -> list[m.StepRow]:
        """Keep it up for a while; the step rows that came meanwhile."""
        rows: list[m.StepRow] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for reply in self._client.poll(0.1):
                if isinstance(reply, m.Done):
                    self._send(self._out)
                elif isinstance(reply, m.Error):
                    raise RuntimeError(f"a request was refused: {reply.message}")
            for _, _, message in self._client.telemetry():
                if isinstance(message, m.StepRows):
                    rows += message.rows
        return rows


def shares(rows: Sequence[m.StepRow]) -> dict[str, float | int]:
    """Where the time of the steps of `STREAMS` decoding requests and no prompt went."""
    pairs = [
        (row, after.publish_us)
        for row, after in itertools.pairwise(rows)
        if row.decode_reqs == STREAMS and row.prefill_reqs == 0 and after.step == row.step + 1
    ]
    if not pairs:
        raise RuntimeError(f"none of {len(rows)} steps had {STREAMS} decoding requests and no prompt")
    outside = [1 - row.forward_us / (row.dur_us + publish) for row, publish in pairs]
    result: dict[str, float | int] = {
        "steps": len(pairs),
        "step_ms": statistics.median(row.dur_us + publish for row, publish in pairs) / 1e3,
        "outside_forward_percent": 100 * statistics.median(outside),
        "outside_forward_percent_max": 100 * max(outside),
        "publish_ms": statistics.median(publish for _, publish in pairs) / 1e3,
    }
    for stage in STAGES:
        result[stage.replace("_us", "_ms")] = statistics.median(getattr(row, stage) for row, _ in pairs) / 1e3
    return result


@contextmanager
def console(ctl: str) -> Iterator[psutil.Process]:
    """The real window, offscreen, attached to the engine."""
    with tempfile.TemporaryDirectory() as data:
        env = {**environment(), "QT_QPA_PLATFORM": "offscreen", "DECODECK_DATA": data}
        env["XDG_CONFIG_HOME"] = data  # nobody's own settings are read or changed
        process = subprocess.Popen([sys.executable, "-m", "app", "--attach", ctl], cwd=ROOT, env=env)
        try:
            yield psutil.Process(process.pid)
            if process.poll() is not None:
                raise RuntimeError(f"the console ended by itself with exit status {process.returncode}")
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def tok_s(rows: Sequence[m.StepRow]) -> float:
    """Generated tokens by the time of the steps that they took."""
    return sum(row.output_tok for row in rows[:-1]) / (rows[-1].t_ns - rows[0].t_ns) * 1e9


def beside_console(load: Load, ctl: str, pairs: int, seconds: float) -> dict[str, float | int]:
    """The same load without and with the console, in turn, and what the console took."""
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    seen: list[m.StepRow] = []
    used = elapsed = 0.0
    for pair, arm in paired.abba(pairs):
        print(f"console {arm}, pair {pair + 1} of {pairs}", file=sys.stderr, flush=True)
        if arm == "off":
            load.run(1)
            speeds[arm].append(tok_s(load.run(seconds)))
            continue
        with console(ctl) as process:
            load.run(SETTLE_S)
            before, start = cpu_s(process), time.monotonic()
            rows = load.run(seconds)
            used += cpu_s(process) - before
            elapsed += time.monotonic() - start
        speeds[arm].append(tok_s(rows))
        seen += rows
    compared = paired.compare("speed", "tok/s", "higher", speeds["off"], speeds["on"])
    result: dict[str, float | int] = {"console_pairs": pairs}
    for name in ("off_median", "on_median", "ratio", "low", "high"):
        value = getattr(compared, name)
        if value is not None:
            result[f"console_tok_s_{name}"] = value
    result["console_cpu_percent_of_a_core"] = 100 * used / elapsed
    result["outside_forward_percent_with_console"] = shares(seen)["outside_forward_percent"]
    return result


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its threads so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--model", type=Path, help="the demo model by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=4, help="without and with the console (default: %(default)s)"
    )
    parser.add_argument("--out-tokens", type=int, default=160)
    parser.add_argument("--no-console", action="store_true", help="leave the console's part out")
    args = parser.parse_args(argv)
    model = str(args.model.resolve() if args.model else demo_model.path())
    options = ["--dtype", args.dtype, "--threads", str(args.threads)]
    with engine(model, *options) as ctl, Client(ctl) as client:
        client.subscribe(["step"])
        client.hello()
        client.wait_ready()
        load = Load(client, args.out_tokens)
        load.run(3)
        result: dict[str, float | int | str] = {"dtype": args.dtype, **shares(load.run(args.seconds))}
        if not args.no_console:
            result |= beside_console(load, ctl, args.pairs, args.seconds)
    for name, value in result.items():
        print(f"{name:40} {value:.2f}" if isinstance(value, float) else f"{name:40} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + os.linesep, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
