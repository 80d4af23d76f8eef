"""Tokenizes the text and writes the plan.

``python -m tests.bench.make_plan OUT MODEL WORKLOADS REPEATS SEED``
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from engine.models.loader import load_model
from tests.bench.workloads import build, english_text


def main(out_file: str, model: str, workloads: str, repeats: str, seed: str) -> None:
    loaded = load_model(Path(model), dtype=None, device=torch.device("cpu"), progress=lambda *_: None)
    ids = loaded.tokenizer.encode(english_text(), add_special=False)
    plan = build(model, ids, workloads.split(","), int(repeats), int(seed))
    Path(out_file).write_bytes(msgspec.json.encode(plan))


if __name__ == "__main__":
    main(*sys.argv[1:])
