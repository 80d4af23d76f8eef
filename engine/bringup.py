"""From a start configuration to a running engine core: torch, the device, the model, the KV pool.

Imports torch, so it is itself imported only after the sockets answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from engine import availability, out_of_memory
from engine.compiling import compile_kernels
from engine.config import ConfigError, EngineConfig
from engine.hardware import DeviceError, choose_device, describe
from engine.knob_store import KnobStore, PatchRefused
from engine.lifetime import ExitCode
from engine.loop import EngineCore, Event
from engine.models.errors import ModelError
from engine.models.loader import load_model
from engine.native import kernels
from engine.text import Tokenizer
from ipc import codec

log = logging.getLogger("engine.bringup")

EXPECTED = (ModelError, ConfigError, PatchRefused, DeviceError)
"""Errors whose text says all: what the person gave cannot be used."""
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def bring_up(
    config: EngineConfig,
    sink: Callable[[list[Event]], None],
    progress: Callable[[str, int, int], None],
    follow_gpu: Callable[[str], None],
) -> tuple[EngineCore, KnobStore, Tokenizer]:
    """Load the model and make the core; ``progress`` gets each stage with its bytes done and in all.

    Raises what `explain` understands.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    out_of_memory.watch(device)
    loaded = load_model(
        config.model,
        dtype=_DTYPES[config.dtype],
        device=device,
        load_format=config.load_format,
        progress=progress,
        max_model_len=config.max_model_len,
    )
    # A file's name may hold bytes that are no text, which no message can carry.
    told = msgspec.structs.replace(
        loaded.info, name=codec.clip(loaded.info.name), path=codec.clip(loaded.info.path)
    )
    loaded = replace(loaded, info=told)
    for note in loaded.notes:
        log.info("%s", note)
    if device.type == "cpu":
        kernels(lambda: progress("compiling kernels for this CPU", 0, 0))
    progress("measuring the device", 0, 0)
    dtype = loaded.weights["embed"].dtype
    info = describe(device, dtype=dtype)
    if info.uuid:
        follow_gpu(info.uuid)
    context = availability.context(
        loaded.spec,
        device,
        dtype,
        quantization=loaded.info.quantization,
        draft_model="" if config.draft_model is None else str(config.draft_model),
    )
    knobs = KnobStore(context, config.knobs)
    progress("allocating the KV pool", 0, 0)
    core = EngineCore(loaded, config, knobs, sink, device_info=info, consume=True, progress=progress)
    # Requests do not wait for the compiler: what it makes of a kernel is kept, in TRITON_CACHE_DIR.
    compile_kernels(
        core.runner,
        lambda done, total: progress(f"compiling kernels: {done + 1} of {total}", 0, 0),
        core.drafts.drafter,
    )
    core.runner.warm_up(
        int(knobs["max_num_seqs"] or 1),
        lambda done, total: progress(f"compiling the kernels of graphs: shape {done + 1} of {total}", 0, 0),
    )
    log.info("%s is ready on %s in %s", loaded.info.name, info.name, loaded.info.dtype)
    return core, knobs, loaded.tokenizer


def explain(error: Exception, *, running: bool) -> tuple[int, str]:
    """The exit code and the sentence for an error of loading (or, ``running``, of the step loop)."""
    kind = out_of_memory.kind_of(error)
    if kind == "memory":
        what = "while running" if running else "while loading"
        return ExitCode.OUT_OF_MEMORY, f"out of memory {what}: {out_of_memory.text_of(error)}"
    if isinstance(error, DeviceError):
        return ExitCode.DEVICE, str(error)
    if kind == "lost":
        return ExitCode.DEVICE, f"the device failed: {error}"
    if running:
        return ExitCode.LOOP_FAILED, f"the step loop failed: {type(error).__name__}: {error}"
    if isinstance(error, PatchRefused):
        return ExitCode.BAD_CONFIG, f"a knob's value at start cannot be taken: {error.message}"
    if isinstance(error, ConfigError):
        return ExitCode.BAD_CONFIG, str(error)
    if isinstance(error, ModelError):
        return ExitCode.LOAD_FAILED, str(error)
    return ExitCode.LOAD_FAILED, f"the model could not be loaded: {type(error).__name__}: {error}"
