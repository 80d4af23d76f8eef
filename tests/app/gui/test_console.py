"""What the console tells of its files and of a load, whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import msgspec
from PySide6.QtWidgets import QApplication

from app.console import Console, Notice
from app.lab.workload import WorkloadSpec
from app.settings import Settings
from app.store.records import BaselineData
from app.store.store import Store
from tests.app.builders import MODEL, baseline
from tests.app.gui.feed import FeedLink


def heard(console: Console) -> list[Notice]:
    told: list[Notice] = []
    console.noticed.connect(told.append)
    return told


def until(console: Console, so: Callable[[], object]) -> None:
    end = monotonic() + 60.0
    while not so():
        assert monotonic() < end, "it never came"
        console.tick()
        sleep(0.01)


def saved(console: Console, made: BaselineData) -> None:
    ids: list[str] = []
    console.shelf.save(made, ids.append)
    until(console, lambda: ids)


def test_g06_a_damaged_database_is_moved_aside_and_that_is_told(
    qapp: QApplication, link: FeedLink, settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "decodeck.sqlite"
    path.write_bytes(b"no database, but long enough to be looked at" * 100)
    console = Console(link, settings, path)  # type: ignore[arg-type]
    told = heard(console)
    until(console, lambda: told)
    assert told[0].level == "warning"
    assert "was damaged" in told[0].text
    assert "damaged-" in told[0].text
    console.close()


def test_what_is_saved_after_the_database_was_deleted_is_there_and_the_loss_is_told(console: Console) -> None:
    told = heard(console)
    saved(console, baseline("first"))
    path = console.shelf.path
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    saved(console, baseline("second"))
    assert [notice.level for notice in told if "deleted" in notice.text] == ["warning"]
    store = Store(path)
    assert [each.name for each in store.list()] == ["second"]
    store.close()


def test_a_data_folder_that_cannot_be_made_does_not_stop_the_start(
    qapp: QApplication, link: FeedLink, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file, no folder")
    folder = tmp_path / "taken" / "data"
    settings = Settings(folder / "console.ini")
    settings.theme = "light"
    assert settings.theme == "light", "it holds while the window is open"
    console = Console(link, settings, folder / "decodeck.sqlite")  # type: ignore[arg-type]
    told = heard(console)
    until(console, lambda: told)
    assert told[0].level == "error"
    assert str(folder) in told[0].text
    console.close()


def test_a_load_without_an_engine_or_beside_another_is_refused_in_words(
    console: Console, link: FeedLink
) -> None:
    told = heard(console)
    console.start_load(WorkloadSpec())
    assert "no engine" in told.pop().text
    link.ready()
    console.tick()
    console.start_load(WorkloadSpec())
    console.start_load(WorkloadSpec())
    assert [notice.text for notice in told] == ["A load is running; stop it before starting another."]


def test_a_load_is_cut_to_a_short_model_and_that_is_told(console: Console, link: FeedLink) -> None:
    """A model of 256 tokens refused nearly every prompt of the demo load."""
    told = heard(console)
    link.ready()
    link.push(model=msgspec.structs.replace(MODEL, max_model_len=256, vocab_size=49_152))
    console.tick()
    console.start_load(WorkloadSpec(name="chat", input_tok=(32, 256)))
    assert [notice.level for notice in told] == ["warning"]
    assert "takes 256 tokens" in told[0].text
    assert "about 128 tokens at most, answers 64" in told[0].text
    sent = console.load_run.spec
    assert sent is not None
    assert (sent.max_prompt_chars, sent.output_tok) == (3 * 128, (16, 64))
    console.load_run.close()
    console.tick()
    told.clear()
    link.push(model=MODEL)
    console.tick()
    console.start_load(WorkloadSpec(name="chat", input_tok=(32, 256)))
    assert told == []
    assert console.load_run.spec == WorkloadSpec(name="chat", input_tok=(32, 256))
