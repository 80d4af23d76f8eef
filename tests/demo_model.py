"""The demo model for tests: ``path()`` anywhere, or the fixture ``demo_model`` (see tests/conftest.py).

Looked for in ``DECODECK_DEMO_MODEL`` (a GGUF file), then in the user's data folder, and fetched there if it
is in neither. Tests that use it carry ``@pytest.mark.demo_model``.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from app import demo_model

_DATA = os.environ.get("DECODECK_DATA")  # as the run was started: a test may point it elsewhere


@functools.cache
def path() -> Path:
    """The demo model's GGUF file. Raises where it cannot be had: a missing model is a failure, not a skip."""
    given = os.environ.get("DECODECK_DEMO_MODEL")
    if not given:
        with pytest.MonkeyPatch.context() as patch:
            if _DATA is None:
                patch.delenv("DECODECK_DATA", raising=False)
            else:
                patch.setenv("DECODECK_DATA", _DATA)
            return demo_model.ensure(demo_model.terminal_progress)
    file = Path(given)
    if not file.is_file() or file.stat().st_size != demo_model.SIZE_BYTES:
        raise FileNotFoundError(
            f"DECODECK_DEMO_MODEL={given} is not the demo model's file of {demo_model.SIZE_BYTES} bytes"
        )
    return file
