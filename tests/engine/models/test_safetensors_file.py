"""Headers of safetensors files: what the library accepts is read alike, what does not add up is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.errors import ModelError
from engine.models.safetensors_file import read_header


def _write(path: Path, header: Any, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "ids": torch.arange(4),
    }
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert set(header) == set(tensors)
    for name, entry in header.items():
        raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert entry.shape == tuple(tensors[name].shape)
        assert raw == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()


_F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": _F32}, b"\0" * 7, "its tensors end at"),
        ({"a": _F32}, b"\0" * 9, "its tensors end at"),
        ({"a": _F32, "b": _F32}, b"\0" * 8, "a gap or an overlap before tensor b"),
        (
            {"a": _F32, "b": {**_F32, "data_offsets": [12, 20]}},
            b"\0" * 20,
            "a gap or an overlap before tensor b",
        ),
        ({"a": {**_F32, "shape": [3]}}, b"\0" * 8, "does not fit"),
        ({"a": {**_F32, "shape": [-2]}}, b"\0" * 8, "does not fit"),
        ({"a": {**_F32, "shape": [2.0]}}, b"\0" * 8, "does not fit"),
        ({"a": {**_F32, "dtype": "F99"}}, b"\0" * 8, "describes tensor 'a' wrongly"),
        ({"a": {"dtype": "F32"}}, b"", "describes tensor 'a' wrongly"),
        ({"a": [1]}, b"", "describes tensor 'a' wrongly"),
        (
            b'{"a":' + json.dumps(_F32).encode() + b',"a":' + json.dumps(_F32).encode() + b"}",
            b"\0" * 8,
            "twice",
        ),
        (b"[1]", b"", "no JSON object"),
        (b"{", b"", "cannot be read"),
        (b"[" * 100_000, b"", "cannot be read"),
        (b"\xff\xfe", b"", "cannot be read"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_header(_write(tmp_path / "m.safetensors", header, data))


@pytest.mark.parametrize(
    "raw", [b"", b"\1\0\0", (1 << 62).to_bytes(8, "little"), b"\x10" + b"\0" * 7 + b"{}"]
)
def test_a_false_header_length_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="no whole safetensors file"):
        read_header(path)


def test_a_header_beyond_the_limit_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(200_000_100)  # sparse
    with pytest.raises(ModelError, match="header 200000000 bytes"):
        read_header(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_mutated_file_is_read_whole_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    header = {"a": _F32, "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}}
    path = _write(tmp_path_factory.mktemp("m") / "m.safetensors", header, bytes(16))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    path.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    try:
        entries = read_header(path)
    except ModelError:
        return
    assert all(e.offset + e.nbytes <= path.stat().st_size for e in entries.values())
