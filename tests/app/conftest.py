"""A real engine on a tiny model, shared by the tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.net.types import LinkState
from tests.app.engines import Console, spec, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder under a path with spaces and several scripts."""
    return write_tiny_model(tmp_path_factory.mktemp("Модели ü 空 x") / "tiny model")


@pytest.fixture(scope="session")
def live(tiny_model: Path) -> Iterator[Console]:
    """A console whose engine is ready. Tests leave the engine as they found it."""
    console = Console()
    console.link.launch(spec(tiny_model))
    try:
        console.until_state(LinkState.READY, LinkState.FAILED, LinkState.DEAD)
        yield console
    finally:
        console.close()
