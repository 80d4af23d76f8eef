"""Every text of the window exists in Chinese, with the same placeholders."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from app import i18n
from engine.knobs import KNOBS

APP = Path(i18n.__file__).parent
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
    return found


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


def test_unknown_languages_are_refused_and_locales_are_picked() -> None:
    with pytest.raises(ValueError, match="klingon"):
        i18n.Catalogue("klingon")
    assert [i18n.pick(name) for name in ("zh_CN.UTF-8", "zh-Hans", "de_DE", "C")] == [
        "zh_CN",
        "zh_CN",
        "en",
        "en",
    ]
