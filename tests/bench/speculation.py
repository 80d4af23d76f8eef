"""What speculation brings where text repeats, and what it costs where it does not.

``python -m tests.bench.speculation``. Each text is gone on with, with speculation off and on in turns (ABBA
pairs) in one running engine, with adaptive draft lengths. The ids must be the same both ways, or the run
fails. Times are the engine's own stamps: (last - first token) / (tokens - 1), so prompts and sockets are left
out.

Prose is sampled, as a small model that answers greedily soon repeats itself; with a seed the text is the same
both ways, too. It is drawn from the 40 likeliest tokens only: over a whole vocabulary the rounding of a step
with more tokens can push a draw across the border of two.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ipc import messages as m
from ipc.client import Client
from tests import demo_model
from tests.bench.engine_process import engine
from tests.bench.knob_report import machine, now
from tests.bench.knob_run import Session
from tests.bench.paired import abba, compare

GAIN = 1.6  # times faster where a text repeats, at least
LOSS = 1.03  # times slower where it does not, at most

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
    Text("prose 1", "The lighthouse stood at the end of the bay, and every evening its keeper", 128, False),
    Text("prose 2", "In the spring of 1912 the council of the small town decided that", 128, False),
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


def run_once(session: Session, text: Text, arm: Arm) -> None:
    """One answer."""
    sampling = m.Sampling(max_tokens=text.out, ignore_eos=True)
    if not text.repeats:
        sampling = msgspec.structs.replace(sampling, temperature=0.8, top_k=40, seed=12)
    command = session.client.build_submit(text.prompt, sampling=sampling)
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


def measure(session: Session, text: Text, pairs: int) -> dict[str, Arm]:
    """Both arms of a text."""
    arms = {"off": Arm(), "on": Arm()}
    run_once(session, text, Arm())
    for _, arm in abba(pairs):
        session.flip({"speculation": "ngram" if arm == "on" else "off"})
        run_once(session, text, arms[arm])
    return arms


def verdict(text: Text, arms: dict[str, Arm]) -> tuple[dict[str, Any], str]:
    """The figures of a text, and a line that says them."""
    off, on = arms["off"], arms["on"]
    times = compare("TPOT", "ms", "lower", off.tpot_ms, on.tpot_ms)
    of_medians = statistics.median(on.tpot_ms) / statistics.median(off.tpot_ms)
    same = all(ids == off.ids[0] for ids in [*off.ids, *on.ids])
    line = (
        f"{text.name:14} {statistics.median(off.tpot_ms):7.1f} {statistics.median(on.tpot_ms):7.1f} ms"
        f"   {1 / of_medians:5.2f} times as fast"
        f"   {'same text' if same else 'ANOTHER TEXT'}"
        f"   {on.accepted} of {on.drafted} drafted tokens held in {on.drafts} drafts"
    )
    if on.drafts:
        line += f", {1 + on.accepted / on.drafts:.2f} tokens a step with a draft"
    if on.why_not:
        line += f"\n{'':14} no drafts at the end: {on.why_not}"
    figures = {"text": asdict(text), "arms": {name: asdict(arm) for name, arm in arms.items()}, "same": same}
    figures |= {"on_by_off": of_medians, "low": times.low, "high": times.high}
    return figures, line


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """The median ratios of either kind of text beside what they should be."""
    lines = []
    for repeats, called in ((True, "text that repeats"), (False, "free prose")):
        ratios = [r["on_by_off"] for r in results if r["text"]["repeats"] == repeats]
        if not ratios:
            continue
        ratio = statistics.median(ratios)
        good = ratio <= 1 / GAIN if repeats else ratio <= LOSS
        wanted = f"at most {1 / GAIN if repeats else LOSS:.3f}"
        lines.append(f"{called}: TPOT on / off {ratio:.3f}, {wanted} wanted: {'met' if good else 'MISSED'}")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speculation", description=__doc__)
    parser.add_argument("--json", type=Path, help="where everything goes, raw")
    parser.add_argument("--pairs", type=int, default=3, help="ABBA pairs (default: %(default)s)")
    parser.add_argument("--spec-tokens", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model folder or a GGUF file; the demo model by default")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}; it must be at least 1")
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
        for text in TEXTS:
            figures, line = verdict(text, measure(session, text, args.pairs))
            results.append(figures)
            print(line, flush=True)
    print("\n" + "\n".join(summary(results)))
    if args.json:
        about = {"date": now(), "machine": machine(), "options": options, "spec_tokens": args.spec_tokens}
        args.json.write_text(json.dumps({**about, "results": results}))
    return 0 if all(result["same"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
