"""transformers. ``python -m tests.bench.peer_transformers PLAN MODEL THREADS DTYPE MODE``.

MODE: ``generate`` (one request after the other), ``generate_batch`` (its continuous batching with its own
defaults), ``generate_batch_tuned`` (the settings that were fastest on a CPU). The weights are the very
tensors that our loader reads, copied into a fresh model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from engine.models.loader import load_model
from tests.bench.peer_loop import Ready, Times, serve
from tests.bench.timing import RequestTimes
from tests.bench.workloads import Item

TUNED: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 256}


def hf_model(path: Path, dtype: torch.dtype) -> Any:
    """Our loader's tensors in a transformers model of the same shape."""
    loaded = load_model(path, dtype=dtype, device=torch.device("cpu"), progress=lambda *_: None)
    spec = loaded.spec
    if spec.architecture != "llama":
        raise ValueError(f"the comparison copies Llama weights; {path} holds {spec.architecture}")
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_model_len,
        tie_word_embeddings=spec.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(dtype)
    names = {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
    layer_names = {
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        **{f"{p}_proj.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"},
        **{f"{p}_proj.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
    }
    for layer in range(spec.num_layers):
        for ours, theirs in layer_names.items():
            names[f"layers.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    state = {names[name]: tensor for name, tensor in loaded.weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    # to_empty left the rotary frequencies, which are no weights, without values
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


class _Stamps(BaseStreamer):  # type: ignore[misc]
    """Notes when each token came out of ``generate``; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())

    def end(self) -> None:
        return


def run_generate(model: Any, items: list[Item]) -> list[RequestTimes]:
    """One after the other; every request counts from the hand-over of the whole workload."""
    start = time.perf_counter()
    times = []
    for item in items:
        stamps = _Stamps()
        ids = torch.tensor([item.ids])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=item.out,
                min_new_tokens=item.out,
                do_sample=False,
                eos_token_id=None,
                streamer=stamps,
            )
        times.append(RequestTimes(len(item.ids), [stamp - start for stamp in stamps.times]))
    return times


@contextmanager
def batch_manager(model: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """transformers' continuous batching, started before the clock runs."""
    generation = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(**settings)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=30
    ) as manager:
        yield manager


def run_batch(manager: Any, items: list[Item]) -> list[RequestTimes]:
    """All at once. The tokens' times are those transformers itself records on the same clock."""
    start = time.perf_counter()
    order = [
        manager.add_request(item.ids, max_new_tokens=item.out, record_timestamps=True, eos_token_id=-1)
        for item in items
    ]
    results: dict[str, Any] = {}
    while len(results) < len(items):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"generate_batch failed: {result.error}")
            results[result.request_id] = result
        elif result is None and not manager.is_running():
            raise RuntimeError("generate_batch stopped before its requests ended")
    return [
        RequestTimes(len(item.ids), [stamp - start for stamp in results[name].timestamps])
        for item, name in zip(items, order, strict=True)
    ]


class Transformers:
    """One of its three modes. A prefix cache there is, for requests that run in a batch."""

    def __init__(self, path: Path, threads: int, dtype: torch.dtype, mode: str) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self._model = hf_model(path, dtype)
        self._mode = mode
        self._sharing = True

    def about(self) -> Ready:
        one_by_one = "one request after the other" if self._mode == "generate" else ""
        return Ready(f"{transformers.__version__}, torch {torch.__version__}", one_by_one)

    def prepare(self, arm: str) -> None:
        self._sharing = arm != "cache_off"

    def run(self, items: list[Item]) -> Times:
        if self._mode == "generate":
            return Times(run_generate(self._model, items))
        settings = {"allow_block_sharing": self._sharing}
        if self._mode == "generate_batch_tuned":
            settings |= TUNED
        with batch_manager(self._model, settings) as manager:
            return Times(run_batch(manager, items))


def main(plan_file: str, model: str, threads: str, dtype: str, mode: str) -> None:
    serve(plan_file, lambda: Transformers(Path(model), int(threads), getattr(torch, dtype), mode))


if __name__ == "__main__":
    main(*sys.argv[1:])
