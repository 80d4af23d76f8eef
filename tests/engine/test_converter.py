"""Converting the weights of a running engine: memory, progress, what is refused, and the way back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import converter
from engine.knob import KnobContext
from engine.knob_store import KnobStore, PatchRefused
from engine.layers.linear import plain_choice
from engine.layers.precision import KINDS, PrecisionChoice, precision_forms
from engine.layout import NoRoom
from engine.models.linears import HEAD, LinearMaker, Place
from engine.models.loader import LoadedModel, load_model
from engine.runner import ModelRunner
from engine.weight_precision import WeightPrecision, quantized_bytes
from ipc.messages import CANCELLED, ApplyEvent, KnobValue, Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.driving import CPU
from tests.engine.oracle import NEW_TOKENS, tiny

SAMPLING = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
LARGER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 3,
}
SHAPES = ((512, 256), (256, 256), (1024, 256), (256, 512))  # of one such layer


def flip(engine: Engine, **patch: KnobValue) -> ApplyEvent:
    engine.set(**patch)
    engine.run()
    return engine.heard.applies[-1]


def larger() -> LoadedModel:
    loaded = load(tiny_folder("llama", **LARGER))
    return replace(loaded, weights=dict(loaded.weights))


def tiny_loaded() -> LoadedModel:
    """The larger model, whose weights nobody else holds."""
    folder = tiny_folder("llama", **LARGER)
    return load_model(folder, dtype=torch.float32, device=CPU, progress=lambda *_: None)


def tensor_bytes() -> int:
    """Bytes of all tensors that there are, shared memory once; what oneDNN has packed is not counted."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) is Tensor and not each.is_mkldnn)
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# --- memory --------------------------------------------------------------------------------------


def arithmetic(kind: str, *, four_bytes_a_group: bool = False) -> int:
    """Bytes of the linear layers of the larger model."""
    total = 0
    for rows, cols in SHAPES:
        if kind == "model":
            total += 4 * rows * cols
        elif kind == "int4":
            a_group = 4 if four_bytes_a_group else 3  # a scale in bfloat16; a zero of a byte, or in bfloat16
            total += rows * cols // 2 + rows * (cols // 128) * a_group
        else:
            total += rows * cols + 4 * rows
    return 3 * total


@pytest.mark.parametrize("knobs", [
    {"weight_dtype": "int8"}, {"weight_dtype": "fp8"}, {"weight_dtype": "int4", "int4_method": "rtn"},
    {"weight_dtype": "int4", "int4_method": "awq"},
], ids=["int8", "fp8", "rtn", "awq"])  # fmt: skip
def test_memory_is_what_arithmetic_says(knobs: dict[str, Any]) -> None:
    """What the runner says is held, and what tensors there really are, before and after, within 3 %."""
    for kind in KINDS:
        precision_forms(kind, CPU)  # which are tried once, and leave scratch memory behind
    loaded = larger()
    runner = ModelRunner(loaded, device=CPU, dtype=torch.float32, measure=False, calibration_ids=range(4, 99))
    outer = 4 * 2 * 320 * 256  # embedding and head
    assert runner.weight_bytes == pytest.approx(arithmetic("model") + outer, rel=0.03)
    assert runner.original_bytes == 0
    before = tensor_bytes()
    values = {**KnobStore(KnobContext()).values, **knobs}
    runner.set_precision(WeightPrecision.of(values), lambda *_: None)
    wanted = arithmetic(str(knobs["weight_dtype"]))
    assert runner.weight_bytes == pytest.approx(wanted + outer, rel=0.03)
    after = tensor_bytes()
    codes = wanted if knobs.get("int4_method") == "awq" else 0  # kept; now they are the layers' own
    assert after - before == pytest.approx(wanted, rel=0.03)  # the originals stay
    assert runner.original_bytes == pytest.approx(arithmetic("model"), rel=0.03)
    runner.set_precision(WeightPrecision(), lambda *_: None)
    assert tensor_bytes() - before == pytest.approx(codes, rel=0.03, abs=1000)
    assert runner.original_bytes == pytest.approx(codes, rel=0.03)
    assert runner.weight_bytes == pytest.approx(arithmetic("model") + outer, rel=0.03)


def test_four_bits_in_the_layout_of_the_kernel() -> None:
    """In bfloat16 codes lie as torch's kernel wants them, with scale and offset in bfloat16."""
    runner = ModelRunner(larger(), device=CPU, dtype=torch.bfloat16, measure=False,
                         precision=WeightPrecision("int4", "rtn", "head"))  # fmt: skip
    outer = 2 * 2 * 320 * 256
    wanted = arithmetic("int4", four_bytes_a_group=True)
    assert runner.weight_bytes == pytest.approx(wanted + outer, rel=0.03)


def test_a_step_reads_the_bytes_of_its_precision() -> None:
    engine = Engine(larger(), high_precision="none")
    engine.generate([list(range(4, 40))], SAMPLING)
    plain = engine.heard.steps[-1]
    flip(engine, weight_dtype="int8")
    engine.generate([list(range(4, 40))], SAMPLING)
    low = engine.heard.steps[-1]
    head = 320 * 256
    assert plain.weight_bytes == arithmetic("model") + 4 * head + 4 * 256
    assert low.weight_bytes == pytest.approx(arithmetic("int8") + head + 4 * 256, rel=0.01)
    assert low.flops == plain.flops
    assert plain.kernels.startswith("linear=fp32")
    # Which form is the fastest differs by machine: the step has to name the one that was chosen.
    chosen = {linear.kernel(1) for linear in engine.core.runner.decoder.linears.values()}
    assert {f"linear={kernel},activations=float32" for kernel in chosen} == {low.kernels}
    assert low.kernels.startswith("linear=int8:")
    state = engine.core.state()
    assert (state.weight_dtype, state.weight_bytes) == ("int8", engine.core.runner.weight_bytes)
    assert state.original_bytes == engine.core.runner.original_bytes > 0


# --- always from the originals -------------------------------------------------------------------


def test_where_it_came_from_makes_no_difference() -> None:
    """Started with, flipped to, and flipped to from other precisions: the same weights, so the same ids."""
    expected = tiny("llama")
    knobs: dict[str, Any] = {"weight_dtype": "int4", "int4_method": "awq"}
    want = Engine(expected.loaded, **knobs).generate(expected.prompts, SAMPLING)
    engine = Engine(expected.loaded)
    patches: list[dict[str, KnobValue]] = [
        {"weight_dtype": "int8"},
        knobs,
        {"weight_dtype": "model"},
        {"weight_dtype": "fp8", "high_precision": "none"},
        {**knobs, "high_precision": "head"},
    ]
    for patch in patches:
        assert flip(engine, **patch).result == "ok"
    assert engine.generate(expected.prompts, SAMPLING) == want
    assert flip(engine, weight_dtype="model").result == "ok"
    expected.compare(engine.generate(expected.prompts, SAMPLING))


def test_codes_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    flip(engine, weight_dtype="int4")
    first = engine.generate(expected.prompts, SAMPLING)
    stages = {state.stage for state in engine.heard.states}
    assert {"searching 4-bit codes (AWQ)", "converting weights to int4"} <= stages
    flip(engine, weight_dtype="model")

    def never(*_: Any) -> None:
        raise AssertionError("the text was read again")

    monkeypatch.setattr(engine.core.runner._converter, "_read_text", never)
    assert flip(engine, weight_dtype="int4").result == "ok"
    assert engine.generate(expected.prompts, SAMPLING) == first


def test_the_layers_that_err_most_stay_precise() -> None:
    """A single large weight in each row makes a layer's int8 codes coarse."""
    loaded = larger()
    coarse = loaded.weights["layers.1.down_proj.weight"].clone()
    coarse[:, 7] = 20.0
    loaded.weights["layers.1.down_proj.weight"] = coarse
    engine = Engine(loaded, weight_dtype="int8", high_precision="sensitive")
    kinds = {p: linear.kernel() for p, linear in engine.core.runner.decoder.linears.items()}
    plain = kinds[HEAD]
    assert not plain.startswith("int8")
    assert {place.layer for place, kernel in kinds.items() if kernel == plain} == {1, HEAD.layer}
    assert "|" in engine.core.runner.kernels


# --- while requests run --------------------------------------------------------------------------


def test_nothing_of_other_weights_is_found_again() -> None:
    """A06: prefixes and answers of one precision are not those of another; old blocks are gone for good."""
    expected = tiny("llama")
    engine = Engine(expected.loaded, result_cache=True)
    long = expected.prompts[4]
    engine.generate([long], SAMPLING)
    flip(engine, weight_dtype="int8")
    rid = engine.submit(long, SAMPLING)
    engine.run()
    row = engine.heard.done[rid].row
    assert row.cached_tok == 0
    assert not row.result_cached
    low = engine.ids(rid)
    assert low != expected.ids[4]
    flip(engine, weight_dtype="model")
    rid = engine.submit(long, SAMPLING)
    engine.run()
    assert engine.heard.done[rid].row.result_cached  # the answer, kept under these weights
    assert engine.ids(rid) == expected.ids[4]


def test_a_flip_that_changes_no_weight_disturbs_nobody() -> None:
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    rids = [engine.submit(prompt, SAMPLING) for prompt in expected.prompts]
    for _ in range(5):
        engine.core.step()
    applied = flip(engine, int4_method="rtn", high_precision="ends")
    assert (applied.mode, applied.result, applied.preempted) == ("reload", "ok", 0)
    expected.compare([engine.ids(rid) for rid in rids])
    assert {done.row.preempt_n for done in engine.heard.done.values()} == {0}


def test_weights_and_pool_change_together() -> None:
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    rids = [engine.submit(prompt, SAMPLING) for prompt in expected.prompts]
    for _ in range(5):
        engine.core.step()
    applied = flip(engine, weight_dtype="int8", block_size=4, kv_dtype="int8", kv_host_gib=0.001)
    assert (applied.mode, applied.result) == ("reload", "ok")
    assert all(len(engine.ids(rid)) == NEW_TOKENS for rid in rids)
    assert engine.core.state().block_size == 4
    applied = flip(engine, weight_dtype="model", kv_dtype="model", kv_allocation="contiguous")
    assert applied.result == "ok"
    expected.compare(engine.generate(expected.prompts, SAMPLING))


def test_how_far_it_is_is_told() -> None:
    engine = Engine(tiny("llama").loaded)
    applied = flip(engine, weight_dtype="int8", high_precision="sensitive")
    told = [state for state in engine.heard.states if state.stage]
    assert [state.phase for state in told] == ["applying"] * len(told)
    stages = [state.stage for state in told]
    assert {"measuring rounding errors", "converting weights to int8"} <= set(stages)
    assert stages[-1] == "allocating the KV pool"
    assert all(0 <= state.done_bytes <= state.total_bytes for state in told)
    assert min(state.total_bytes for state in told) > 0
    assert engine.heard.states[-1].stage == ""
    assert engine.heard.states[-1].phase == "ready"
    assert applied.took_us > 0


# --- what goes wrong -----------------------------------------------------------------------------


def rolled_back(engine: Engine, expected: Any, **patch: KnobValue) -> str:
    """Flip while requests run, which does not work out; all of them end with the oracle's ids."""
    rids = [engine.submit(prompt, SAMPLING) for prompt in expected.prompts]
    for _ in range(6):
        engine.core.step()
    applied = flip(engine, **patch)
    assert applied.result == "rolled_back"
    expected.compare([engine.ids(rid) for rid in rids])
    expected.compare(engine.generate(expected.prompts, SAMPLING))
    assert engine.core.runner.precision == WeightPrecision()
    assert engine.core.state().weight_dtype == "model"
    return applied.why


def test_a_conversion_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    made = LinearMaker.quantized

    def failing(self: LinearMaker, place: Place, weight: Any) -> Any:
        if place == (1, "out"):
            raise RuntimeError("the device has no memory left")
        return made(self, place, weight)

    monkeypatch.setattr(LinearMaker, "quantized", failing)
    assert rolled_back(engine, expected, weight_dtype="int8") == "the device has no memory left"
    monkeypatch.setattr(LinearMaker, "quantized", made)
    assert flip(engine, weight_dtype="int8").result == "ok"


@pytest.mark.parametrize(("stage", "patch"), [
    ("searching 4-bit codes (AWQ)", {"weight_dtype": "int4"}),
    ("converting weights to int8", {"weight_dtype": "int8"}),
    ("making a draft in int8", {"speculation": "self"}),
], ids=["search", "conversion", "draft"])  # fmt: skip
def test_a_change_that_is_cancelled_half_way_is_undone(
    monkeypatch: pytest.MonkeyPatch, stage: str, patch: dict[str, KnobValue]
) -> None:
    """It is cancelled again and again, which must not keep the way back from being gone to its end."""
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    core, seen = engine.core, []
    told = core.pulse.progress

    def cancelling(now: str, done_bytes: int, total_bytes: int) -> None:
        told(now, done_bytes, total_bytes)
        seen.append(now)
        if stage in seen and done_bytes and core.knobs.pending is not None:
            assert core.knobs.cancel(core.knobs.pending.apply_id)

    monkeypatch.setattr(core.pulse, "progress", cancelling)
    assert rolled_back(engine, expected, **patch) == CANCELLED
    assert seen.count(stage) == 2, "it went on after it was cancelled"
    assert core.drafts.weight_bytes == 0
    assert len(core.runner._converter._codes) == ("search" in stage), "what was found is kept"
    assert not core.knobs.cancel(1), "it is over"
    monkeypatch.setattr(core.pulse, "progress", told)
    assert flip(engine, **patch).result == "ok"


def test_the_way_back_is_tried_though_memory_looks_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alternative is an engine that has to end."""
    expected = tiny("llama")
    engine = Engine(expected.loaded, weight_dtype="int8")
    want = engine.generate(expected.prompts, SAMPLING)
    made = LinearMaker.plain

    def failing(self: LinearMaker, place: Place) -> Any:
        if place == (1, "out"):
            no_memory(monkeypatch, 0)
            raise MemoryError
        return made(self, place)

    monkeypatch.setattr(LinearMaker, "plain", failing)
    applied = flip(engine, weight_dtype="model")
    assert (applied.result, applied.why) == ("rolled_back", "MemoryError")
    assert engine.core.state().weight_dtype == "int8, head kept"
    assert engine.generate(expected.prompts, SAMPLING) == want


@pytest.mark.parametrize("knobs", [{"weight_dtype": "int8"}, {"weight_dtype": "int4"}], ids=["int8", "int4"])
def test_a_weight_that_is_not_finite_is_named(knobs: dict[str, Any]) -> None:
    """A conversion would spread it over a whole row."""
    loaded = larger()
    broken = loaded.weights["layers.2.up_proj.weight"].clone()
    broken[3, 3] = float("inf")
    loaded.weights["layers.2.up_proj.weight"] = broken
    engine = Engine(loaded)
    applied = flip(engine, **knobs)
    assert applied.result == "rolled_back"
    assert applied.why.startswith("layers.2.gate_up: ")
    assert engine.core.runner.precision == WeightPrecision()


def no_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    for name in ("available_bytes", "free_bytes"):
        answer: Callable[..., int] = lambda *_: available  # noqa: E731
        monkeypatch.setattr(converter, name, answer)


def test_what_memory_cannot_hold_is_refused_before_anything_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Weights that are held in two forms, as they may be where forms are measured, make room by themselves.
    monkeypatch.setattr(LinearMaker, "_choose", lambda self: plain_choice(self.store.dtype))
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    no_memory(monkeypatch, 0)
    preempted = len(engine.heard.preemptions)
    why = rolled_back(engine, expected, weight_dtype="int8")
    assert "weights in int8, head kept would take 0.00 GiB more, 0.00 GiB can be had" in why
    assert len(engine.heard.preemptions) == preempted
    with pytest.raises(MemoryError, match="would take"):
        Engine(expected.loaded, weight_dtype="int8")


def test_a_refusal_says_what_is_needed_and_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: the new weights, and three float32 copies of the largest one while it is rounded."""
    shapes = ((512, 512), (512, 256), (8192, 512), (512, 4096))
    sizes = {**LARGER, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 1}
    runner = ModelRunner(load(tiny_folder("llama", **sizes)), device=CPU, dtype=torch.float32, measure=False)
    needed = sum(rows * cols + 4 * rows for rows, cols in shapes) + 3 * 4 * 8192 * 512
    precision = WeightPrecision("int8", "", "head")
    no_memory(monkeypatch, 32 << 20)
    with pytest.raises(NoRoom) as refusal:
        runner.check_precision(precision)
    told = f"weights in int8, head kept would take {needed / 2**30:.2f} GiB more, 0.03 GiB can be had"
    assert str(refusal.value) == told
    assert "would take 0.05 GiB" in told
    no_memory(monkeypatch, needed - 1)
    with pytest.raises(NoRoom):
        runner.check_precision(precision)
    no_memory(monkeypatch, needed)
    runner.check_precision(precision)


def in_two_layouts(kind: Any, *_: Any, **__: Any) -> PrecisionChoice:
    forms = {form.name: form for form in precision_forms(kind, CPU)}
    return PrecisionChoice((1, 2), (forms["int4pack"], forms["codes-fp32gemm"]), kind)


def test_weights_in_two_layouts_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is known once their kind was measured: at the first conversion to it, before anything of it is
    done, and from then on before the pool is touched."""
    monkeypatch.setattr("engine.models.linears.choose_precision", in_two_layouts)
    monkeypatch.setattr("engine.models.linears.choose", lambda *_, **__: plain_choice(torch.float32))
    engine = Engine(larger())
    core = engine.core
    pool = core.layout.pool_bytes
    low = WeightPrecision("int4", "rtn", "head")
    each = 3 * sum(quantized_bytes("int4", *shape) for shape in SHAPES)
    work = converter.WORK_COPIES["rtn"] * 4 * 1024 * 256
    layouts = 1.5  # that there is room for beside the pool, which is free when it is asked again

    def available(*_: Any) -> int:
        return int(layouts * each) + work - (pool if core.runner.kv is not None else 0)

    monkeypatch.setattr(converter, "available_bytes", available)
    monkeypatch.setattr(converter, "free_bytes", available)
    rid = engine.submit(list(range(4, 40)), SAMPLING)
    engine.core.step()
    refused = flip(engine, weight_dtype="int4", int4_method="rtn")
    assert refused.result == "rolled_back"
    assert refused.why.startswith("weights in int4 rtn, head kept would take ")
    assert (core.runner.precision, core.layout.pool_bytes) == (WeightPrecision(), pool)
    assert len(engine.ids(rid)) == NEW_TOKENS
    preempted = len(engine.heard.preemptions)
    assert flip(engine, weight_dtype="int4", int4_method="rtn").preempted == 0
    assert len(engine.heard.preemptions) == preempted
    layouts = 2.0
    before = core.runner.weight_bytes
    assert flip(engine, weight_dtype="int4", int4_method="rtn").result == "ok"
    assert core.runner.precision == low
    held = core.runner.weight_bytes - before + arithmetic("model")
    assert 1.5 * each < held <= 2 * each


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_are_never_there_twice_where_originals_have_no_room(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """A model whose originals fill most of the memory can be started in fewer bits nevertheless."""
    for each in KINDS:
        precision_forms(each, CPU)  # which are tried once, and leave scratch memory behind
    method: Any = "awq" if kind == "int4" else ""
    codes = arithmetic("int4") if method else 0  # which are found before the first weight may go
    no_memory(monkeypatch, converter.WORK_COPIES[method] * 4 * 1024 * 256 + 2 * codes)
    seen: list[int] = []

    def start(*, consume: bool) -> ModelRunner:
        return ModelRunner(
            tiny_loaded(), device=CPU, dtype=torch.float32, measure=False, consume=consume,
            precision=WeightPrecision(kind, method, "head"), calibration_ids=range(4, 99),
            progress=lambda *_: seen.append(tensor_bytes()),
        )  # fmt: skip

    if kind == "int8":
        with pytest.raises(MemoryError, match="would take"):
            start(consume=False)
    runner = start(consume=True)
    assert max(seen) - seen[0] < 2 * codes + 4 * 1024 * 256
    assert seen[-1] - seen[0] < 0.5 * arithmetic(kind) - 0.5 * arithmetic("model")
    assert runner.original_bytes == 0
    with pytest.raises(NoRoom, match=r"not kept, since .* GiB .* restart the engine"):
        runner.check_precision(WeightPrecision())


def test_originals_that_have_no_room_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the precision the engine started with stays, and a change says that it takes a restart."""
    loaded = larger()
    monkeypatch.setattr(converter, "KEEP_SHARE", 0.0)
    before = tensor_bytes()
    runner = ModelRunner(
        loaded, device=CPU, dtype=torch.float32, consume=True, precision=WeightPrecision("int8", "", "head")
    )
    assert loaded.weights == {}
    assert runner.original_bytes == 0
    assert tensor_bytes() - before < 0.5 * arithmetic("model")
    with pytest.raises(NoRoom, match=r"not kept, since .* GiB .* restart the engine"):
        runner.check_precision(WeightPrecision())
    runner.check_precision(WeightPrecision("int8", "", "head"))


def test_originals_that_layers_hold_anyway_cost_nothing_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "KEEP_SHARE", 0.0)
    runner = ModelRunner(larger(), device=CPU, dtype=torch.float32, measure=False, consume=True)
    assert runner.original_bytes == 0
    runner.set_precision(WeightPrecision("int8", "", "head"), lambda *_: None)
    assert runner.original_bytes == pytest.approx(arithmetic("model"), rel=0.01)


def test_a_model_that_is_quantized_already_is_left_so() -> None:
    store = KnobStore(KnobContext(quantization="awq int4 group 128"))
    for value in ("fp8", "int8", "int4"):
        why = store.validate({"weight_dtype": value})["weight_dtype"]
        assert why.endswith("the model's weights are quantized already: awq int4 group 128")
    assert store.validate({"weight_dtype": "model"}) == {}
    with pytest.raises(PatchRefused, match="quantized already"):
        KnobStore(KnobContext(quantization="awq int4 group 128"), {"weight_dtype": "int8"})
