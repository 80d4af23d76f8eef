"""Logits of the engine beside those of transformers, on the same tensors and the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from engine.batch import TextRow
from tests.gpu.check.baselines import hf_model, version
from tests.gpu.check.context import Context

LEAST_AGREEMENT = 0.99  # of the best token where it is clear
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of the norm of the logits, by the precision of the weights."""
NOISE = (
    4.0  # a gap between the two best logits is told apart from rounding where it is so many times as large
)


def run(context: Context) -> dict[str, Any]:
    """How far logits differ, and how often both name the same token: everywhere, and where it is clear."""
    model, settings = context.the_model(), context.settings
    model.set_weights("model")
    count = settings.parity_tokens
    generator = torch.Generator().manual_seed(12)
    ids = torch.randint(0, 256, (count,), generator=generator)
    size = settings.block_size
    model.allocate(count + size, "model")
    row = TextRow(ids.tolist(), list(range(-(-(count + 1) // size))), num_new=count)
    prepared = model.runner.prepare([row])
    prepared.fill()
    ours = model.runner.forward(prepared, None).float()
    model.release([row])
    model.runner.free_kv()
    theirs = (
        hf_model(model)
        .forward(input_ids=ids.unsqueeze(0).to(context.device), use_cache=False)
        .logits[0]
        .float()
    )
    off = ours - theirs
    noise = float(off.square().mean().sqrt())
    best = theirs.topk(2, dim=-1)
    same = ours.argmax(-1) == best.indices[:, 0]
    clear = best.values[:, 0] - best.values[:, 1] > NOISE * noise
    agreement = float(same[clear].float().mean()) if bool(clear.any()) else None
    found = {
        "transformers": version(), "tokens": count, "relative_error": float(off.norm() / theirs.norm()),
        "rms_error": noise, "largest_error": float(off.abs().max()),
        "top1_agreement": float(same.float().mean()),
        "clear_tokens": int(clear.sum()), "top1_agreement_where_clear": agreement,
        "attention": model.runner.attention_name, "kernels": model.runner.kernels,
    }  # fmt: skip
    failed = {}
    if found["relative_error"] > MOST_ERROR[model.dtype]:
        failed["relative_error"] = f"{found['relative_error']:.3g} is above {MOST_ERROR[model.dtype]:g}"
    if agreement is not None and agreement < LEAST_AGREEMENT:
        failed["top1_agreement_where_clear"] = f"{agreement:.4f} is below {LEAST_AGREEMENT:g}"
    found["failed"] = failed
    if not torch.isfinite(ours).all():
        raise AssertionError(f"logits are not finite: {found}")
    return found
