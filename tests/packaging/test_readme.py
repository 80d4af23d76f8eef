"""The READMEs against what they describe: knobs against the registry, links against the files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.i18n import Catalogue
from engine.knob import KnobContext
from engine.knobs import BY_ID, list_knobs
from ipc.messages import KnobInfo, KnobValue

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh.md")
FIRST_STEPS = ("Shared prefix", "Start load", "Optimizations", "Prefix cache", "Save baseline")


def _rows(text: str) -> dict[str, list[str]]:
    """The table rows whose first cell is a name in backticks."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def _shown(value: KnobValue) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _values(knob: KnobInfo, name: str) -> set[str]:
    if knob.type == "bool":
        return {"on", "off"}
    if knob.type == "choice":
        return {choice for choice in knob.choices if choice not in knob.choice_reasons}
    assert knob.minimum is not None
    assert knob.maximum is not None
    unit = knob.unit if name == "README.md" else Catalogue("zh_CN").foreign(knob.unit)
    return {f"{knob.minimum:.7g}", f"{knob.maximum:.7g}", unit} - {""}


@pytest.mark.parametrize("name", READMES)
def test_knob_table_says_what_the_registry_says(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    rows = _rows(text)
    knobs = list_knobs(KnobContext(draft_model="given", attention=BY_ID["attention"].choices))
    built = {knob.id: knob for knob in knobs if knob.available}
    assert set(rows) == set(built)
    for knob_id, (values, default, applies, purpose) in rows.items():
        knob = built[knob_id]
        assert set(re.split(r", | to | – | ", values)) == _values(knob, name), knob_id
        assert default == _shown(knob.default), knob_id
        assert applies == knob.apply, knob_id
        assert purpose
    for knob in knobs:
        assert f"`{knob.id}`" in text, f"{knob.id} is nowhere in {name}"
        for choice, reason in knob.choice_reasons.items():
            assert f"`{choice}`" in text, f"{knob.id}={choice} ({reason}) is nowhere in {name}"


@pytest.mark.parametrize("name", READMES)
def test_the_first_steps_name_what_the_window_shows(name: str) -> None:
    """And their load is the one in which the prefix cache shows: prompts that share nothing hit nothing."""
    steps = [line for line in (ROOT / name).read_text("utf-8").splitlines() if re.match(r"\d\. ", line)]
    bold = re.findall(r"\*\*(.+?)\*\*", "\n".join(steps[:4]))
    table = json.loads((ROOT / "resources/i18n/zh_CN.json").read_text("utf-8"))
    texts = {**table["texts"], **{BY_ID[knob].title: told[0] for knob, told in table["knobs"].items()}}
    shown = [texts[each] for each in bold] if name == "README.md" else bold
    assert shown == [texts[each] for each in FIRST_STEPS]


@pytest.mark.parametrize("name", [*READMES, "tests/bench/README.md"])
def test_linked_files_are_there(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (folder / target).exists(), f"{name} links to {target}"
    for script in re.findall(r"bash (packaging/\S+\.sh)", text):
        assert (ROOT / script).exists(), f"{name} runs {script}"


@pytest.mark.parametrize("name", READMES)
def test_screenshots_are_small_enough_to_read_on_the_web(name: str) -> None:
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / name).read_text("utf-8"))
    assert images
    for image in images:
        assert (ROOT / image).stat().st_size < 500_000


def test_the_chinese_texts_call_a_token_by_one_name() -> None:
    """Names in the code's own words aside, such as a file or a knob."""
    table = json.loads((ROOT / "resources/i18n/zh_CN.json").read_text("utf-8"))
    texts = [text for key in ("texts", "templates") for text in table[key].values()]
    texts += [text for told in table["knobs"].values() for text in told]
    prose = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / "README.zh.md").read_text("utf-8"), flags=re.DOTALL)
    texts += prose.splitlines()
    code = r"[\w.]*(?:_tokens|tokenizer)[\w.]*|\{\w+\}"
    left = [text for text in texts if re.search("token|令牌|标记", re.sub(code, "", text), re.IGNORECASE)]
    assert not left


@pytest.mark.parametrize("name", READMES)
def test_lines_of_prose_are_short_enough_to_review(name: str) -> None:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    assert not [line for line in lines if len(line) > 150 and not line.startswith("|")]
