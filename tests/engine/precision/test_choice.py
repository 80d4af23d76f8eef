"""Which form serves how many rows: what the measured times lead to, and the layer that follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.layers.precision import (
    KINDS,
    Kind,
    PrecisionChoice,
    QuantizedLinear,
    choice,
    choose_precision,
    precision_forms,
    quantize,
    usable_forms,
)
from engine.layers.precision.measuring import PROBE_ROWS

CPU = torch.device("cpu")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def with_times(monkeypatch: pytest.MonkeyPatch, **seconds: tuple[float, ...]) -> None:
    def measured(
        forms: list[choice.PrecisionForm], *_: object
    ) -> dict[choice.PrecisionForm, dict[int, float]]:
        never = (99.0,) * len(PROBE_ROWS)
        return {
            f: dict(zip(PROBE_ROWS, seconds.get(f.name.replace("-", "_"), never), strict=True)) for f in forms
        }

    monkeypatch.setattr(choice, "measure", measured)


def chosen(kind: Kind, **flags: bool) -> str:
    return choose_precision(kind, [quantize(normal(64, 64), kind)], CPU, **flags).name


def test_few_rows_and_many_rows_get_what_is_fastest_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, int4pack=(1, 2, 3, 30, 99), dequant_fp32gemm=(5, 5, 5, 6, 7))
    assert chosen("int4") == "int4:int4pack:1+dequant-fp32gemm:17"
    with_times(monkeypatch, int4pack=(1, 1, 1, 1, 1), dequant_fp32gemm=(5, 5, 5, 6, 7))
    assert chosen("int4") == "int4:int4pack"


def test_a_gain_within_the_noise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, int4pack=(4.6, 9, 9, 9, 9), dequant_fp32gemm=(5, 5, 5, 5, 5))
    assert chosen("int4") == "int4:dequant-fp32gemm"


def test_the_native_form_serves_every_number_of_rows_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held twice: what it loses for many rows is held against what it gains for few."""
    with_times(monkeypatch, native=(1, 1, 2, 6, 9), dequant_fp32gemm=(5, 5, 5, 5, 5))
    assert chosen("int4") == "int4:native"
    with_times(
        monkeypatch, native=(4, 5, 6, 9, 9), int4pack=(2, 9, 9, 9, 9), dequant_fp32gemm=(5, 5, 5, 5, 5)
    )
    assert chosen("int4") == "int4:int4pack:1+dequant-fp32gemm:2"


def test_a_second_copy_needs_a_clear_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {form.name: form for form in precision_forms("int4", CPU)}
    two = [forms["int4pack"], forms["codes-fp32gemm"]]
    monkeypatch.setattr(choice, "usable_forms", lambda *_, **__: two)
    with_times(monkeypatch, int4pack=(4.0, 5.0, 99.0, 99.0, 99.0), codes_fp32gemm=(5, 5, 5, 5, 5))
    assert chosen("int4") == "int4:codes-fp32gemm"
    with_times(monkeypatch, int4pack=(3.0, 5.0, 99.0, 99.0, 99.0), codes_fp32gemm=(5, 5, 5, 5, 5))
    assert chosen("int4") == "int4:int4pack:1+codes-fp32gemm:2"


def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms as a card has them: two that share a layout, and two with one of their own."""
    form = precision_forms("int4", CPU)[0]
    made = [
        replace(form, name=name, layout=layout)
        for name, layout in (("a", "plain"), ("b", "tiles"), ("c", "rows"), ("c-wide", "rows"))
    ]
    monkeypatch.setattr(choice, "usable_forms", lambda *_, **__: made)


def test_a_layout_is_held_against_all_that_is_held_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not against what serves many rows: another form of its layout may be as fast for few."""
    four(monkeypatch)
    many = (55, 55, 55, 55, 45)
    with_times(monkeypatch, a=(90,) * 5, b=(10, 20, 60, 200, 800), c=(10.1, 16, 18, 30, 200), c_wide=many)
    assert chosen("int4") == "int4:c:1+c-wide:65"
    with_times(monkeypatch, a=(90,) * 5, b=(7, 20, 60, 200, 800), c=(10.1, 16, 18, 30, 200), c_wide=many)
    assert chosen("int4") == "int4:b:1+c:2+c-wide:65"


def test_no_layout_is_kept_that_others_have_made_needless(monkeypatch: pytest.MonkeyPatch) -> None:
    """``a`` alone is best for many rows, by less than a copy must gain over what few rows need anyway."""
    four(monkeypatch)
    with_times(
        monkeypatch,
        a=(50, 50, 50, 50, 40),
        b=(10, 20, 60, 200, 800),
        c=(15, 16, 18, 30, 200),
        c_wide=(55, 55, 55, 55, 45),
    )
    assert chosen("int4") == "int4:b:1+c:2+c-wide:65"


def test_a_form_that_was_not_measured_to_the_end_serves_what_no_other_does_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four(monkeypatch)
    inf = float("inf")
    with_times(monkeypatch, a=(9, 9, inf, inf, inf), b=(8, 8, 8, inf, inf), c=(9, 9, 9, 9, inf),
               c_wide=(20, 20, 20, 20, 20))  # fmt: skip
    assert chosen("int4") == "int4:c:1+c-wide:65"


def test_forms_that_quantize_activations_never_mix_with_those_that_do_not() -> None:
    for kind in KINDS:
        sample = [quantize(normal(64, 64), kind)]
        plain = usable_forms(kind, sample, CPU)
        dynamic = usable_forms(kind, sample, CPU, dynamic=True)
        assert plain
        assert {form.activations for form in plain} <= {"kept", "bfloat16"}
        assert {form.activations for form in dynamic} <= {"fp8"}
    with pytest.raises(ValueError, match="no form computes int4 weights with quantized activations on cpu"):
        choose_precision("int4", [quantize(normal(64, 64), "int4")], CPU, dynamic=True)


def test_that_no_form_fits_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as fp8 on a card without fp8 arithmetic: the one form was refused when it was tried."""
    monkeypatch.setattr(choice, "precision_forms", lambda *_: precision_forms("fp8", CPU)[:1])
    monkeypatch.setattr(choice, "refused_forms", lambda *_: {"scaled_mm": "it does not run here: needs 8.9"})
    with pytest.raises(
        ValueError, match=r"scaled_mm: it does not run here: needs 8\.9; reference: its activ"
    ):
        choose_precision("fp8", [quantize(normal(64, 64), "fp8")], CPU, dynamic=True)


def test_exact_forms_compute_the_dequantized_weight_in_float32() -> None:
    for kind in KINDS:
        weight = quantize(normal(64, 64), kind)
        for form in usable_forms(kind, [weight], CPU, exact=True):
            assert form.activations == "kept"
            x = normal(5, 64)
            got = form.build(weight, None, torch.float32)(x)
            torch.testing.assert_close(got, x @ weight.dequantize().t(), rtol=1e-4, atol=1e-4)
        assert not {form.name for form in usable_forms(kind, [weight], CPU)} & {"codes-fp32gemm", "reference"}


def test_what_is_not_timed_takes_the_first_form() -> None:
    sample = quantize(normal(64, 64), "int8")
    found = choose_precision("int8", [sample], CPU, exact=True, timed=False)
    assert found.name == "int8:dequant-fp32gemm"


def test_a_form_must_be_able_to_serve_every_sample() -> None:
    samples = [quantize(normal(64, 64), "int4"), quantize(normal(64, 36), "int4")]
    assert "int4pack" in {form.name for form in usable_forms("int4", samples[:1], CPU)}
    assert "int4pack" not in {form.name for form in usable_forms("int4", samples, CPU)}


def test_samples_must_be_of_the_kind() -> None:
    for samples in ([], [quantize(normal(64, 64), "int8")]):
        with pytest.raises(ValueError, match="all of them int4"):
            choose_precision("int4", samples, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_ends_in_a_choice_that_computes_the_product(kind: Kind) -> None:
    weight = quantize(normal(96, 64), kind)
    found = choose_precision(kind, [weight], CPU)
    assert found.name.startswith(f"{kind}:")
    assert found.from_rows[0] == 1
    layer = QuantizedLinear(weight, None, found)
    for rows in (0, 1, 5, 70, 300):
        x = normal(rows, 64)
        torch.testing.assert_close(layer(x), x @ weight.dequantize().t(), rtol=0.02, atol=0.2)


def test_a_layer_runs_the_form_of_its_number_of_rows_and_holds_each_tensor_once() -> None:
    weight = quantize(normal(64, 128), "int8")
    forms = {form.name: form for form in precision_forms("int8", CPU)}
    few, many = forms["int8pack"], forms["dequant-fp32gemm"]
    both = PrecisionChoice((1, 5), (few, many), "int8")
    assert both.name == "int8:int8pack:1+dequant-fp32gemm:5"
    layer = QuantizedLinear(weight, None, both)
    for rows, form in ((1, few), (4, few), (5, many), (9, many)):
        x = normal(rows, 128)
        assert both.form_for(rows) is form
        assert torch.equal(layer(x), form.build(weight, None, torch.float32)(x))
    alone = QuantizedLinear(weight, None, PrecisionChoice((1,), (few,), "int8"))
    assert layer.nbytes == alone.nbytes
    assert alone.nbytes == pytest.approx(64 * 128, rel=0.06)
    weight = quantize(normal(64, 128), "int4")
    forms = {form.name: form for form in precision_forms("int4", CPU)}
    two = forms["int4pack"], forms["codes-fp32gemm"]
    both = QuantizedLinear(weight, None, PrecisionChoice((1, 5), two, "int4"))
    each = [QuantizedLinear(weight, None, PrecisionChoice((1,), (form,), "int4")) for form in two]
    assert both.nbytes == sum(layer.nbytes for layer in each)
