"""Every text of the window exists in Chinese, with the same placeholders."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from PySide6.QtWidgets import QApplication, QWidget

import engine
from app import i18n
from app.dialogs.prompt import attach_dialog
from engine.config import ConfigError, EngineConfig
from engine.knobs import KNOBS
from engine.models.errors import ModelError
from engine.models.loader import load_model
from tests.tiny_models import build

APP = Path(i18n.__file__).parent
ENGINE = Path(engine.__file__).parent
CATALOGUE = i18n.Catalogue("zh_CN")
HOLES = re.compile(r"\{(\w+)\}")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
SAME_IN_BOTH = {"TTFT", "TPOT", "TTFT p50", "TTFT p99", "TPOT p50", "TTFT p95", "TPOT p95", "{n} ({time})",
                "Decodeck {version}", "{name}: {why}", "{name}: {value}",
                "{share} ({done} of {total})"}  # fmt: skip


def sources() -> dict[str, str]:
    """All literals given to `tr` and `N_`, with where they stand."""
    found: dict[str, str] = {}
    for path in sorted(APP.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("tr", "N_")
            ):
                assert node.args, f"{path.name}:{node.lineno}"
                if path.name == "i18n.py":
                    continue
                text = ast.literal_eval(node.args[0])  # fails for what is no literal
                found[text] = f"{path.name}:{node.lineno}"
    return found | {many: at for _, many, at in plurals()}


def plurals() -> list[tuple[str, str, str]]:
    """Both literals given to each `tr_n`, with where they stand. The first is English alone."""
    return [
        (ast.literal_eval(node.args[0]), ast.literal_eval(node.args[1]), f"{path.name}:{node.lineno}")
        for path in sorted(APP.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tr_n"
    ]


def test_one_and_many_are_told_with_the_same_figures() -> None:
    for one, many, at in plurals():
        assert set(HOLES.findall(one)) | {"n"} == set(HOLES.findall(many)) | {"n"}, at
        assert one != many, at


COUNTABLE = r"(?:tokens|requests|steps|blocks|times|lines|answers|tensors|files|GPUs|rows|drafts|graphs)"


def test_what_is_counted_is_told_as_one_where_it_is_one() -> None:
    """No "1 tokens over 1 requests": each text with a number before a plural has a form for one."""
    bare = re.compile(rf"\{{\w+\}} (?:[a-z]+ )?{COUNTABLE}\b")
    many = {text for _, text, _ in plurals()}
    # Never one: lengths with decimals, what is at least sixteen, and rows, which "1 row" stands beside.
    never = ("{length} tokens", "which takes {limit} tokens", "{n} rows")
    left = [text for text in sources() if bare.search(text) and text not in many]
    assert not [text for text in left if not any(part in text for part in never)]


@pytest.mark.parametrize("n", ["1", "2"])
def test_a_template_fits_one_as_well_as_many(n: str) -> None:
    s = "" if n == "1" else "s"
    for text in (
        f"the prompt has {n} token{s}, the limit is 9 with the new ones; shorten it to 8",
        f"{n} prompt token{s} and up to {n} new one{s} need {n} block{s} of {n} token{s}, the pool has 5; "
        "ask for fewer",
        f"the best drafts, {n} token{s} over {n} request{s}, would bring 1.10 tokens each in 1.50 times the "
        f"time of a step of {n} token{s}; 10% of the first draft tokens hold",
        f"{n} request{s} may wait, and so many do; come back later",
        f"a.gguf lacks {n} tensor{s}: x",
    ):
        assert CHINESE.search(CATALOGUE.foreign(text)), text


def test_every_source_is_translated_and_nothing_is_left_over() -> None:
    used = sources()
    missing = {text: at for text, at in used.items() if text not in CATALOGUE.texts}
    assert not missing
    assert not [text for text in CATALOGUE.texts if text not in used]


def test_translations_keep_the_placeholders() -> None:
    for source, target in (CATALOGUE.texts | CATALOGUE.templates).items():
        assert sorted(HOLES.findall(source)) == sorted(HOLES.findall(target)), source


def test_translations_are_chinese() -> None:
    plain = [
        source
        for source, target in CATALOGUE.texts.items()
        if not CHINESE.search(target) and source not in SAME_IN_BOTH
    ]
    assert not plain


def test_mnemonics_are_kept() -> None:
    for source, target in CATALOGUE.texts.items():
        if source.startswith("&"):
            assert f"(&{source[1]})" in target


@pytest.mark.parametrize("knob", [knob.id for knob in KNOBS])
def test_every_knob_of_the_registry_has_a_chinese_name_and_help(knob: str) -> None:
    title, text = CATALOGUE.knobs[knob]
    assert title
    assert CHINESE.search(text)


def test_a_text_of_the_engine_is_matched_with_what_it_holds() -> None:
    i18n.use("zh_CN")
    text = i18n.tr_engine("The engine's process has ended: it was killed by SIGKILL.")
    assert text == "引擎进程已结束：被 SIGKILL 终止。"
    assert i18n.tr_engine("something nobody foresaw") == "something nobody foresaw"


def test_no_template_takes_in_what_a_later_one_says() -> None:
    """The end of an engine soon after a change was half translated: a shorter template took it in."""
    text = CATALOGUE.foreign(
        "The engine's process has ended: it was killed by SIGKILL. That was 9.3 s after a change of its "
        "configuration; a restart goes back to the one before."
    )
    assert text.startswith("引擎进程已结束：被 SIGKILL 终止。")
    assert "9.3" in text
    assert "change" not in text
    swallowed = [
        source
        for source, target in CATALOGUE.templates.items()
        if CATALOGUE.foreign(HOLES.sub("7", source)) != HOLES.sub("7", target)
    ]
    assert not swallowed


TOLD = {"CannotMap", "ConfigError", "DeviceError", "MemoryError", "ModelError", "NoRoom"}
"""Errors of the engine whose text the console shows as it is, with advice."""
TOLD_BY = {"varlen_rows.py", "varlen.py", "availability.py", "attention_choice.py", "cards.py", "hardware.py",
           "driver.py", "gpm.py", "sdpa.py"}  # fmt: skip
"""Where functions return why something cannot be used here."""


def sample(node: ast.AST) -> str | None:
    """A text of the engine with 7 for everything that it holds; None for what is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(str(part.value) if isinstance(part, ast.Constant) else held(part) for part in node.values)


def held(part: ast.expr) -> str:
    """7 for what a text holds, with its noun where that is counted."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "counted":
        return f"7 {ast.literal_eval(value.args[1])}s"
    return "7"


def told_texts() -> dict[str, str]:
    """Texts of errors in `TOLD`, and sentences that functions of `TOLD_BY` return, with where they stand."""
    found: dict[str, str] = {}
    for path in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            told: ast.AST | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TOLD:
                told = node.args[0] if node.args else None
            elif isinstance(node, ast.Return) and path.name in TOLD_BY:
                told = node.value
            text = None if told is None else sample(told)
            if text is not None and " " in text.replace("7", "") and re.search("[a-z]", text):
                found[text] = f"{path.relative_to(ENGINE)}:{getattr(node, 'lineno', 0)}"
    return found


def test_what_the_engine_says_of_memory_devices_and_models_is_translated() -> None:
    texts = told_texts()
    assert len(texts) > 150
    assert not {text: at for text, at in texts.items() if not CHINESE.search(CATALOGUE.foreign(text))}


@pytest.mark.parametrize(
    "text",
    [
        "out of device memory: 2.00 GiB were asked for, {figures}",
        "out of device memory: {figures}",
        "out of device memory: CUDA error: out of memory, which does not say how much was asked for; "
        "{figures}; it is taken beside what torch holds: end other programs on the card, or give the KV pool "
        "less (kv_pool_gib, gpu_memory_utilization)",
        "no memory for a KV pool of 10 blocks of 16 tokens (1.00 GiB on cuda:0): 1.00 GiB are needed, "
        "{figures}; ask for fewer blocks",
        "out of memory while loading: no memory for pinned staging memory: 0.02 GiB are needed, 0.01 GiB can "
        "be had on this machine; free host memory, or allow more of it to be locked (ulimit -l)",
        "no memory for a KV pool of 10 blocks of 16 tokens (1.00 GiB on cpu): 1.00 GiB are needed, 0.50 GiB "
        "can be had within the limit of address space (ulimit -v); ask for fewer blocks",
        "no memory for a KV pool of 10 blocks of 16 tokens (1.00 GiB on cpu): 1.00 GiB are needed, 0.50 GiB "
        "can be had within the limit of this control group; ask for fewer blocks",
    ],
)
def test_shortages_of_memory_are_translated_to_the_end(text: str) -> None:
    figures = (
        "1.00 GiB of the card's 141.00 GiB are free; torch holds 130.00 GiB, of which 129.00 GiB are in use"
    )
    shown = CATALOGUE.foreign(text.format(figures=figures))
    kept = "GiB|KV|torch|cuda:0|CUDA error: out of memory|ulimit -[lv]|cpu|kv_pool_gib|gpu_memory_utilization"
    left = re.sub(kept, "", shown)
    assert not re.search(r"[a-z]{2,}", left), shown
    assert ("141.00 GiB" in shown) == ("{figures}" in text)


def test_a_kernel_that_does_not_fit_is_told_with_what_it_needs() -> None:
    """As `engine.kernels.launch` says it, with Triton's own words for what is lacking."""
    shown = CATALOGUE.foreign(
        "the kernel add_rmsnorm over [3, 2] (y [3, 40] float32; BLOCK=64, KIND=none) cannot be launched "
        "(OutOfResources: out of resource: shared memory, Required: 139520, Hardware limit: 101376. Reducing "
        "block sizes or `num_stages` may help.); switch off the knob that chose this kernel"
    )
    assert shown == (
        "算子 add_rmsnorm（网格 [3, 2]；y [3, 40] float32; BLOCK=64, KIND=none）无法启动（OutOfResources："
        "资源不足：共享内存 需要 139520，硬件上限为 101376）；请关闭选用此算子的优化项"
    )


@pytest.mark.parametrize(
    "text",
    [
        "a KV pool of 107 B does not hold even one block of 16 tokens, which takes 8 KiB",
        "a swap space of 1.024 MiB does not hold even one block of 1024 tokens, which takes 2.5 MiB",
        "a KV pool of 500.00 GiB and 0.00 GiB of host memory have 9000000 blocks of 16 tokens, at most "
        "4194304 are possible; choose a larger block_size or less memory",
    ],
)
def test_a_pool_that_cannot_be_had_is_translated_to_the_end(text: str) -> None:
    shown = CATALOGUE.foreign(text)
    assert CHINESE.search(shown)
    assert not re.search(r"[a-z]{2,}", re.sub(r"[GMK]iB|KV|block_size", "", shown)), shown
    assert re.findall(r"\d[\d.]*", shown) == re.findall(r"\d[\d.]*", text)


def test_what_is_wrong_with_a_model_is_translated_as_it_is_told(tmp_path: Path) -> None:
    """With advice behind it, and within the sentence about the engine that ended."""
    said = {
        "a.bin": "也不是 GGUF 文件：.bin 文件可以运行代码，因此拒绝；请把模型转换为 safetensors",
        "a.safetensors": "既不是模型文件夹，也不是 GGUF 文件：请给出 config.json 所在的文件夹",
        "code": "此模型要求运行自带的代码（config.json 中的 auto_map），这里从不这样做；",
        "kind": "未知架构 'phi3'；支持：",
        "json": "config.json 不是有效的 JSON：",
        "tokens": "没有 tokenizer.json",
        "nowhere": "无法打开 ",
    }
    (tmp_path / "a.bin").touch()
    (tmp_path / "a.safetensors").touch()
    configs: dict[str, str] = {
        "code": json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "its.own"}}),
        "kind": json.dumps({"model_type": "phi3"}),
        "json": "{",
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config, encoding="utf-8")
    build(tmp_path / "tokens", "llama")
    (tmp_path / "tokens" / "tokenizer.json").unlink()
    for name, text in said.items():
        with pytest.raises(ModelError) as found:
            load_model(tmp_path / name, device=torch.device("cpu"), progress=lambda *_: None)
        shown = CATALOGUE.foreign(f"The engine's process has ended: {found.value} (exit code 4).")
        assert text in shown
        assert shown.startswith("引擎进程已结束：")
        assert shown.endswith("（退出码 4）。")


def test_a_fault_of_one_layer_and_a_start_value_are_translated_to_the_end() -> None:
    """What names a layer or an option says the rest in the reader's language too."""
    shown = CATALOGUE.foreign(
        "layer model.layers.0.q_proj: 100 input channels are no multiple of the group size 64"
    )
    assert shown.startswith("层 model.layers.0.q_proj：")
    assert not re.search(r"[a-z]{3,}", shown.partition("：")[2]), shown
    for config in ({"threads": 0}, {"max_model_len": 1}, {"kv_pool_bytes": 0}):
        with pytest.raises(ConfigError) as found:
            EngineConfig(model=Path("m"), **config)  # type: ignore[arg-type]
        assert CHINESE.search(CATALOGUE.foreign(str(found.value)))


def test_unknown_languages_are_refused_and_locales_are_picked() -> None:
    with pytest.raises(ValueError, match="klingon"):
        i18n.Catalogue("klingon")
    assert [i18n.pick(name) for name in ("zh_CN.UTF-8", "zh-Hans", "de_DE", "C")] == [
        "zh_CN",
        "zh_CN",
        "en",
        "en",
    ]


def test_one_word_is_used_for_one_thing() -> None:
    """词元 for tokens, 算子 for kernels and CUDA 图 for CUDA graphs, but in names of knobs and switches. The
    kernel that ends a process is the operating system's.
    """
    shown = [*CATALOGUE.texts.values(), *CATALOGUE.templates.values()]
    shown += [text for knob in CATALOGUE.knobs.values() for text in knob]
    for text in shown:
        words = re.sub(r"\{\w+\}|\w+_\w+", "", text)
        assert not re.search(r"内核(?!在此期间)|(?<![a-zA-Z])(tokens?|graphs?)(?![a-zA-Z])", words), text


def test_the_address_that_is_suggested_is_the_one_of_the_readme(qapp: QApplication) -> None:
    readme = (APP.parent / "README.md").read_text(encoding="utf-8")
    parent = QWidget()
    for language in ("en", "zh_CN"):
        i18n.use(language)
        dialog = attach_dialog(parent, lambda _address: None)
        suggested = re.findall(r"tcp://[\d.]+:\d+", dialog.labelText())
        assert suggested
        assert f"--ctl {suggested[0]}" in readme
        dialog.close()
    parent.deleteLater()
