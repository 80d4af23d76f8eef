"""Each kernel against its float64 reference, and what must hold to the last bit.

To the last bit: twice the same; replayed from a graph the same as launched one by one; and a row the same
whatever stands beside it, where the kernel promises that.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.kernels.paged_attention import tiles_for
from engine.kernels.rmsnorm import add_rmsnorm
from tests.engine.kernels.support import poisoned, randn
from tests.engine.kernels.test_paged_attention import step
from tests.gpu.check import backends
from tests.gpu.check.case import BF16, TINY, Case, Outputs, Sizes
from tests.gpu.check.cases import cases
from tests.gpu.check.cases_layers import attend, hopper
from tests.gpu.check.cases_sampling import draws, run_sample
from tests.gpu.check.context import Context


def sizes(context: Context) -> Sizes:
    return TINY if context.settings.tiny else Sizes()


def run(context: Context) -> dict[str, Any]:
    """How far each is off, and under ``failed`` what is wrong with the others. AssertionError if all are."""
    s = sizes(context)
    graph = "equal bits" if context.timer.on_card else "no CUDA"
    found = context.begin(off={}, failed={}, graph=graph)
    checks: dict[str, Callable[[], float]] = {
        name: (lambda make=make: _hold(context, make()))
        for name, make in cases(s).items()  # type: ignore[misc]
    }
    checks |= {name: (lambda check=check: check(s)) for name, check in INVARIANT.items()}  # type: ignore[misc]
    for name, check in checks.items():
        try:
            found["off"][name] = check()
        except Exception as error:  # the other kernels are still worth knowing about
            last = traceback.format_exception_only(error)[-1].strip()
            found["failed"][name] = last[:500]
        context.timer.free()
    found["attention"] = backends.run(context)
    wrong = {f"attention={k}": v["failed"] for k, v in found["attention"].items() if "failed" in v}
    found["failed"] |= wrong
    if not found["off"]:
        raise AssertionError(f"no kernel is right: {found['failed']}")
    return found


def _hold(context: Context, case: Case) -> float:
    """Run a case as often as it takes to compare bits."""
    first = case.run()
    off = case.check(first)
    if context.settings.tiny:
        return off
    _equal(case.run(), first, "a second run")
    if context.timer.on_card:
        held: list[Outputs] = []
        graph = context.timer.captured(lambda: held.append(case.run()), warm=(case.run,))
        graph.replay()
        context.timer.synchronize()
        _equal(held[-1], first, "a replay from a graph")
    return off


def _equal(got: Outputs, want: Outputs, what: str) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        same = torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # bits, for NaN is not equal to itself
        assert same, f"{what} differs in output {index}"


def _norm_alone(s: Sizes) -> float:
    """A row of a norm beside others and by itself."""
    x, weight = randn(5, s.hidden, dtype=BF16), randn(s.hidden, dtype=BF16, seed=1)

    def norm(rows: Tensor) -> Tensor:
        y = poisoned(*rows.shape, dtype=BF16)
        add_rmsnorm(None, rows.contiguous(), weight, 1e-5, y).run()
        return y

    assert torch.equal(norm(x)[2:3], norm(x[2:3])), "a row depends on its neighbours"
    return 0.0


def _attention_alone(s: Sizes) -> float:
    """A row of a decode step beside others and by itself, both with the same size of parts."""
    rows: Sequence[tuple[int, int]] = [(1, s.context), (1, s.context // 2), (1, s.block)]
    x = step(rows, s.heads, s.kv_heads, s.dim, s.block, dtype=BF16)
    tiles = tiles_for(s.heads // s.kv_heads, s.dim, 1, 2, hopper=hopper())
    together = attend(x, tiles, splits=4)()[0]
    x.rows, x.q, x.tables = rows[1:2], x.q[1:2], x.tables[1:2]
    alone = attend(x, tiles, splits=4)()[0]
    assert torch.equal(alone, together[1:2]), "a row depends on its neighbours"
    return 0.0


def _sample_alone(s: Sizes) -> float:
    """A drawn token beside others and by itself."""
    d = draws(s.nucleus)

    def ids(rows: slice) -> list[int]:
        some = d.only(rows)
        out = poisoned(len(some.logits), dtype=torch.int64)
        run_sample(some, out)
        found: list[int] = out.tolist()
        return found

    assert ids(slice(3, 4)) == ids(slice(None))[3:4], "a token depends on the batch"
    return 0.0


INVARIANT: dict[str, Callable[[Sizes], float]] = {
    "a row alone: add_rmsnorm": _norm_alone,
    "a row alone: attention": _attention_alone,
    "a row alone: sample": _sample_alone,
}
