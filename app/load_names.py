"""The loads that the window offers, and their names for a person. No widgets."""

from __future__ import annotations

from app.i18n import N_, tr, tr_later, tr_n
from app.lab.workload import PromptKind, WorkloadSpec, chars_per_token
from app.units import count, rate, span

MIXES: dict[str, tuple[str, dict[PromptKind, float]]] = {
    "chat": (N_("Chat"), {"chat": 1.0}),
    "shared": (N_("Shared prefix"), {"shared_prefix": 1.0}),
    "long": (N_("Long context"), {"long_context": 1.0}),
    "code": (N_("Code"), {"code": 1.0}),
    "mixed": (N_("Mixed"), {"chat": 2.0, "shared_prefix": 2.0, "long_context": 0.5, "code": 1.0}),
}
ARRIVALS = {
    "poisson": N_("Poisson"),
    "constant": N_("Constant"),
    "concurrency": N_("Concurrency"),
}


def load_text(spec: WorkloadSpec) -> str:
    """A load in a few words: ``Chat · Poisson 2.00 req/s · 1 min``."""
    pace = str(spec.concurrency) if spec.arrival == "concurrency" else str(rate(spec.rate_rps, "req/s"))
    parts = [tr_later(MIXES[spec.name][0]) if spec.name in MIXES else spec.name]
    parts.append(f"{tr_later(ARRIVALS[spec.arrival])} {pace}")
    if spec.num_requests is not None:
        parts.append(tr_n("{n} request", "{n} requests", spec.num_requests).format(n=spec.num_requests))
    if spec.duration_s is not None:
        parts.append(span(spec.duration_s))
    return " · ".join(parts)


def fitted_text(spec: WorkloadSpec, max_model_len: int, vocab_size: int) -> str:
    """What a load was cut to, so that its requests fit a model of ``max_model_len`` tokens."""
    prompt = round((spec.max_prompt_chars or 0) / chars_per_token(vocab_size))
    text = tr(
        "The load was cut to fit this model, which takes {limit} tokens for a prompt and its answer: prompts "
        "have about {prompt} tokens at most, answers {output}."
    )
    return text.format(limit=count(max_model_len), prompt=count(prompt), output=count(spec.output_tok[1]))
