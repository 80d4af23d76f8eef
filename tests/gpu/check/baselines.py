"""transformers on the same tensors: ``generate`` and ``generate_batch``, as the baselines that they are.

Neither is a server: ``generate`` runs a batch whose members begin and end together, ``generate_batch`` is its
continuous batching. What this version does not have is named, not left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.check.context import Context
from tests.gpu.check.model import Model

NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **{f"{p}_proj.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"{p}_proj.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


def version() -> str:
    import transformers

    return str(transformers.__version__)


def hf_model(model: Model, attention: str = "sdpa") -> Any:
    """The tensors of our loader, not copied, in transformers' model of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim, rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_model_len, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta}, pad_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    names = dict(NAMES)
    for layer in range(spec.num_layers):
        names |= {f"layers.{layer}.{a}": f"model.layers.{layer}.{b}" for a, b in LAYER_NAMES.items()}
    state = {names[name]: tensor for name, tensor in model.loaded.weights.items()}
    made.load_state_dict(state, strict=True, assign=True)
    # No weight, and so on no device yet.
    made.model.rotary_emb = type(made.model.rotary_emb)(config=config).to(model.device)
    made.eval()
    for weight in made.parameters():
        weight.requires_grad_(False)
    return made


def run_generate(context: Context) -> dict[str, Any]:
    """Milliseconds a token of ``generate``, from answers of two lengths, for each batch and kind of cache."""
    model, tiny = context.the_model(), context.settings.tiny
    model.set_weights("model")
    made = hf_model(model)
    prompt, short, long = (8, 2, 4) if tiny else (128, 8, 40)
    found = context.begin(transformers=version(), prompt_tok=prompt, runs={}, absent={})
    kinds: dict[str, dict[str, Any]] = {
        "dynamic cache": {},
        "static cache, not compiled": {"cache_implementation": "static", "disable_compile": True},
    }
    for name, options in kinds.items():
        for batch in (1, 2) if tiny else (1, 8):
            key = f"{name}, batch {batch}"
            if not tiny and context.left_s < 20:
                found["absent"][key] = "no time was left"
                continue
            try:
                each_s = _per_token_s(context, made, batch, (prompt, short, long), options)
            except (TypeError, ValueError, AttributeError, ImportError, RuntimeError) as error:
                found["absent"][key] = f"{type(error).__name__}: {error}"[:400]
                continue
            found["runs"][key] = {"tpot_ms": 1e3 * each_s, "tok_per_s": batch / each_s}
    return found


def _per_token_s(
    context: Context, made: Any, batch: int, sizes: tuple[int, int, int], options: dict[str, Any]
) -> float:
    prompt, short, long = sizes
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(1, 256, (batch, prompt), generator=generator).to(context.device)

    def answer(count: int) -> float:
        context.timer.synchronize()
        began = time.perf_counter()
        made.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, eos_token_id=None, pad_token_id=0, **options,
        )  # fmt: skip
        context.timer.synchronize()
        return time.perf_counter() - began

    answer(short)
    few_s, many_s = answer(short), answer(long)
    if many_s <= few_s:
        raise RuntimeError(f"{long} tokens took no longer than {short}: {many_s:.4f} s and {few_s:.4f} s")
    return (many_s - few_s) / (long - short)


def run_batch(context: Context) -> dict[str, Any]:
    """Tokens a second of ``generate_batch``, over requests that are there at once."""
    found = context.begin(transformers=version(), runs={}, absent={})
    try:
        from tests.bench.peer_transformers import batch_manager, run_batch
    except ImportError as error:
        found["absent"]["generate_batch"] = f"transformers {version()} has no continuous batching: {error}"
        return found
    from tests.bench.workloads import Item

    model, tiny = context.the_model(), context.settings.tiny
    model.set_weights("model")
    count, prompt, out = (2, 8, 4) if tiny else (16, 512, 64)
    items = [Item([(7 * i + r) % 255 + 1 for i in range(prompt)], out) for r in range(count)]

    def measure() -> dict[str, Any]:
        settings: dict[str, Any] = {"allow_block_sharing": False}
        if tiny:  # what it takes by itself is most of a machine's memory
            settings |= {"num_blocks": 16, "max_batch_tokens": 64}
        with batch_manager(hf_model(model), settings) as manager:
            run_batch(manager, items[:2])
            began = time.perf_counter()
            times = run_batch(manager, items)
            wall_s = time.perf_counter() - began
        ttft = sorted(each.token_s[0] for each in times)
        return {"requests": count, "prompt_tok": prompt, "out_tok": out, "wall_s": wall_s,
                "tok_per_s": count * out / wall_s, "ttft_p50_ms": 1e3 * ttft[len(ttft) // 2]}  # fmt: skip

    _note(found, "paged|sdpa, its own defaults", measure)
    return found


def _note(found: dict[str, Any], name: str, measure: Callable[[], dict[str, Any]]) -> None:
    try:
        found["runs"][name] = measure()
    except (TypeError, ValueError, AttributeError, ImportError, RuntimeError) as error:
        found["absent"][name] = f"{type(error).__name__}: {error}"[:400]
