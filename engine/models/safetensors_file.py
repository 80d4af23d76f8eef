"""Headers of safetensors files, checked before a byte of weights is read.

Format: an 8-byte little-endian length, that many bytes of JSON naming each tensor's dtype, shape and place,
then the data (https://github.com/huggingface/safetensors, README). The library accepts the same files; it is
not used here because it maps a file whole, and because a shard's parts are read straight into place here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.models.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED = {**DTYPES, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}  # what tensors can be read as
STORED["F8_E4M3"] = torch.float8_e4m3fn
_ITEM_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6}
_ITEM_BITS |= {"F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_ITEM_BITS |= {"F64": 64, "I64": 64, "U64": 64, "C64": 64}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: ``dtype`` as the file names it, ``offset`` from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` that refuses a key given twice: which one counts is anyone's guess."""
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(key for key in out if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return out


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name. Raises `ModelError` if anything about the file is inconsistent."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > MAX_HEADER_BYTES or length > size - 8:
            raise ModelError(
                f"{path.name} is no whole safetensors file ({size} bytes, header {length} bytes)"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the header of {path.name} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"the header of {path.name} is no JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != at:
            raise ModelError(f"{path.name} has a gap or an overlap before tensor {name}")
        at += entry.nbytes
    if at != size:
        raise ModelError(f"{path.name} has {size} bytes but its tensors end at {at}: download it again")
    return entries


def _entry(path: Path, name: str, value: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        bits = _ITEM_BITS[dtype] * math.prod(shape)
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path.name} describes tensor {name!r} wrongly: {error!r}") from error
    if not whole or bits % 8 or end - begin != bits // 8:
        raise ModelError(f"{path.name}: tensor {name} of {dtype} {list(shape)} does not fit {begin}..{end}")
    return Entry(dtype, shape, start + begin, end - begin)
