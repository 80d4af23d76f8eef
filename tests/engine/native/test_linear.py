"""The compiled product against float64, and what its caller is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.native import Kernels, kernels, panels, unavailable

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def native() -> Kernels:
    found = kernels()
    assert found is not None, unavailable()
    return found


def made(out: int, cols: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out * 7919 + cols * 31 + rows)
    weight = torch.randn(out, cols, generator=generator).to(dtype)
    return weight, torch.randn(out, generator=generator), torch.randn(rows, cols, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "cols"), [(1, 1), (15, 7), (16, 64), (33, 1025), (576, 1536), (129, 2049)])
def test_products_are_right_for_every_number_of_rows(
    native: Kernels, dtype: torch.dtype, out: int, cols: int
) -> None:
    """Shapes beside panels and blocks; from one row to more than a block of them."""
    for rows in (0, *range(1, 15), 23, 24, 47, 48, 49, 97):
        weight, bias, x = made(out, cols, rows, dtype)
        exact = x.double() @ weight.double().t()
        size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
        for given in (None, bias):
            y = native.linear(x, native.pack(weight, given))
            expected = exact if given is None else exact + bias.double()
            assert y.shape == (rows, out)
            assert y.is_contiguous()
            # The bound of a float32 sum in sequence (Higham, Accuracy and Stability, 3.5).
            assert bool(((y.double() - expected).abs() <= (cols + 1) * 2.0**-24 * size + 1e-30).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(native: Kernels, dtype: torch.dtype) -> None:
    """Bit for bit, so that a request's text does not depend on its batch."""
    weight, bias, x = made(200, 1100, 61, dtype)
    packed = native.pack(weight, bias)
    whole = native.linear(x, packed)
    for rows in range(1, 62):
        assert torch.equal(native.linear(x[:rows], packed), whole[:rows]), rows


@pytest.mark.parametrize(
    ("out", "cols", "group"),
    [(1, 2, 2), (17, 70, 7), (33, 1030, 128), (200, 96, 40), (20, 2100, 1500), (576, 1536, 128)],
)
def test_codes_are_multiplied_as_the_weight_that_they_stand_for(
    native: Kernels, out: int, cols: int, group: int
) -> None:
    """int8 with a scale a channel and int4 in groups, also where a group ends within a block or with one, is
    longer than one, or is no multiple of the input channels that are read together.
    """
    generator = torch.Generator().manual_seed(out)
    width, groups = native.panel_width, -(-cols // group)
    codes8 = torch.randint(-128, 128, (out, cols), generator=generator, dtype=torch.int8)
    scales8 = torch.rand(out, generator=generator) + 0.01
    codes4 = torch.randint(0, 16, (out, cols), generator=generator, dtype=torch.uint8)
    scales4 = torch.rand(groups, out, generator=generator) + 0.01
    zeros4 = torch.randint(0, 17, (groups, out), generator=generator)
    by_channel = [each.t().repeat_interleave(group, 1)[:, :cols].double() for each in (zeros4, scales4)]
    cases = {
        "int8": (panels.int8(codes8, scales8, width), codes8.double() * scales8.double().unsqueeze(1)),
        "int4": (
            panels.int4(codes4, scales4, zeros4, group, width),
            (codes4.double() - by_channel[0]) * by_channel[1],
        ),
    }
    x = torch.randn(61, cols, generator=generator)
    for kind, (packed, weight) in cases.items():
        whole = native.linear(x, packed)
        exact, size = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
        assert bool(((whole.double() - exact).abs() <= (cols + 3) * 2.0**-24 * size + 1e-30).all()), kind
        for rows in range(1, 61):
            assert torch.equal(native.linear(x[:rows], packed), whole[:rows]), (kind, rows)


def test_a_row_does_not_depend_on_the_number_of_threads(native: Kernels) -> None:
    weight, bias, x = made(200, 300, 9, torch.bfloat16)
    packed = native.pack(weight, bias)
    whole, threads = native.linear(x, packed), torch.get_num_threads()
    try:
        for count in (1, 3, 40):
            torch.set_num_threads(count)
            assert torch.equal(native.linear(x, packed), whole)
    finally:
        torch.set_num_threads(threads)


def test_inputs_of_any_dtype_and_stride(native: Kernels) -> None:
    weight, _, x = made(20, 30, 4, torch.bfloat16)
    packed = native.pack(weight)
    narrow = x.bfloat16()
    assert torch.equal(native.linear(narrow, packed), native.linear(narrow.float(), packed))
    assert torch.equal(native.linear(x.t().contiguous().t(), packed), native.linear(x, packed))


def test_values_that_are_not_finite_stay_so(native: Kernels) -> None:
    weight, _, x = made(16, 40, 3, torch.bfloat16)
    x[1, 7] = float("nan")
    x[2, 3] = float("inf")
    y = native.linear(x, native.pack(weight))
    assert bool(torch.isfinite(y[0]).all())
    assert not bool(torch.isfinite(y[1]).any())
    assert not bool(torch.isfinite(y[2]).any())


def test_what_does_not_fit_is_told(native: Kernels) -> None:
    weight, _, x = made(16, 40, 3, torch.bfloat16)
    with pytest.raises(ValueError, match=r"\[rows, 40\]"):
        native.linear(x[:, :39], native.pack(weight))
    with pytest.raises(ValueError, match="float16"):
        native.pack(weight.half())
