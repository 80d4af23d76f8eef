"""Every kernel compiled for sm_80, sm_89 and sm_90, which needs no GPU.

Each in one case at least for each of them; DECODECK_KERNEL_SHAPES=all asks for every case on all of them.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from triton.runtime.jit import KernelInterface

import engine.kernels
from tests.conftest import COMPILED
from tests.engine.kernels.conftest import SWITCH
from tests.engine.kernels.launches import EVERY, Case, launches
from tests.engine.kernels.support import ALL_SHAPES

ROOT = Path(__file__).resolve().parents[3]
TRIAL = {"_write"}  # what tries whether kernels run at all, whichever the card
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes a block may have (CUDA C++ guide)


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[tuple[str, int], dict[str, object]]:
    """What each case became, by name and architecture. Compiled in a process that does not interpret."""
    env = {key: value for key, value in os.environ.items() if key != SWITCH}
    env["PYTHONPATH"] = str(ROOT)
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.engine.kernels.aot", "--json", *(["--all"] * ALL_SHAPES)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = pytestconfig.stash[COMPILED] = json.loads(done.stdout)
    return {(row["name"], row["arch"]): row for row in rows}


def test_no_kernel_is_left_out() -> None:
    """Of the modules of kernels, whichever they are: each that is launched, for each architecture."""
    compiled = defaultdict(set)
    for case in launches():
        compiled[case.launch.kernel.__name__].update(case.archs)
    there, called = set[str](), set[str]()  # the latter by other kernels, and compiled with them
    for module in pkgutil.iter_modules(engine.kernels.__path__):
        made = vars(importlib.import_module(f"engine.kernels.{module.name}"))
        source = Path(str(made["__file__"])).read_text()
        for name, each in made.items():
            if isinstance(each, KernelInterface):
                there.add(each.__name__)
                if re.search(rf"(?<!def )(?<!\w){name}\(", source):
                    called.add(each.__name__)
    assert {name: set(EVERY) for name in there - called - TRIAL} == compiled


@pytest.mark.parametrize(
    "case", [case for case in launches() if case.archs or ALL_SHAPES], ids=lambda case: case.name
)
def test_a_kernel_spills_nothing_and_uses_what_the_card_has(
    case: Case, compiled: dict[tuple[str, int], dict[str, object]]
) -> None:
    for arch in (80, 89, 90) if ALL_SHAPES else case.archs:
        row = compiled[case.name, arch]
        assert row["stack"] == 0, "registers are spilled"
        assert int(str(row["shared"])) <= SHARED_LIMIT[arch]
        wide = row["wide_in_loops" if case.has_dot else "wide_loads"]
        assert wide or not case.wide_loads, "what is read again and again is not loaded 128 bits at a time"
        assert bool(row["tensor_core"]) == case.has_dot
        if case.has_dot and arch == 90 and case.launch.constants["BLOCK_M"] >= 64:
            assert row["tensor_core"] == "HGMMA", "tiles that a warp group multiplies are left to warps"


@pytest.mark.parametrize("model", ["8b", "0.5b"])
def test_a_norm_is_the_same_sum_whether_it_quantizes_or_not(
    model: str, compiled: dict[tuple[str, int], dict[str, object]]
) -> None:
    """Else what it quantizes would not be, to the last bit, what it writes for others to quantize: in which
    order a compiler adds numbers up follows from how they lie in threads, and that from what is stored."""
    quantizing, plain = (compiled[f"add_rmsnorm {kind} {model}", 90]["squares"] for kind in ("e4m3", "bf16"))
    assert "FFMA" in str(plain)
    assert "sizePerThread = [8]" in str(plain)
    assert quantizing == plain
