"""Weights on their way to a card: nothing is overwritten too early, and no model is held in host memory."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from engine.models import staging
from engine.models.loaded import LoadedModel
from engine.models.loader import load_model
from engine.models.reading import Meter
from engine.models.staging import Staging
from tests import tiny_models
from tests.engine.models.gguf_files import Quant, convert

CPU = torch.device("cpu")
MIB = 1 << 20
# Every row has whole blocks of 32.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}


class LateLane:
    """A device that copies as late as it may: only when somebody waits for it."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.begun = self.waited = 0

    def buffer(self, nbytes: int) -> Tensor:
        self.buffers.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def send(self, source: Tensor, target: Tensor) -> staging.Copying:
        self.begun += 1
        return _Late(self, source, target)


class _Late:
    def __init__(self, lane: LateLane, source: Tensor, target: Tensor) -> None:
        self._lane, self._source, self._target = lane, source, target

    def wait(self) -> None:
        self._target.copy_(self._source)
        self._lane.waited += 1


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    made = LateLane()
    monkeypatch.setattr(staging, "lane_to", lambda device: made)
    return made


def load(path: Path, dtype: torch.dtype | None = None) -> LoadedModel:
    return load_model(path, dtype=dtype, device=CPU, progress=lambda *_: None)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("form", ["folder", "gguf", "quantized gguf"])
def test_a_buffer_is_only_filled_again_once_it_was_copied(
    tmp_path: Path, form: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_models.build(tmp_path / "m", shards=2)
    if form != "folder":
        # Of an architecture whose rows stay as they are: what follows a copy on a card comes after it there.
        quant = Quant.Q8_0 if form == "quantized gguf" else Quant.F32
        path = convert(
            tiny_models.build(tmp_path / "one", "qwen2", head_dim=32, **WIDE), tmp_path / "m.gguf", quant
        )
    expected = load(path, dtype).weights
    lane = LateLane()
    monkeypatch.setattr(staging, "lane_to", lambda device: lane)
    monkeypatch.setattr(staging, "STAGING_BYTES", 4096)
    found = load(path, dtype).weights
    assert len(lane.buffers) == 2
    assert lane.begun == lane.waited > len(found), "every copy was waited for, large tensors took several"
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_a_file_that_ends_early_ends_with_the_copies_done(lane: LateLane, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\1" * (staging.STAGING_BYTES + 10))
    target = torch.zeros(2 * staging.STAGING_BYTES, dtype=torch.int8)
    with (
        pytest.raises(Exception, match="ended early"),
        (tmp_path / "f").open("rb") as file,
        Staging(CPU) as staged,
    ):
        staged.read(file, torch.int8, target, Meter("reading", 1, lambda *_: None))
    assert lane.begun == lane.waited == 1


class _Gone:
    """A card's side of the copying that keeps nothing on the host."""

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, source: Tensor, target: Tensor) -> staging.Copying:
        target.copy_(source)
        return self

    def wait(self) -> None:
        pass


def test_host_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 200 MB to a device other than the host, in another dtype than it is stored in."""
    folder = tiny_models.build(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    wide = 50 * MIB // (3 * config["hidden_size"] * config["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": wide}))
    _widen(folder / "model.safetensors", config["intermediate_size"], wide)
    process, before, most = psutil.Process(), 0, 0
    stages: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal before, most
        if stage == "reading weights":
            now = process.memory_info().rss
            before = before or now
            most = max(most, now - before)
            stages.append(total)

    monkeypatch.setattr(staging, "lane_to", lambda device: _Gone())
    monkeypatch.setattr("engine.models.loaded.hash_files", lambda files: "")
    loaded = load_model(folder, dtype=torch.bfloat16, device=torch.device("meta"), progress=progress)
    assert loaded.spec.intermediate_size == wide
    assert stages[0] > 199 * MIB
    assert len(stages) > 20, "told as it goes on"
    assert most < 40 * MIB, f"{most / MIB:.0f} MiB"


def _widen(path: Path, narrow: int, wide: int) -> None:
    """Write a safetensors file anew with wider layers, of zeros, which take no room on the disk."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    header.pop("__metadata__", None)
    at = 0
    for entry in header.values():
        entry["shape"] = [wide if size == narrow else size for size in entry["shape"]]
        nbytes = math.prod(entry["shape"]) * 4
        entry["data_offsets"] = [at, at + nbytes]
        at += nbytes
    head = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + at)
