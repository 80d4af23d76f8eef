"""The head of a GGUF file: its settings and where its tensors are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The
``gguf`` package reads the same (the tests hold the two together), but it takes 3 s for a vocabulary of 49,000
tokens and trusts every count it finds; here every count is held against the bytes that are there.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.models.errors import ModelError

MAGIC = b"GGUF"
MAX_ENTRIES = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """``shape`` as torch orders it (outermost first), ``kind`` as ggml numbers it, ``offset`` in the file."""

    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Settings by key (scalars, strings, lists of strings, numpy arrays) and tensors by name."""

    path: Path
    size: int
    settings: dict[str, Any]
    tensors: dict[str, Tensor]


class _Cursor:
    """Reads on through a file and refuses to read past its end."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self._path, self.left = file, path, size

    def bytes(self, count: int) -> bytes:
        if count > self.left:
            raise ModelError(f"{self._path.name} is damaged or incomplete: it ends within its settings")
        self.left -= count
        return self._file.read(count)

    def one(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize(code)))[0]

    def count(self, limit: int, what: str) -> int:
        value: int = self.one("Q")
        if value > limit:
            raise ModelError(f"{self._path.name} is damaged: it claims {value} {what}")
        return value

    def text(self) -> str:
        raw = self.bytes(self.count(self.left, "bytes in a text"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path.name} is damaged: a text is not UTF-8 ({error})") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.one("I"))
        if kind in _SCALARS:
            return self.one(_SCALARS[kind])
        raise ModelError(f"{self._path.name} holds a setting of unknown type {kind}")

    def _array(self, kind: int) -> list[str] | np.ndarray[Any, Any]:
        count = self.count(self.left, "entries in a list")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._path.name} holds a list of unknown type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind] if _SCALARS[kind] != "?" else "?")
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype=dtype)


def read(path: Path) -> GgufFile:
    """Read the head of a file. Raises `ModelError`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(file, path, size)
        if cursor.bytes(4) != MAGIC:
            raise ModelError(f"{path.name} is no GGUF file")
        version = cursor.one("I")
        if version not in (2, 3):
            raise ModelError(f"{path.name} is GGUF version {version} (or big endian); 2 and 3 are supported")
        tensor_count = cursor.count(MAX_ENTRIES, "tensors")
        setting_count = cursor.count(MAX_ENTRIES, "settings")
        settings: dict[str, Any] = {}
        for _ in range(setting_count):
            key = cursor.text()
            if key in settings:
                raise ModelError(f"{path.name} is damaged: the setting {key} occurs twice")
            settings[key] = cursor.value(cursor.one("I"))
        raw = [_tensor_head(cursor) for _ in range(tensor_count)]
        start = size - cursor.left
    alignment = settings.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path.name} is damaged: general.alignment is {alignment!r}")
    start += -start % alignment
    tensors = {name: Tensor(kind, shape, start + offset) for name, kind, shape, offset in raw}
    if len(tensors) != len(raw):
        raise ModelError(f"{path.name} is damaged: a tensor occurs twice")
    return GgufFile(path, size, settings, tensors)


def _tensor_head(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.text()
    dims = cursor.one("I")
    if dims > 4:
        raise ModelError(f"the tensor {name} claims {dims} dimensions")
    shape = tuple(cursor.one("Q") for _ in range(dims))
    if math.prod(shape) > 1 << 50:
        raise ModelError(f"the tensor {name} claims the shape {list(shape)}")
    return name, cursor.one("I"), shape[::-1], cursor.one("Q")
