"""What happens where a kernel cannot be compiled, or does not fit into the card."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

import engine.kernels
from engine.kernels.launch import Launch, cdiv
from engine.kernels.rmsnorm import add_rmsnorm
from engine.ops import choice, triton_ops
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.driving import prompt
from tests.engine.kernels.support import interpreted_only

ERRORS = [
    OutOfResources(139520, 101376, "shared memory"),
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    FileNotFoundError("ptxas"),
]


class _Failing:
    """A kernel of which no launch comes about."""

    __name__ = "_add_rmsnorm"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, grid: tuple[int, ...]) -> _Failing:
        return self

    def __call__(self, **arguments: object) -> None:
        raise self._error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_stops_a_launch_names_the_kernel_and_its_sizes(error: Exception) -> None:
    x = torch.ones(3, 40)
    launch = replace(add_rmsnorm(None, x, torch.ones(40), 1e-5, x), kernel=_Failing(error))
    with pytest.raises(RuntimeError, match=r"kernel add_rmsnorm over \[3\] \(.*y \[3, 40\] float") as raised:
        launch.run()
    assert str(error) in str(raised.value)
    assert raised.value.__cause__ is error


def test_what_the_host_computes_of_a_launch_is_plain_python() -> None:
    """Triton's functions for kernels take longer on the host than a small kernel runs on a card."""
    assert [cdiv(a, 4) for a in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    for module in pkgutil.iter_modules(engine.kernels.__path__):
        source = Path(engine.kernels.__path__[0], f"{module.name}.py").read_text()
        for found in ast.walk(ast.parse(source)):
            if not isinstance(found, ast.FunctionDef) or any(map(_is_jit, found.decorator_list)):
                continue
            used = {ast.unparse(call.func) for call in ast.walk(found) if isinstance(call, ast.Call)}
            slow = {name for name in used if name.startswith(("triton.", "tl."))}
            assert not slow, f"{module.name}.{found.name}"


def _is_jit(decorator: ast.expr) -> bool:
    return "triton.jit" in ast.unparse(decorator)


@interpreted_only
def test_an_engine_survives_a_kernel_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end with the reason; with the knob off the next one is served."""
    monkeypatch.setattr(choice, "sources", lambda device: (triton_ops,))
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: run(replace(launch, kernel=_Failing(ERRORS[0]))))
    engine = Engine(load(tiny_folder("llama")), fused_norm=True)
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    failed = engine.submit(prompt(5), sampling)
    engine.run()
    assert engine.heard.done[failed].finish == "error"
    engine.set(fused_norm=False)
    served = engine.submit(prompt(5), sampling)
    engine.run()
    assert len(engine.ids(served)) == 2
