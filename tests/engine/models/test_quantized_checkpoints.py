"""Weights of quantized checkpoints, held against checkpoints packed here word by word from the formats'
descriptions. Everything must be exact: nothing is quantized again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.errors import ModelError
from engine.models.quantized import parse

OUT, COLS = 24, 32
MODULE = "model.layers.0.mlp.down_proj"


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes_of(bits: int, seed: int = 1, rows: int = OUT, cols: int = COLS) -> Tensor:
    return torch.randint(0, 1 << bits, (rows, cols), generator=random(seed))


def words(values: list[int], bits: int) -> int:
    """Values of ``bits`` bits as one signed 32-bit word, the first one lowest."""
    word = 0
    for place, value in enumerate(values):
        assert 0 <= value < 1 << bits
        word |= value << (bits * place)
    return word - (1 << 32) if word >= 1 << 31 else word


def packed(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """A matrix of values as int32 words along ``dim``; ``order`` says which value is at which place."""
    if dim == 0:
        return packed(values.t(), bits, 1, order).t().contiguous()
    per_word = 32 // bits
    rows = []
    for row in values.tolist():
        row += [0] * (-len(row) % per_word)
        parts = [row[i : i + per_word] for i in range(0, len(row), per_word)]
        rows.append([words([part[i] for i in order] if order else part, bits) for part in parts])
    return torch.tensor(rows, dtype=torch.int32)


def scales_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=random(2)) * 0.02 + 0.001).to(dtype)


def expected(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: list[int]) -> Tensor:
    """codes [out, in]; zeros and scales [groups, out]: each weight by itself, in float32."""
    rows = []
    for o in range(codes.shape[0]):
        row = []
        for i, g in enumerate(group_of):
            row.append((float(codes[o, i]) - float(zeros[g, o])) * scales[g, o].float())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def load(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], out: int = OUT, cols: int = COLS
) -> Tensor:
    """The dequantized weight, after holding the tensors against what the plan says it needs."""
    plan = parse(config)
    full = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    needs = plan.needs(MODULE, out, cols)
    assert needs is not None
    names = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}
    names |= {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    for name, need in needs.items():
        if name in full:
            assert tuple(full[name].shape) in need.shapes, name
            assert names[full[name].dtype] in need.dtypes, name
        else:
            assert need.optional, name
    assert set(full) <= set(needs)
    weight = plan.weight(MODULE, out, cols, full)
    assert weight.shape == (out, cols)
    return weight.dequantize()


# --- AWQ ------------------------------------------------------------------------------------------

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_PLACES[i]


def awq_tensors(group: int, cols: int = COLS) -> tuple[dict[str, Tensor], Tensor]:
    groups = cols // group
    codes = codes_of(4, cols=cols)
    zeros = codes_of(4, 3, groups, OUT)
    scales = scales_of((groups, OUT))
    tensors = {
        "qweight": packed(codes.t(), 4, 1, AWQ_PLACES),
        "qzeros": packed(zeros, 4, 1, AWQ_PLACES),
        "scales": scales,
    }
    return tensors, expected(codes, zeros, scales, [i // group for i in range(cols)])


@pytest.mark.parametrize("group", [16, 32, -1])
def test_awq(group: int) -> None:
    tensors, weight = awq_tensors(COLS if group == -1 else group)
    assert torch.equal(load({**AWQ, "group_size": group}, tensors), weight)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": group, "version": "GEMM"}
    assert torch.equal(load(old, tensors), weight)


# --- GPTQ -----------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}


def gptq_tensors(
    bits: int, group_of: list[int], *, minus_one: bool, least_zero: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    groups = max(group_of) + 1
    codes = codes_of(bits)
    zeros = codes_of(bits, 3, groups, OUT).clamp(min=least_zero)
    scales = scales_of((groups, OUT))
    tensors = {
        "qweight": packed(codes.t(), bits, 0),
        "qzeros": packed(zeros - 1 if minus_one else zeros, bits, 1),
        "scales": scales,
        "g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    return tensors, expected(codes, zeros, scales, group_of)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq(bits: int, form: str, desc_act: bool) -> None:
    """Both conventions of zeros, groups in order and scattered (desc_act)."""
    group_of = [i // 8 for i in range(COLS)]
    if desc_act:
        group_of = [group_of[i] for i in torch.randperm(COLS, generator=random(5)).tolist()]
    tensors, weight = gptq_tensors(bits, group_of, minus_one=form == "gptq", least_zero=int(form == "gptq"))
    config = {**GPTQ, "bits": bits, "desc_act": desc_act, "checkpoint_format": form}
    assert torch.equal(load(config, tensors), weight)
    if not desc_act:
        del tensors["g_idx"]
        assert torch.equal(load(config, tensors), weight)


def test_the_two_conventions_of_gptq_zeros_differ_by_one_step() -> None:
    group_of = [i // 8 for i in range(COLS)]
    tensors, weight = gptq_tensors(4, group_of, minus_one=True)
    wrong = load({**GPTQ, "checkpoint_format": "gptq_v2"}, tensors)
    steps = (wrong - weight) / expected(
        torch.ones(OUT, COLS), torch.zeros(4, OUT), tensors["scales"], group_of
    )
    torch.testing.assert_close(steps, torch.ones_like(steps), rtol=0, atol=1e-3)


def test_gptq_zeros_of_zero_that_borrowed_from_their_neighbour_are_read_as_they_were() -> None:
    """A writer of v1 subtracts 0x11111111 from whole words; zeros of 0 then borrow."""
    group_of = [i // 8 for i in range(COLS)]
    tensors, weight = gptq_tensors(4, group_of, minus_one=False, least_zero=0)
    zeros = codes_of(4, 3, 4, OUT)
    assert bool((zeros == 0).any())  # otherwise nothing borrows
    borrowed = (tensors["qzeros"].long() - 0x11111111) & 0xFFFFFFFF
    tensors["qzeros"] = torch.where(borrowed >= 1 << 31, borrowed - (1 << 32), borrowed).to(torch.int32)
    assert torch.equal(load({**GPTQ, "checkpoint_format": "gptq"}, tensors), weight)


def test_gptq_whole_rows_as_one_group() -> None:
    tensors, weight = gptq_tensors(4, [0] * COLS, minus_one=True)
    assert torch.equal(load({**GPTQ, "group_size": -1}, tensors), weight)


def test_gptq_orders_that_contradict_the_configuration_are_refused() -> None:
    scattered = [i % 4 for i in range(COLS)]
    tensors, _ = gptq_tensors(4, scattered, minus_one=True)
    with pytest.raises(ModelError, match=r"down_proj: g_idx .* desc_act false"):
        load(GPTQ, tensors)
    for broken in ([0] * COLS, [99, *scattered[1:]], [-1] * COLS):
        tensors["g_idx"] = torch.tensor(broken, dtype=torch.int32)
        with pytest.raises(ModelError, match=r"g_idx .* damaged"):
            load({**GPTQ, "desc_act": True}, tensors)


# --- compressed-tensors ---------------------------------------------------------------------------


def compressed(form: str, *, activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, **weights},
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_compressed_float(strategy: str) -> None:
    codes = torch.randn(OUT, COLS, generator=random()).to(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "channel": (OUT, 1), "group": (OUT, 4), "block": (2, 2)}[strategy]
    scales = scales_of(shape, torch.bfloat16)
    extra: dict[str, Any] = {"group": {"group_size": 8}, "block": {"block_structure": [16, 20]}}.get(
        strategy, {}
    )
    weight = torch.empty(OUT, COLS)
    for o in range(OUT):
        for i in range(COLS):
            at = {"tensor": (0,), "channel": (o, 0), "group": (o, i // 8), "block": (o // 16, i // 20)}[
                strategy
            ]
            weight[o, i] = codes[o, i].float() * scales[at].float()
    config = compressed(
        "float-quantized",
        activations=TOKEN,
        type="float",
        num_bits=8,
        strategy=strategy,
        symmetric=True,
        **extra,
    )
    assert torch.equal(load(config, {"weight": codes, "weight_scale": scales}), weight)
    assert parse(config).notes == (
        "the checkpoint rounds activations (float8 dynamic token); here they keep their precision",
    )
    if strategy == "tensor":
        assert torch.equal(load(config, {"weight": codes, "weight_scale": scales.reshape(())}), weight)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_int(strategy: str, symmetric: bool) -> None:
    codes = codes_of(8) - 128
    groups = 4 if strategy == "group" else 1
    shape = (1,) if strategy == "tensor" else (OUT, groups)
    scales = scales_of(shape, torch.bfloat16)
    zeros = torch.zeros(shape, dtype=torch.long)
    if not symmetric:
        zeros = torch.randint(-128, 128, shape, generator=random(4))
    wide = [t.reshape(1, 1).expand(OUT, 1) if strategy == "tensor" else t for t in (zeros, scales)]
    weight = expected(codes, wide[0].t(), wide[1].t(), [i * groups // COLS for i in range(COLS)])
    config = compressed(
        "int-quantized",
        type="int",
        num_bits=8,
        strategy=strategy,
        symmetric=symmetric,
        group_size=8 if strategy == "group" else None,
    )
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = zeros.to(torch.int8)
    assert torch.equal(load(config, tensors), weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("actorder", [None, "group", "weight"])
@pytest.mark.parametrize("out", [OUT, OUT - 1])
def test_compressed_packed(bits: int, symmetric: bool, actorder: str | None, out: int) -> None:
    """Also rows of zero points that do not fill their last word."""
    offset = 1 << (bits - 1)
    codes = codes_of(bits, rows=out) - offset
    scales = scales_of((out, 4), torch.bfloat16)
    zeros = torch.zeros(out, 4, dtype=torch.long)
    if not symmetric:
        zeros = codes_of(bits, 3, out, 4) - offset
    group_of = [i // 8 for i in range(COLS)]
    tensors = {
        "weight_packed": packed(codes + offset, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, COLS]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros + offset, bits, 0)
    if actorder == "group":
        group_of = [group_of[i] for i in torch.randperm(COLS, generator=random(5)).tolist()]
        tensors["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    config = compressed(
        "pack-quantized",
        type="int",
        num_bits=bits,
        strategy="group",
        group_size=8,
        symmetric=symmetric,
        actorder=actorder,
    )
    assert torch.equal(load(config, tensors, out), expected(codes, zeros.t(), scales.t(), group_of))


def test_compressed_packed_contradictions_are_refused() -> None:
    tensors = {
        "weight_packed": packed(codes_of(4), 4, 1),
        "weight_scale": scales_of((OUT, 1)),
        "weight_shape": torch.tensor([OUT, COLS + 1]),
    }
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=True)
    with pytest.raises(ModelError, match=r"weight_shape says \[24, 33\], config.json says \[24, 32\]"):
        load(config, tensors)


# --- block fp8 ------------------------------------------------------------------------------------

BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 12]}


def test_block_fp8() -> None:
    """Edge blocks are smaller than the others."""
    codes = torch.randn(OUT, COLS, generator=random()).to(torch.float8_e4m3fn)
    scales = scales_of((2, 3), torch.float32)
    weight = torch.empty(OUT, COLS)
    for o in range(OUT):
        for i in range(COLS):
            weight[o, i] = codes[o, i].float() * scales[o // 16, i // 12]
    assert torch.equal(load(BLOCK, {"weight": codes, "weight_scale_inv": scales}), weight)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_scales_that_are_lost_are_refused(bad: float) -> None:
    """A31: a missing scale is reported, 0 and NaN are refused; also in every other format."""
    codes = torch.ones(OUT, COLS).to(torch.float8_e4m3fn)
    scales = torch.ones(2, 3)
    scales[1, 2] = bad
    with pytest.raises(
        ModelError, match=r"down_proj: .*damaged: scales hold 1 values that are 0 or not finite"
    ):
        load(BLOCK, {"weight": codes, "weight_scale_inv": scales})
    tensors, _ = awq_tensors(16)
    tensors["scales"][0, 0] = bad
    with pytest.raises(ModelError, match="damaged: scales"):
        load(AWQ, tensors)
    tensors, _ = gptq_tensors(4, [i // 8 for i in range(COLS)], minus_one=True)
    tensors["scales"][0, 0] = bad
    with pytest.raises(ModelError, match="damaged: scales"):
        load(GPTQ, tensors)


def test_nan_codes_are_refused() -> None:
    codes = torch.ones(OUT, COLS)
    codes[3, 3] = float("nan")
    with pytest.raises(ModelError, match="NaN codes"):
        load(BLOCK, {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 3)})
