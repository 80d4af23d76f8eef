"""Numbers in 8 bits, made and read inside kernels, against torch's own conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from engine.kernels.codes import decode, encode, reference_decode, reference_encode
from engine.kernels.launch import INTERPRETED
from tests.engine.kernels.support import DEVICE, poisoned

TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _encode_all(x: Any, y: Any, KIND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(y + at, encode(tl.load(x + at), KIND, NATIVE))


@triton.jit
def _decode_all(x: Any, y: Any, TO: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr) -> None:
    at = tl.arange(0, 256)
    tl.store(y + at, decode(tl.load(x + at), TO, KIND, NATIVE))


def _awkward_numbers() -> torch.Tensor:
    """Every e4m3 number, the middles between neighbours, their neighbours in float32, and what is beyond."""
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    near = torch.cat((every, middles))
    inf = torch.tensor(float("inf"))
    beyond = torch.tensor([449.0, 464.0, 465.0, 1e30, float("inf"), 2.0**-11, 1e-40, 0.0])
    numbers = torch.cat((near, near.nextafter(inf), near.nextafter(-inf), beyond))
    numbers = torch.cat((numbers, -numbers, torch.tensor([float("nan")])))
    return torch.nn.functional.pad(numbers, (0, 2048 - len(numbers))).to(DEVICE)


def _as_the_instruction_converts(numbers: Any, source: Any, to: Any, rounding: Any) -> Any:
    """float32 to e4m3 in place of the interpreter's cast, which loses carries: to nearest, ties to even."""
    assert (source, to) == (tl.float32, tl.float8e4nv)
    return torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@pytest.mark.parametrize("native", [0, 89, 90])
def test_e4m3_bits_are_those_of_torch(native: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's cast does not clamp, and makes NaN of what is too large, so what is around it counts too."""
    if INTERPRETED and native >= 90:
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", _as_the_instruction_converts)
    x = _awkward_numbers()
    y = poisoned(2048, dtype=torch.uint8)
    _encode_all[(1,)](x, y, "e4m3", native, 2048)
    assert torch.equal(y, reference_encode(x, "e4m3"))


def test_int8_rounds_halves_to_even_and_clamps() -> None:
    x = torch.cat((torch.arange(-300, 300) / 2, torch.linspace(-140, 140, 423))).to(DEVICE)
    y = poisoned(1024, dtype=torch.int8)
    _encode_all[(1,)](torch.nn.functional.pad(x, (0, 1), value=float("nan")), y, "int8", 0, 1024)
    assert torch.equal(y[:-1], reference_encode(x, "int8"))
    assert y[-1] == 0, "NaN"


@pytest.mark.parametrize("native", [0, 89, 90])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_of_e4m3_is_read_exactly(to: torch.dtype, native: int) -> None:
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(DEVICE)
    y = poisoned(256, dtype=to)
    _decode_all[(1,)](stored, y, TL[to], "e4m3", native)
    exact = reference_decode(stored)
    if native and INTERPRETED:  # it takes the two NaN for the numbers that their bits would be
        y = torch.where(exact.isnan(), exact.to(to), y)
    torch.testing.assert_close(y.double(), exact, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_every_int8_is_read_exactly(to: torch.dtype) -> None:
    stored = torch.arange(-128, 128, dtype=torch.int8).to(DEVICE)
    y = poisoned(256, dtype=to)
    _decode_all[(1,)](stored, y, TL[to], "int8", 0)
    assert torch.equal(y.double(), stored.double())
