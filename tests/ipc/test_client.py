"""What a client says of an answer, without an engine."""

from __future__ import annotations

import pytest

from ipc import messages as m
from ipc.client import EngineError


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("policy: no; block_size: 0", "policy: no; block_size: 0 (invalid)"),  # as a refused patch is told
        ("policy: no", "policy: no; block_size: 0 (invalid)"),
        ("refused", "refused; policy: no; block_size: 0 (invalid)"),
    ],
)
def test_an_error_tells_each_reason_once(message: str, told: str) -> None:
    keys = {"policy": "no", "block_size": "0"}
    error = EngineError(m.Error(id=1, code="invalid", message=message, keys=keys))
    assert str(error) == told
    assert error.keys == keys
