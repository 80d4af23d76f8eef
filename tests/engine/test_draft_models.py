"""Models that draft: which are taken, what they take of memory, and what happens when they fail."""

from __future__ import annotations

import gc
import math
import random
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import engine.speculation.draft_models as draft_models
from engine import sizes
from engine.bringup import bring_up, explain
from engine.config import EngineConfig
from engine.knob import KnobContext
from engine.knob_store import KnobStore, PatchRefused
from engine.knobs import BY_ID
from engine.kv_cache import KVCache
from engine.layers.linear import Choice, Form, candidates, plain_choice
from engine.layers.precision import Kind, PrecisionChoice, QuantizedWeight, precision_forms
from engine.lifetime import ExitCode
from engine.loop import EngineCore
from engine.models.errors import ModelError
from engine.models.loader import LoadedModel
from engine.models.reading import Progress
from engine.options import engine_config, parser
from engine.speculation.rounds import RoundDrafter
from ipc.messages import KnobValue, Sampling
from tests import tiny_models
from tests.engine.core_harness import Engine, load, tiny_folder

GREEDY = Sampling(max_tokens=24, ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


def prompts(count: int = 4, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 300) for _ in range(rng.randrange(5, 60))] for _ in range(count)]


def total(engine: Engine, field: str) -> int:
    return sum(getattr(step, field) for step in engine.heard.steps)


def drafting(model: LoadedModel, kind: str = "draft", **knobs: Any) -> Engine:
    folder = tiny_folder("qwen3")
    return Engine(model, draft_model=folder, **{"speculation": kind, "spec_adaptive": False, **knobs})


def change(engine: Engine, **patch: KnobValue) -> str:
    """Apply a patch; why it was not taken, or ""."""
    engine.set(**patch)
    engine.run()
    return engine.heard.applies[-1].why


# --- which are taken ------------------------------------------------------------------------------------


def test_each_kind_says_what_it_lacks() -> None:
    knob = BY_ID["speculation"]
    assert knob.refused_choices(KnobContext()) == {"draft": "the engine was started without --draft-model"}
    assert knob.refused_choices(KnobContext(draft_model="a")) == {}
    assert "awq" in knob.refused_choices(KnobContext(draft_model="a", quantization="awq"))["self"]
    with pytest.raises(PatchRefused, match="--draft-model"):
        KnobStore(KnobContext(), {"speculation": "draft"})


@pytest.mark.parametrize("change_to", ["fewer tokens", "another token", "other merges"])
@pytest.mark.parametrize("speculation", ["off", "draft"])
def test_another_tokenizer_is_refused_with_both_names(
    model: LoadedModel, tmp_path: Path, change_to: str, speculation: str
) -> None:
    """At start, whether or not speculation is on."""
    folder = tmp_path / "other-model"
    if change_to == "fewer tokens":
        tiny_models.build(folder, "llama", vocab_size=300)
    else:
        shutil.copytree(tiny_folder("qwen3"), folder)
        file = folder / "tokenizer.json"
        text = file.read_text()
        backend = Tokenizer.from_str(text)
        if change_to == "another token":
            token = backend.id_to_token(319)
            file.write_text(text.replace(f'"{token}"', '"qqqq"'))
            vocabulary = Tokenizer.from_file(str(file))
            assert vocabulary.id_to_token(319) == "qqqq"
        else:
            import json

            data = json.loads(text)
            data["model"]["merges"] = data["model"]["merges"][::-1]
            file.write_text(json.dumps(data))
    config = EngineConfig(
        model=Path(model.info.path),
        draft_model=folder,
        kv_pool_bytes=1 << 20,
        knobs={"speculation": speculation},
    )
    knobs = KnobStore(KnobContext(draft_model=str(folder)), config.knobs)
    with pytest.raises(
        ModelError, match=rf"other-model cannot draft for {model.info.name}: their tokenizers"
    ):
        EngineCore(model, config, knobs, lambda _: None)


def test_the_same_tokenizer_in_another_file_is_taken(model: LoadedModel, tmp_path: Path) -> None:
    """What counts is what ids mean, not a checksum, nor who pads the vocabulary how."""
    folder = tmp_path / "same"
    shutil.copytree(tiny_folder("qwen3"), folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + "\n\n")
    assert load(folder).tokenizer.sha256 != model.tokenizer.sha256
    engine = Engine(model, draft_model=folder, speculation="draft", spec_adaptive=False)
    assert engine.generate(prompts(), GREEDY) == Engine(model).generate(prompts(), GREEDY)
    assert total(engine, "drafted_tok") > 0


def test_a_draft_model_that_cannot_be_loaded_is_refused_at_start(model: LoadedModel, tmp_path: Path) -> None:
    config = EngineConfig(model=Path(model.info.path), draft_model=tmp_path, kv_pool_bytes=1 << 20)
    with pytest.raises(ModelError, match=str(tmp_path)):
        EngineCore(model, config, KnobStore(KnobContext(draft_model="x")), lambda _: None)


@pytest.mark.parametrize("fits", [True, False])
def test_an_engine_is_brought_up_with_a_draft_model(tmp_path: Path, fits: bool) -> None:
    """From options to a core that drafts, or to the sentence that says which two models do not fit."""
    folder = tiny_folder("qwen3") if fits else tiny_models.build(tmp_path / "stranger", vocab_size=300)
    target = tiny_folder("llama")
    options = ["--model", str(target), "--draft-model", str(folder), "--dtype", "float32", "--device", "cpu"]
    options += ["--kv-pool-gib", "0.001", "--knob", "speculation=draft", "--knob", "spec_sampling=rejection"]
    config = engine_config(parser().parse_args(options))
    if not fits:
        with pytest.raises(ModelError) as refused:
            bring_up(config, lambda _: None, lambda *_: None, lambda _: None)
        code, why = explain(refused.value, running=False)
        assert code == ExitCode.LOAD_FAILED
        assert "stranger" in why
        assert target.name in why
        return
    core, knobs, _ = bring_up(config, lambda _: None, lambda *_: None, lambda _: None)
    assert (core.speculator.kind, core.drafts.weight_bytes > 0) == ("draft", True)
    assert knobs.context.draft_model == str(folder)


# --- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["draft", "self"])
def test_memory_is_there_while_it_drafts_and_given_back_when_it_is_off(model: LoadedModel, kind: str) -> None:
    """Weights and keys and values, to the byte; told in the state."""

    def tensors() -> int:
        gc.collect()
        seen = {
            found.untyped_storage().data_ptr(): found.untyped_storage().nbytes()
            for found in gc.get_objects()
            if type(found) is torch.Tensor
        }
        return sum(seen.values())

    engine = drafting(model, "off")
    drafts, spec = engine.core.drafts, load(tiny_folder("qwen3")).spec
    for value in (kind, "off"):  # scratch memory of kernels stays
        assert change(engine, speculation=value) == ""
        engine.generate(prompts(), GREEDY)
    start = tensors()
    for _ in range(3):
        assert change(engine, speculation=kind) == ""
        on = tensors()
        engine.generate(prompts(), GREEDY)
        kv = engine.core.runner.kv
        assert kv is not None
        per_token = spec.kv_bytes_per_token(torch.float32) if kind == "draft" else 0  # it uses the target's
        assert drafts.kv_bytes == kv.num_blocks * kv.block_size * per_token
        assert drafts.weight_bytes > 30_000
        assert on - start >= drafts.kv_bytes + (drafts.weight_bytes if kind == "draft" else 0)
        state = engine.core.state()
        assert (state.draft_weight_bytes, state.draft_kv_bytes) == (drafts.weight_bytes, drafts.kv_bytes)
        assert change(engine, speculation="off") == ""
        assert (drafts.weight_bytes, drafts.kv_bytes) == (0, 0)
        assert abs(tensors() - start) < 64  # flags of one byte come and go
    assert change(engine, speculation=kind) == ""
    assert change(engine, speculation="ngram") == ""
    assert (drafts.weight_bytes, drafts.kv_bytes) == (0, 0)


@pytest.mark.parametrize("kind", ["draft", "self"])
def test_what_memory_cannot_hold_is_refused_with_numbers(
    model: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is given up, and at start."""

    def first(kind: Kind, *_: Any, **__: Any) -> PrecisionChoice:
        return PrecisionChoice((1,), (precision_forms(kind, CPU)[0],), kind)

    # What is measured may choose one form or two, another time than this.
    monkeypatch.setattr("engine.models.linears.choose", lambda *_, **__: plain_choice(torch.float32))
    monkeypatch.setattr("engine.models.linears.choose_precision", first)
    engine = drafting(model, "ngram")
    assert change(engine, speculation=kind) == ""
    drafts, size = engine.core.drafts, partial(sizes.size, least="MiB")
    weights, kv = drafts.weight_bytes, drafts.kv_bytes
    if kind == "draft":  # its norms too, which nobody counts as weights that are held
        weights += load(tiny_folder("qwen3")).info.weight_bytes - drafts.weight_bytes
    assert change(engine, speculation="ngram") == ""
    monkeypatch.setattr(draft_models, "free_bytes", lambda _: 50_000)
    why = change(engine, speculation=kind)
    assert why == (
        f"drafts with speculation={kind} would take {size(weights)} of weights and {size(kv)} of keys and "
        "values, 0.05 MiB can be had; a smaller KV pool (kv_pool_gib) leaves more"
    )
    monkeypatch.setattr(draft_models, "free_bytes", lambda _: weights + kv - 1)
    assert "would take" in change(engine, speculation=kind)
    monkeypatch.setattr(draft_models, "free_bytes", lambda _: weights + kv)
    assert change(engine, speculation=kind) == change(engine, speculation="ngram") == ""
    monkeypatch.setattr(draft_models, "free_bytes", lambda _: 50_000)
    assert engine.core.knobs["speculation"] == "ngram"
    assert engine.generate(prompts(), GREEDY) == Engine(model).generate(prompts(), GREEDY)
    with pytest.raises(PatchRefused, match="would take"):
        drafting(model, kind)


@pytest.mark.parametrize("kind", ["draft", "self"])
def test_every_form_that_weights_are_held_in_is_counted(
    model: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers may hold weights twice, for few rows and for many: a refusal counts both."""

    def both(*args: Any, **options: Any) -> Choice:
        return Choice((1, 2), (*candidates(torch.float32, CPU)[:1], Form("bf16", torch.bfloat16, "dense")))

    def twice(kind: Kind, samples: Sequence[QuantizedWeight], *args: Any, **_: Any) -> PrecisionChoice:
        forms = precision_forms(kind, CPU)
        first, second = next((a, b) for a in forms for b in forms if a.layout != b.layout)
        return PrecisionChoice((1, 2), (first, second), kind)

    def one(kind: Kind, samples: Sequence[QuantizedWeight], *args: Any, **_: Any) -> PrecisionChoice:
        return PrecisionChoice((1,), twice(kind, samples).forms[:1], kind)

    monkeypatch.setattr("engine.models.linears.choose", lambda *_, **__: Choice((1,), both().forms[:1]))
    monkeypatch.setattr("engine.models.linears.choose_precision", one)
    once = drafting(model, kind, spec_self_dtype="int4").core.drafts.weight_bytes
    monkeypatch.setattr("engine.models.linears.choose", both)
    monkeypatch.setattr("engine.models.linears.choose_precision", twice)
    engine = drafting(model, "off", spec_self_dtype="int4")
    rid = engine.submit(prompts(1)[0], GREEDY)
    monkeypatch.setattr(draft_models, "free_bytes", lambda _: 0)
    why = change(engine, speculation=kind)
    assert engine.heard.done[rid].finish == "length"
    monkeypatch.undo()
    monkeypatch.setattr("engine.models.linears.choose_precision", twice)
    assert change(engine, speculation=kind) == ""
    held = engine.core.drafts.weight_bytes
    assert held > 1.3 * once
    told = float(re.findall(r"would take ([0-9.]+) MiB of weights", why)[0]) * (1 << 20)
    assert held <= told + 6000
    assert told <= 1.05 * held


def test_a_pool_that_leaves_no_room_for_drafts_is_refused(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = drafting(model, "draft")
    pool = engine.core.layout.pool_bytes
    monkeypatch.setattr(draft_models, "free_bytes", lambda _: pool)
    assert "would take" in change(engine, kv_pool_gib=3 * pool / (1 << 30))
    assert change(engine, kv_pool_gib=pool / 2 / (1 << 30)) == ""
    assert engine.core.speculator.kind == "draft"


def test_memory_that_is_gone_after_all_puts_everything_back(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, long = drafting(model, "self"), Sampling(max_tokens=300, ignore_eos=True)
    rid = engine.submit(prompts(1)[0], long)
    for _ in range(4):
        engine.core.step()

    def no_memory(*_args: object, **_options: object) -> None:
        raise MemoryError("no memory for a draft model")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.drafts, "_load", no_memory)
        engine.set(speculation="draft")
        while not engine.heard.applies:
            engine.core.step()
    assert engine.heard.applies[-1].why == "no memory for a draft model"
    assert engine.core.speculator.kind == "self"
    before = total(engine, "drafted_tok")
    engine.run()
    assert engine.ids(rid) == Engine(model).generate(prompts(1), long)[0]
    assert total(engine, "drafted_tok") > before


def test_no_error_of_loading_ends_the_engine(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody thought of, and another model where the draft model was: nothing was changed yet."""
    engine = drafting(model, "off")

    def fault(*_args: object, **_options: object) -> None:
        raise KeyError("rope")

    monkeypatch.setattr(engine.core.drafts, "_load", fault)
    assert change(engine, speculation="draft") == "what it needs could not be loaded: KeyError: 'rope'"
    monkeypatch.setattr(engine.core.drafts, "_load", lambda progress: load(tiny_folder("mistral")))
    assert "is another model than when the engine started" in change(engine, speculation="draft")
    assert engine.core.knobs["speculation"] == "off"
    assert engine.generate(prompts(1), GREEDY) == Engine(model).generate(prompts(1), GREEDY)


def test_a_pool_that_fills_a_card_leaves_room_for_a_draft_model(model: LoadedModel) -> None:
    """For its weights, where they are not there yet, and for as many blocks of its own keys and values."""
    for kind in ("off", "draft"):
        drafts = drafting(model, kind).core.drafts
        there = drafts.weight_bytes
        own = drafts.leave_room(1 << 30)
        blocks = own // drafts._runner.kv_bytes_per_block(16)
        weights = 0 if there else drafts._draft_bytes
        taken = own + blocks * drafts._bytes_per_block(16) + weights
        assert 0.999 * (1 << 30) < taken <= 1 << 30
        assert drafts.leave_room(0) == 0
    assert Engine(model).core.drafts.leave_room(1 << 30) == 1 << 30


@pytest.mark.parametrize("kind", ["draft", "self"])
def test_requests_go_on_while_weights_are_loaded(
    model: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading waits here until ten further steps were computed, and only then are drafts made."""
    engine = drafting(model, "off")
    core, may_end = engine.core, threading.Event()
    get = core.drafts._get

    def slow(*args: Any) -> Any:
        assert may_end.wait(60), "no step was computed meanwhile"
        return get(*args)

    monkeypatch.setattr(core.drafts, "_get", slow)
    long = Sampling(max_tokens=120, ignore_eos=True)
    rids = [engine.submit(text, long) for text in prompts()]
    core.step()
    engine.set(speculation=kind)
    for _ in range(10):
        assert core.step()
        assert (core.knobs.pending is None, core.knobs["speculation"]) == (False, "off")
    assert len(engine.heard.steps) == 11
    assert [step.output_tok for step in engine.heard.steps[1:]] == [4] * 10
    with pytest.raises(PatchRefused, match="still being applied"):
        engine.set(spec_tokens=2)
    core.cancel(rids[:1])
    may_end.set()
    while core.knobs.pending is not None:
        core.step()
    assert engine.heard.applies[-1].result == "ok"
    engine.run()
    assert total(engine, "drafted_tok") > 0
    wants = Engine(model).generate(prompts(), long)
    assert [engine.ids(rid) for rid in rids[1:]] == wants[1:]
    assert engine.heard.done[rids[0]].finish == "cancelled"


@pytest.mark.parametrize(
    "changes", [{"head_dim": 16}, {"num_hidden_layers": 3}, {"num_key_value_heads": 9}, {"sliding_window": 8}]
)
def test_a_draft_model_that_became_another_one_is_refused(
    model: LoadedModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """I02: its pool, its windows and what it takes of memory are those of the model that was there at start.
    Once it is there again it drafts."""
    folder, wants = tmp_path / "draft", Engine(model).generate(prompts(), GREEDY)
    shutil.copytree(tiny_folder("mistral"), folder)
    engine = Engine(model, draft_model=folder, spec_adaptive=False)
    shutil.rmtree(folder)
    tiny_models.build(folder, "mistral", **changes)
    why = change(engine, speculation="draft")
    assert f"draft ({folder}) is another model than when the engine started" in why
    assert (engine.core.knobs["speculation"], engine.core.drafts.weight_bytes) == ("off", 0)
    shutil.rmtree(folder)
    shutil.copytree(tiny_folder("mistral"), folder)
    assert change(engine, speculation="draft") == ""
    assert engine.generate(prompts(), GREEDY) == wants
    assert total(engine, "drafted_tok") > 0


def test_an_engine_that_is_stopped_waits_for_no_weights(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading ends where it next tells how far it is."""
    engine, stop, begun = drafting(model, "off"), threading.Event(), threading.Event()

    def endless(_wanted: object, progress: Progress) -> None:
        begun.set()
        while True:
            progress("loading", 1, 2)
            time.sleep(0.001)

    monkeypatch.setattr(engine.core.drafts, "_get", endless)
    thread = threading.Thread(target=engine.core.run, args=(stop,))
    thread.start()
    engine.set(speculation="draft")
    assert begun.wait(30)
    stop.set()
    engine.core.wake()
    thread.join(30)
    assert not thread.is_alive()
    assert engine.core.knobs["speculation"] == "off"


# --- the precision of the weights -----------------------------------------------------------------------


def test_a_draft_that_would_be_the_model_itself_is_refused(model: LoadedModel) -> None:
    engine = drafting(model, "self", spec_self_dtype="int4")
    assert change(engine, weight_dtype="int8") == ""
    assert "weight_dtype is int4" in change(engine, weight_dtype="int4")
    assert engine.core.knobs["weight_dtype"] == "int8"
    assert "weight_dtype is int8" in change(engine, spec_self_dtype="int8")
    assert change(engine, speculation="off") == ""
    assert change(engine, weight_dtype="int4", spec_self_dtype="int8") == ""
    assert "weight_dtype is int4" in change(engine, speculation="self")


@pytest.mark.parametrize("high", ["head", "none", "ends"])
def test_weights_change_their_precision_while_the_model_drafts_for_itself(
    model: LoadedModel, high: str
) -> None:
    """In the middle of answers: each text is that of its precision, and the draft stays as it was."""
    knobs: dict[str, Any] = {"high_precision": high, "int4_method": "rtn", "prefix_cache": False}
    wants = Engine(model, weight_dtype="int8", **knobs).generate(prompts(), GREEDY)
    engine = drafting(model, "self", spec_self_dtype="int4", **knobs)
    held = engine.core.drafts.weight_bytes
    engine.generate(prompts(), GREEDY)
    for text in prompts():
        engine.submit(text, GREEDY)
    for _ in range(3):
        engine.core.step()
    assert change(engine, weight_dtype="int8") == ""
    before = total(engine, "drafted_tok")
    assert engine.generate(prompts(), GREEDY) == wants
    assert total(engine, "drafted_tok") > before
    assert engine.core.drafts.weight_bytes == held
    assert change(engine, weight_dtype="model") == ""
    assert engine.generate(prompts(), GREEDY) == Engine(model, **knobs).generate(prompts(), GREEDY)


# --- failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["draft", "self"])
@pytest.mark.parametrize("fault", ["not finite", "an error"])
def test_a_draft_model_that_fails_is_given_up_and_no_request_is(
    model: LoadedModel,
    kind: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A25: the reason is told, memory goes back, and switching it off and on tries again."""
    wants = Engine(model).generate(prompts(), GREEDY)
    engine = drafting(model, kind)
    drafter = engine.core.speculator._drafter
    assert isinstance(drafter, RoundDrafter)
    forward, calls = drafter._decoder.forward, [0]

    def faulty(*args: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] < 5:
            return forward(*args)
        if fault == "an error":
            raise RuntimeError("a kernel failed")
        return torch.full_like(forward(*args), float("nan"))

    monkeypatch.setattr(drafter._decoder, "forward", faulty)
    del drafter
    assert engine.generate(prompts(), GREEDY) == wants
    assert {done.finish for done in engine.heard.done.values()} == {"length"}
    reason = engine.core.state().speculation
    assert reason.startswith(f"speculation={kind} was given up because drafting failed: ")
    assert ("are not finite" if fault == "not finite" else "a kernel failed") in reason
    assert reason in caplog.text
    monkeypatch.undo()
    assert engine.core.drafts.kv_bytes == 0
    drafted = total(engine, "drafted_tok")
    engine.generate(prompts(2, seed=5), GREEDY)
    assert total(engine, "drafted_tok") == drafted
    assert change(engine, speculation="off") == change(engine, speculation=kind) == ""
    assert engine.core.state().speculation == ""
    assert engine.generate(prompts(), GREEDY) == wants
    assert total(engine, "drafted_tok") > drafted


def test_a_draft_that_fails_cleans_what_it_wrote_and_nothing_else(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that the target filled before are left for the target to judge."""
    engine = drafting(model, "self", block_size=4)
    scheduler, drafter = engine.core.scheduler, engine.core.speculator._drafter
    assert isinstance(drafter, RoundDrafter)
    behind, seen = list[list[int]](), list[list[int]]()

    def faulty(*_: object) -> torch.Tensor:
        behind[:] = [r.block_table[(r.num_tokens - 1) // 4 :] for r in scheduler.running]
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(drafter._decoder, "forward", faulty)
    monkeypatch.setattr(KVCache, "scrub", lambda _kv, blocks: seen.append(list(blocks)))
    engine.generate(prompts(), GREEDY)
    assert "a kernel failed" in engine.core.state().speculation
    assert len(seen) >= 1
    assert all(blocks in behind for blocks in seen)


# --- sampling -------------------------------------------------------------------------------------------


def test_answers_that_chance_has_a_part_in_are_not_kept(model: LoadedModel) -> None:
    """With rejection a seeded answer depends on its drafts: the result cache takes greedy ones alone, and
    none that was begun before."""
    seeded = Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    (text,) = prompts(1)

    def kept(engine: Engine, sampling: Sampling) -> bool:
        engine.generate([text], sampling)
        rid = engine.submit(text, sampling)
        engine.run()
        return engine.heard.done[rid].row.result_cached

    for kind in ("draft", "self"):
        engine = drafting(model, kind, spec_sampling="rejection", result_cache=True)
        assert (kept(engine, seeded), kept(engine, GREEDY)) == (False, True)
        engine = drafting(model, kind, result_cache=True)
        engine.submit(text, seeded)
        for _ in range(3):
            engine.core.step()
        assert change(engine, spec_sampling="rejection") == change(engine, spec_sampling="coupled") == ""
        rid = engine.submit(text, seeded)
        engine.run()
        assert not engine.heard.done[rid].row.result_cached
        assert kept(engine, seeded)
    assert kept(drafting(model, "ngram", spec_sampling="rejection", result_cache=True), seeded)


LAWS = [
    Sampling(temperature=0.5, top_k=5), Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=2.0, top_k=5),
    Sampling(temperature=2.0, top_k=6, top_p=0.7), Sampling(temperature=1.0, top_k=6, min_p=0.2),
    Sampling(temperature=1.5, top_k=4, repetition_penalty=1.5, frequency_penalty=2.0, presence_penalty=1.0),
]  # fmt: skip


def law(reference: Any, prompt: Sequence[int], s: Sampling, count: int) -> dict[tuple[int, ...], float]:
    """The probability of each output of ``count`` tokens, in double precision."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        outputs = list(found)
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *out] for out in outputs])).logits[:, -1].double()
        longer: dict[tuple[int, ...], float] = {}
        for out, row in zip(outputs, logits, strict=True):
            for token in {*prompt, *out}:
                row[token] = (
                    row[token] / s.repetition_penalty if row[token] > 0 else row[token] * s.repetition_penalty
                )
            for token, times in Counter(out).items():
                row[token] -= s.frequency_penalty * times + s.presence_penalty
            values, ids = (row / s.temperature).topk(s.top_k)
            p = values.softmax(0)
            p[p.cumsum(0) - p >= s.top_p] = 0.0
            p[p < s.min_p * p[0]] = 0.0
            p /= p.sum()
            longer |= {(*out, int(i)): found[out] * float(q) for i, q in zip(ids, p, strict=True) if q > 0}
        found = longer
    return found


@pytest.mark.parametrize("sampling", LAWS, ids=range(len(LAWS)))
@pytest.mark.parametrize("kind", ["draft", "self"])
def test_rejection_keeps_the_distribution_of_the_target(kind: str, sampling: Sampling) -> None:
    """Chi-square of whole outputs of three tokens, through the running engine: 2000 seeded requests, of whose
    drafts some are accepted and some are not, in batches with others."""
    folder = tiny_folder("llama", num_hidden_layers=1)
    model, prompt, number = load(folder), [7, 50, 123, 9], 2000
    expected = law(tiny_models.reference(folder), prompt, sampling, 3)
    # A draft model whose distributions overlap with the target's, and differ.
    near = tiny_folder("llama", num_hidden_layers=1, rms_norm_eps=0.9)
    knobs: dict[str, Any] = {"spec_self_dtype": "int8"}
    engine = Engine(
        model, draft_model=near, speculation=kind, spec_sampling="rejection", spec_adaptive=False,
        pool_tokens=4096, **knobs,
    )  # fmt: skip
    outputs: Counter[tuple[int, ...]] = Counter()
    settings = {name: getattr(sampling, name) for name in Sampling.__struct_fields__}
    rids = []
    for seed in range(number):
        asked = Sampling(**{**settings, "seed": seed, "max_tokens": 4, "ignore_eos": True})
        rids.append(engine.submit(prompt, asked, stream=False))
    engine.run()
    for rid in rids:
        outputs[tuple(engine.ids(rid)[:3])] += 1
    assert set(outputs) <= set(expected)
    assert 0 < total(engine, "accepted_tok") < total(engine, "drafted_tok")
    cells = [(outputs[out], number * p) for out, p in expected.items() if number * p >= 5]
    rest = number - sum(seen for seen, _ in cells), number - sum(want for _, want in cells)
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    freedom = len(cells) - 1
    assert freedom >= 3
    # Wilson and Hilferty's approximation of the chi-square quantile at 1e-4.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit
