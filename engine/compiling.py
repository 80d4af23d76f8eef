"""Compiles kernels before requests wait for them: at the start, and when a knob brings others."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine import out_of_memory
from engine.attention import get_backend, probe
from engine.current_device import make_current
from engine.kernels.warm import warm
from engine.ops import choice
from engine.runner import ModelRunner

log = logging.getLogger(__name__)


def is_compiled(device: torch.device) -> bool:
    """Whether kernels of a device are compiled when they are first launched."""
    return device.type == "cuda"


def compile_kernels(runner: ModelRunner, told: Callable[[int, int], None]) -> None:
    """Launch, for nobody, all kernels that are compiled when they are first launched: those that steps run
    with, and those that a knob may switch to from one step to the next.

    Call it with an empty pool, a block of which is written to, and while no step is computed. ``told`` hears
    how many parts were launched, and of how many. What cannot be launched is in the log, and is told again
    when it is asked for. Raises what a lost device does, RuntimeError without a pool.
    """
    if not is_compiled(runner.device):
        return
    device, decoder, kv, attention = runner.device, runner.decoder, runner.kv, runner.attention
    if kv is None:
        raise RuntimeError("no KV pool: call allocate_kv first")
    if probe("paged", runner.spec, device, runner.dtype) is None:
        attention = get_backend("paged", device)
    make_current(device)
    where = runner.spec, device, decoder.activation_dtype
    fused = {knob: choice.probe(knob, *where) is None for knob in choice.FUSED}
    sampling = choice.make_sampling(choice.probe_sampling(device) is None, device)
    ops, decoder.ops = decoder.ops, choice.make_ops(fused, *where)
    try:
        warm(
            decoder, attention, kv, runner.windowed, sampling,
            block=0, vocab_size=runner.spec.vocab_size, told=told,
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        if out_of_memory.kind_of(error) == "lost":
            raise
        log.warning("kernels could not be compiled ahead: %s", out_of_memory.text_of(error))
        out_of_memory.recover(error, device)
    finally:
        decoder.ops = ops
