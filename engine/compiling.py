"""Compiles kernels before requests wait for them: at the start, and when a knob brings others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from engine import out_of_memory
from engine.attention import get_backend, probe
from engine.attention.base import AttentionBackend
from engine.current_device import make_current
from engine.kernels.warm import warm, warm_products
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.ops import choice
from engine.runner import ModelRunner
from engine.sampling import FusedSampling
from engine.speculation.rounds import RoundDrafter

log = logging.getLogger(__name__)


def is_compiled(device: torch.device) -> bool:
    """Whether kernels of a device are compiled when they are first launched."""
    return device.type == "cuda"


def compile_kernels(
    runner: ModelRunner, told: Callable[[int, int], None], drafter: RoundDrafter | None = None
) -> None:
    """Launch, for nobody, all kernels that are compiled when they are first launched: those that steps run
    with, and those that a knob may switch to from one step to the next, of the model and of what drafts.

    Call it with an empty pool, a block of which is written to, and while no step is computed. ``told`` hears
    how many parts were launched, and of how many. What cannot be launched is in the log, and is told again
    when it is asked for. Raises what a lost device does, RuntimeError without a pool.
    """
    if not is_compiled(runner.device):
        return
    if runner.kv is None:
        raise RuntimeError("no KV pool: call allocate_kv first")
    attention = _switchable(runner.attention, runner.spec, runner.device, runner.dtype)
    sampling = choice.make_sampling(choice.probe_sampling(runner.device) is None, runner.device)
    _compile(runner.decoder, attention, runner.kv, runner.windowed, sampling, told)
    compile_drafter(runner, drafter, told)


def compile_drafter(
    runner: ModelRunner, drafter: RoundDrafter | None, told: Callable[[int, int], None]
) -> None:
    """As `compile_kernels`, of what drafts alone, whose own pool is empty; None drafts nothing.

    One that writes to the pool of the model has its sizes too: only its weights may be others, so that
    nothing has to be written. The model's kernels of sampling serve both.
    """
    if drafter is None or not is_compiled(runner.device):
        return
    decoder, attention, kv, spec = drafter.runs_with
    if kv is runner.kv:
        with _reporting(decoder.device), torch.inference_mode():
            warm_products(decoder)
    else:
        attention = _switchable(attention, spec, decoder.device, decoder.dtype)
        _compile(decoder, attention, kv, spec, None, told)


def _switchable(
    attention: AttentionBackend, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """What is compiled of all that a knob may switch to, or what there is."""
    return get_backend("paged", device) if probe("paged", spec, device, dtype) is None else attention


def _compile(
    decoder: Decoder,
    attention: AttentionBackend,
    kv: KVCache,
    spec: ModelSpec,
    sampling: FusedSampling | None,
    told: Callable[[int, int], None],
) -> None:
    """Launch all that steps of a decoder may launch, with every part of it fused that can be."""
    make_current(decoder.device)
    where = decoder.spec, decoder.device, decoder.activation_dtype
    fused = {knob: choice.probe(knob, *where) is None for knob in choice.FUSED}
    ops, decoder.ops = decoder.ops, choice.make_ops(fused, *where)
    try:
        with _reporting(decoder.device):
            warm(decoder, attention, kv, spec, sampling, block=0, vocab_size=spec.vocab_size, told=told)
    finally:
        decoder.ops = ops


@contextlib.contextmanager
def _reporting(device: torch.device) -> Iterator[None]:
    """Let the log have what could not be launched, unless the device is lost."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if out_of_memory.kind_of(error) == "lost":
            raise
        log.warning("kernels could not be compiled ahead: %s", out_of_memory.text_of(error))
        out_of_memory.recover(error, device)
