"""What speculation brings where text repeats, and what it costs where it does not.

``python -m tests.bench.speculation``. Texts are gone on with in one running engine, with speculation off and
on and with adaptive draft lengths. The ids must be the same both ways, or the run fails. Times are the
engine's own, so prompts and sockets are left out.

A text that repeats is gone on with off and on in turns (ABBA pairs); its time is (last - first token) /
(tokens - 1). In prose a few percent are to be seen, which shared machines drift by between two answers. So
speculation is flipped in the middle of an answer, which is written twice: off first and on first. Of these
four halves the geometric mean of each arm holds the same tokens in the same places, and drift leaves it be.

Prose is sampled, as a small model that answers greedily soon repeats itself; with a seed the text is the same
both ways, too. It is drawn from the 40 likeliest tokens only: over a whole vocabulary the rounding of a step
with more tokens can push a draw across the border of two.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ipc import messages as m
from ipc.client import Client
from tests import demo_model
from tests.bench.engine_process import engine
from tests.bench.knob_figures import steady
from tests.bench.knob_report import machine, now
from tests.bench.knob_run import Session
from tests.bench.paired import abba, compare, ratio_interval

GAIN = 1.6  # times faster where a text repeats, at least
LOSS = 1.03  # times slower where it does not, at most
HALF = 96  # tokens of prose between two flips
KIND = {"off": "off", "on": "ngram"}

CODE = '''def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    return 2 * (width + height)


def diagonal(width, height):
    """Return the diagonal of a rectangle."""
    return (width ** 2 + height ** 2) ** 0.5


'''
GOODS = "".join(
    f"name: {name}, colour: {colour}, price: {price}\n"
    for name, colour, price in (
        ("apple", "red", 3), ("banana", "yellow", 1), ("cherry", "dark red", 9), ("grape", "green", 5),
        ("melon", "pale green", 7),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """What is gone on with, ``out`` tokens far. ``repeats``: the prompt holds what is to be written."""

    name: str
    prompt: str
    out: int
    repeats: bool


TEXTS = (
    Text("code editing", f"# Before\n{CODE}# After\n{CODE[:70]}", 96, True),
    Text("extraction", f"{GOODS}\nThe list once more:\n{GOODS[:34]}", 80, True),
    Text(
        "prose 1", "The lighthouse stood at the end of the bay, and every evening its keeper", 2 * HALF, False
    ),
    Text("prose 2", "In the spring of 1912 the council of the small town decided that", 2 * HALF, False),
)


@dataclass(slots=True)
class Arm:
    """The runs of one text with one setting, in the order of the pairs."""

    tpot_ms: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    why_not: str = ""  # what the engine says after the last run

    def add(self, half: Half) -> None:
        """Count the drafts of half an answer."""
        self.drafted += half.drafted
        self.accepted += half.accepted
        self.drafts += half.drafts


@dataclass(frozen=True, slots=True)
class Half:
    """Half an answer of prose: milliseconds for each token, and what became of drafts."""

    tpot_ms: float
    drafted: int
    accepted: int
    drafts: int

    @classmethod
    def of(cls, steps: Sequence[m.StepRow]) -> Half:
        """From the step rows of one request with one configuration."""
        times = steady(steps)
        tokens = sum(row.output_tok for row, _ in times)
        if not tokens:
            raise RuntimeError(f"{len(steps)} steps of half an answer, none of which can be timed")
        return cls(
            sum(ms for _, ms in times) / tokens,
            sum(row.drafted_tok for row in steps),
            sum(row.accepted_tok for row in steps),
            sum(row.draft_reqs for row in steps),
        )


def run_once(session: Session, text: Text, arm: Arm) -> None:
    """One answer."""
    command = session.client.build_submit(
        text.prompt, sampling=m.Sampling(max_tokens=text.out, ignore_eos=True)
    )
    ids, _, done = session.client.submit_command(command).result()
    row = done.row
    if row.first_ns is None or row.last_ns is None or len(ids) != text.out:
        raise RuntimeError(f"{text.name}: {len(ids)} tokens instead of {text.out}; {done.message}")
    arm.ids.append(ids)
    arm.tpot_ms.append((row.last_ns - row.first_ns) / (len(ids) - 1) / 1e6)
    arm.drafted += row.drafted_tok
    arm.accepted += row.accepted_tok
    arm.drafts += row.drafts_n
    arm.why_not = session.client.snapshot().state.speculation


def run_halves(session: Session, text: Text, seed: int, order: Sequence[str]) -> tuple[list[int], list[Half]]:
    """One answer of prose, whose first and second half are written in the arms of ``order``."""
    client = session.client
    session.flip({"speculation": KIND[order[0]]})
    revs = [client.config().rev]
    session.begin()
    sampling = m.Sampling(max_tokens=text.out, ignore_eos=True, temperature=0.8, top_k=40, seed=seed)
    ids: list[int] = []
    for item in client.submit_command(client.build_submit(text.prompt, sampling=sampling)):
        ids += item.ids or []
        if len(revs) == 1 and len(ids) >= HALF:
            session.flip({"speculation": KIND[order[1]]})
            revs.append(client.config().rev)
    if len(ids) != text.out:
        raise RuntimeError(f"{text.name}: {len(ids)} tokens instead of {text.out}")
    steps = session.steps()
    return ids, [Half.of([row for row in steps if row.cfg_rev == rev]) for rev in revs]


def measure(session: Session, text: Text, pairs: int) -> dict[str, Arm]:
    """Both arms of a text that repeats."""
    arms = {"off": Arm(), "on": Arm()}
    run_once(session, text, Arm())
    for _, arm in abba(pairs):
        session.flip({"speculation": KIND[arm]})
        run_once(session, text, arms[arm])
    return arms


def measure_halves(session: Session, text: Text, pairs: int) -> dict[str, Arm]:
    """Both arms of a text of prose, each pair from two answers with another seed."""
    arms = {"off": Arm(), "on": Arm()}
    for pair in range(pairs):
        times: dict[str, list[float]] = {"off": [], "on": []}
        orders = (("off", "on"), ("on", "off"))
        for order in orders if pair % 2 == 0 else orders[::-1]:
            ids, halves = run_halves(session, text, 12 + pair, order)
            arms[order[0]].ids.append(ids)
            for name, half in zip(order, halves, strict=True):
                times[name].append(half.tpot_ms)
                arms[name].add(half)
        for name, (first, second) in times.items():
            arms[name].tpot_ms.append(math.sqrt(first * second))
    return arms


def verdict(text: Text, arms: dict[str, Arm]) -> tuple[dict[str, Any], str]:
    """The figures of a text, and a line that says them."""
    off, on = arms["off"], arms["on"]
    times = compare("TPOT", "ms", "lower", off.tpot_ms, on.tpot_ms)
    same = off.ids == on.ids
    line = (
        f"{text.name:14} {statistics.median(off.tpot_ms):7.1f} {statistics.median(on.tpot_ms):7.1f} ms"
        f"   on / off {interval(times.ratio, times.low, times.high)}"
        f"   {'same text' if same else 'ANOTHER TEXT'}"
        f"   {on.accepted} of {on.drafted} drafted tokens held in {on.drafts} drafts"
    )
    if on.drafts:
        line += f", {1 + on.accepted / on.drafts:.2f} tokens a step with a draft"
    if on.why_not:
        line += f"\n{'':14} no drafts at the end: {on.why_not}"
    figures = {"text": asdict(text), "arms": {name: asdict(arm) for name, arm in arms.items()}, "same": same}
    figures |= {"on_by_off": times.ratio, "low": times.low, "high": times.high}
    return figures, line


def interval(ratio: float | None, low: float | None, high: float | None) -> str:
    """A ratio and its interval, where it has one."""
    if ratio is None:
        return "-"
    return f"{ratio:.3f}" if low is None or high is None else f"{ratio:.3f} [{low:.3f} {high:.3f}]"


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """The ratio over all pairs of either kind of text beside what it should be."""
    lines = []
    for repeats, called in ((True, "text that repeats"), (False, "free prose")):
        arms = [r["arms"] for r in results if r["text"]["repeats"] == repeats]
        if not arms:
            continue
        off, on = ([ms for arm in arms for ms in arm[name]["tpot_ms"]] for name in ("off", "on"))
        ratio, low, high = ratio_interval(off, on)
        most = 1 / GAIN if repeats else LOSS
        proven = high is not None and high <= most
        word = "met" if proven else "not shown" if ratio <= most else "MISSED"
        lines.append(
            f"{called}: TPOT on / off {interval(ratio, low, high)}, at most {most:.3f} wanted: {word}"
        )
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speculation", description=__doc__)
    parser.add_argument("--json", type=Path, help="where everything goes, raw")
    parser.add_argument("--pairs", type=int, default=5, help="of each text (default: %(default)s)")
    parser.add_argument("--only", default="", help="texts, comma separated (default: all)")
    parser.add_argument("--spec-tokens", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model folder or a GGUF file; the demo model by default")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}; it must be at least 1")
    names = [text.name for text in TEXTS]
    args.texts = [text for text in TEXTS if not args.only or text.name in args.only.split(",")]
    if unknown := set(filter(None, args.only.split(","))) - set(names):
        parser.error(f"unknown texts: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    model = str(args.model.resolve() if args.model else demo_model.path())
    options = ["--dtype", args.dtype, "--device", args.device, "--threads", str(args.threads)]
    results = []
    with engine(model, *options) as ctl, Client(ctl, silence_s=60.0) as client:
        session = Session(client)
        session.flip({"spec_tokens": args.spec_tokens, "prefix_cache": False})
        print(f"{'':14} {'off':>7} {'on':>7}", flush=True)
        for text in args.texts:
            arms = (measure if text.repeats else measure_halves)(session, text, args.pairs)
            figures, line = verdict(text, arms)
            results.append(figures)
            print(line, flush=True)
    print("\n" + "\n".join(summary(results)))
    if args.json:
        about = {"date": now(), "machine": machine(), "options": options, "spec_tokens": args.spec_tokens}
        args.json.write_text(json.dumps({**about, "results": results}))
    return 0 if all(result["same"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
