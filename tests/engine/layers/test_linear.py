"""Linear layers: every form of a weight computes the same product, and the choice follows its rules."""

from __future__ import annotations

import pytest
import torch

from engine.layers import linear
from engine.layers.linear import Choice, Form, Linear, candidates, choose, plain_choice

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_form_computes_the_product(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 36, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype) if with_bias else None
    for form in candidates(dtype, CPU):
        for rows in (1, 2, 7, 40, 300):
            x = torch.randn(rows, 36, generator=generator)
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            got = Linear(weight, bias, Choice((1,), (form,)))(x)
            assert got.dtype == torch.float32
            half = Linear(weight, bias, Choice((1,), (form,)), torch.bfloat16)(x.bfloat16())
            assert half.dtype == torch.bfloat16
            bound = 1e-5 if form.weight_dtype == torch.float32 else 0.02
            torch.testing.assert_close(got.double(), exact, rtol=bound, atol=bound * 10)


def test_rows_select_the_form() -> None:
    a, b = (Form(n, torch.float32, "dense") for n in ("a", "b"))
    choice = Choice((1, 5), (a, b))
    assert [choice.form_for(rows).name for rows in (0, 1, 4, 5, 900)] == ["a", "a", "a", "b", "b"]
    assert choice.name == "a:1+b:5"
    assert Choice((1,), (a,)).name == "a"
    layer = Linear(torch.ones(3, 2), None, choice)
    assert layer.nbytes == 2 * 3 * 2 * 4  # both forms are held
    assert [layer(torch.ones(rows, 2)).shape for rows in (0, 1, 9)] == [(0, 3), (1, 3), (9, 3)]


def _times(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, tuple[float, float, float, float]]) -> None:
    def measured(forms: list[Form], _: object) -> dict[Form, dict[int, float]]:
        return {f: dict(zip(linear.PROBE_ROWS, seconds[f.name], strict=True)) for f in forms}

    monkeypatch.setattr(linear, "_measure", measured)


def _names(dtype: torch.dtype) -> tuple[str, str]:
    """The weight as loaded, and the one form that holds something else in its place, or more of it."""
    forms = [form for form in candidates(dtype, CPU) if form.layout != "native"]
    return forms[0].name, forms[-1].name


def _seconds(
    dtype: torch.dtype, **by_name: tuple[float, float, float, float]
) -> dict[str, tuple[float, ...]]:
    return {form.name: (9.0, 9.0, 9.0, 9.0) for form in candidates(dtype, CPU)} | by_name


def test_one_row_and_many_rows_get_the_form_that_is_fastest_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wide = _names(torch.bfloat16)
    table = _seconds(torch.bfloat16) | {plain: (1, 5, 9, 9), wide: (2, 2, 2, 2)}
    _times(monkeypatch, table)  # type: ignore[arg-type]
    weights = [torch.ones(8, 8, dtype=torch.bfloat16)]
    choice = choose(weights, total_elements=64, device=CPU, free_bytes=1 << 30)
    assert choice.name == f"{plain}:1+{wide}:2"
    assert choice.computes_in == torch.float32


def test_a_second_form_needs_memory_and_a_clear_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wide = _names(torch.bfloat16)
    weights = [torch.ones(8, 8, dtype=torch.bfloat16)]
    table = _seconds(torch.bfloat16) | {plain: (1, 5, 9, 9), wide: (2, 2, 2, 2)}
    _times(monkeypatch, table)  # type: ignore[arg-type]
    tight = choose(weights, total_elements=1000, device=CPU, free_bytes=7999)
    assert wide not in tight.name  # 4,000 bytes are more than half of what is free
    table = _seconds(torch.bfloat16) | {plain: (1.95, 5, 9, 9), wide: (2, 2, 2, 2)}
    _times(monkeypatch, table)  # type: ignore[arg-type]
    assert choose(weights, total_elements=1000, device=CPU, free_bytes=1 << 30).name == wide


def test_of_two_that_are_about_as_fast_the_smaller_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wide = _names(torch.bfloat16)
    weights = [torch.ones(8, 8, dtype=torch.bfloat16)]
    for slower, chosen in ((2.35, plain), (3.0, wide)):
        _times(monkeypatch, _seconds(torch.bfloat16) | {plain: (2, 2, 2, slower), wide: (2, 2, 2, 1.8)})  # type: ignore[arg-type]
        assert choose(weights, total_elements=64, device=CPU, free_bytes=1 << 30).name == chosen


def test_measuring_ends_in_a_usable_choice_and_takes_every_candidate() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(64, 48, generator=generator).to(dtype)]
        choice = choose(weights, total_elements=64 * 48, device=CPU)
        assert set(choice.forms) <= set(candidates(dtype, CPU))
        x = torch.randn(5, 48, generator=generator)
        want = x @ weights[0].float().T
        torch.testing.assert_close(Linear(weights[0], None, choice)(x), want, rtol=0.02, atol=0.2)


def test_the_plain_choice_is_the_weight_as_loaded() -> None:
    assert plain_choice(torch.bfloat16).name == "bf16"
    assert plain_choice(torch.float32).name == "fp32"
    assert [f.name for f in candidates(torch.bfloat16, torch.device("cuda"))] == ["bf16"]
