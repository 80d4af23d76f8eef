"""Compiles kernels for GPUs that are not here, and reads what the compiler made of them.

``python -m tests.engine.kernels.aot [--arch 80 90] [--only NAME] [--json]`` compiles the launches of
`tests.engine.kernels.launches` and prints a table: registers and bytes of stack a thread (stack is where
registers are spilled to), shared memory, tensor-core instructions, and loads of 128 bits, and those in loops.
Needs a process of its own, for kernels either run in the interpreter or are compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import native_specialize_impl

from engine.kernels.launch import Launch
from tests.engine.kernels.launches import launches

ARCHS = (80, 89, 90)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NATIVE_FP8_FROM = 89
MIN_LOOP = 200  # characters of listing: a program ends in a jump to itself


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one architecture."""

    name: str
    arch: int
    registers: int
    stack: int
    shared: int
    tensor_core: str  # the instruction, "" for none
    wide_loads: int  # instructions that load 128 bits from global memory
    wide_in_loops: int  # of them, those that are run again and again
    squares: str  # how a norm adds them up, "" for what is none: equal words are equal sums
    seconds: float


def compile_for(name: str, launch: Launch, arch: int) -> Compiled:
    """Compile a launch as a GPU of compute capability ``arch`` / 10 would when it runs."""
    start = time.perf_counter()
    constants = dict(launch.constants)
    if "NATIVE" in constants:
        constants["NATIVE"] = arch if arch >= NATIVE_FP8_FROM else 0
    target = GPUTarget("cuda", arch, 32)
    source = _source(replace(launch, constants=constants))
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    kernel = triton.compile(source, target=target, options=options)
    sass = _tool("nvdisasm", kernel.asm["cubin"], "-c")
    usage = _tool("cuobjdump", kernel.asm["cubin"], "--dump-resource-usage")
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    loops = _loops(sass)
    tensor_core = re.search(r"\b(HGMMA|QGMMA|HMMA|IMMA|DMMA)\b", sass)
    return Compiled(
        name=name,
        arch=arch,
        registers=found["REG"],
        stack=found["STACK"] + found["LOCAL"],
        shared=kernel.metadata.shared,
        tensor_core=tensor_core.group(1) if tensor_core else "",
        wide_loads=len(_wide_loads(sass)),
        wide_in_loops=sum(any(low < at < high for low, high in loops) for at in _wide_loads(sass)),
        squares=_squares(kernel.asm["ttgir"], sass),
        seconds=time.perf_counter() - start,
    )


def _wide_loads(sass: str) -> list[int]:
    """Where in the code 128 bits are loaded from global memory at once."""
    return [found.start() for found in re.finditer(r"\b(?:LDG|LDGSTS)\S*\.128\b|\bUTMALDG", sass)]


def _squares(ttgir: str, sass: str) -> str:
    """How numbers lie in threads where they are added up, and the instructions before the sum's root."""
    before, root, _ = sass.partition("MUFU.RSQ")
    added = re.search(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", ttgir)
    if not root or added is None:
        return ""
    spread = re.search(rf"^{added.group(1)} = (.*)$", ttgir, re.MULTILINE)
    used = Counter(re.findall(r"\b(FADD|FFMA|FMUL|SHFL)\b", before))
    return f"{spread and spread.group(1)} {sorted(used.items())}"


def _loops(sass: str) -> list[tuple[int, int]]:
    """From where to where a jump goes back."""
    labels = {found.group(1): found.start() for found in re.finditer(r"^(\.L_\S+):", sass, re.MULTILINE)}
    jumps = re.finditer(r"\bBRA\b[^;]*`\((\.L_\S+?)\)", sass)
    found = [(labels[jump.group(1)], jump.start()) for jump in jumps]
    return [(low, high) for low, high in found if low < high - MIN_LOOP]


def _compile_named(name: str, arch: int) -> Compiled:
    launch = next(case.launch for case in launches(arch) if case.name == name)
    return compile_for(name, launch, arch)


def _source(launch: Launch) -> ASTSource:
    """What Triton's own launcher would compile for these arguments: types, alignments, ones and Nones."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for i, (name, kind, spec) in enumerate(specialized(launch)):
        signature[name] = kind
        if kind == "constexpr":
            constants[(i,)] = spec
        elif spec:
            attributes[(i,)] = CUDABackend.parse_attr(spec)
    return ASTSource(launch.kernel, signature, constants, attributes)


def specialized(launch: Launch) -> list[tuple[str, str, Any]]:
    """Each parameter's name and type, and what is compiled in: a constant's value, else its alignment."""
    out: list[tuple[str, str, Any]] = []
    for param in launch.kernel.params:
        if param.is_constexpr:
            out.append((param.name, "constexpr", launch.constants[param.name]))
            continue
        value = launch.arguments[param.name]
        kind, spec = native_specialize_impl(
            CUDABackend,
            value,
            param.is_const,
            not param.do_not_specialize,
            not param.do_not_specialize_on_alignment,
        )
        out.append((param.name, kind, value if kind == "constexpr" else spec))
    return out


def _tool(name: str, cubin: bytes, *args: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([TOOLS / name, *args, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


def table(rows: list[Compiled]) -> str:
    """The rows as aligned text."""
    head = f"{'kernel':44} sm  regs stack  shared  tensor  128-bit  in loops  s"
    lines = [
        f"{r.name:44} {r.arch} {r.registers:5} {r.stack:5} {r.shared:7}  {r.tensor_core or '-':6} "
        f"{r.wide_loads:7} {r.wide_in_loops:9} {r.seconds:5.1f}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all", action="store_true", help="every shape for every architecture")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    wanted = [
        (case.name, arch)
        for arch in options.arch
        for case in launches(arch)
        if options.only in case.name and (options.all or arch in case.archs)
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(_compile_named, *zip(*wanted, strict=True))) if wanted else []
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
