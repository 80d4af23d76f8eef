"""The command line of ``decodeck-engine``. Nothing here imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.config import GIB, ConfigError, EngineConfig
from engine.knob import Knob, KnobContext
from engine.knobs import BY_ID
from ipc.messages import KnobValue


def parser() -> argparse.ArgumentParser:
    """All options of the engine process."""
    cli = argparse.ArgumentParser(
        prog="decodeck-engine",
        description="Serves one language model to Decodeck consoles and scripts.",
        epilog=(
            "Exit codes: 0 stopped as asked; 2 bad configuration; 3 the console that started it is gone; "
            "10 out of memory; 11 device error; 12 the address cannot be bound; 13 another engine holds this "
            "name; 14 the model could not be loaded; 15 the step loop failed. After 10, 11, 14 and 15 the "
            "reason stays readable, and the process alive, until it is told to stop."
        ),
    )
    cli.add_argument("--model", type=Path, metavar="PATH", help="a Hugging Face folder or a GGUF file")
    cli.add_argument(
        "--draft-model",
        type=Path,
        metavar="PATH",
        help="a smaller model with the same tokenizer, which speculation=draft drafts with",
    )
    cli.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    cli.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda, cuda:N, or a UUID: GPU-..., MIG-...",
    )
    cli.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    cli.add_argument("--max-model-len", type=int, metavar="TOKENS", help="lower the model's own limit")
    cli.add_argument("--kv-pool-gib", type=float, metavar="GIB", help="size of the KV pool")
    cli.add_argument("--gpu-memory-utilization", type=float, default=0.85, metavar="SHARE")
    cli.add_argument("--threads", type=int, metavar="N", help="CPU threads to compute with")
    cli.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="an optimization's value at start; repeatable, see --list-knobs",
    )
    cli.add_argument("--check", action="store_true", help="verify the block ledger after every step")
    cli.add_argument("--name", metavar="NAME", help="one engine of a name runs at a time")
    cli.add_argument("--ctl", metavar="ADDRESS", help="ipc://PATH or tcp://127.0.0.1:PORT (0: any port)")
    cli.add_argument("--tel", metavar="ADDRESS", help="telemetry; by default beside --ctl")
    cli.add_argument(
        "--curve",
        type=Path,
        metavar="DIR",
        help="encrypt; DIR holds this engine's key (made if absent) and authorized_keys/ with one a file",
    )
    cli.add_argument(
        "--allow-remote", action="store_true", help="with --curve: listen on an address other than loopback"
    )
    cli.add_argument("--managed", action="store_true", help="end when stdin does, with the console")
    cli.add_argument(
        "--vanish-grace-s",
        type=float,
        default=10.0,
        metavar="S",
        help="how long the requests of a client that vanished go on",
    )
    cli.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info",
                     help="debug: with the traceback of a model that cannot be loaded")  # fmt: skip
    cli.add_argument("--list-knobs", action="store_true",
                     help="print every optimization as it is on --device, and exit")  # fmt: skip
    cli.add_argument("--json", action="store_true", help="with --list-knobs: as JSON")
    return cli


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The start configuration. Raises `ConfigError`, which names the option and its value."""
    if options.model is None:
        raise ConfigError("--model is missing: give a Hugging Face folder or a GGUF file")
    if not options.model.exists():
        raise ConfigError(f"--model {options.model} does not exist")
    if options.draft_model is not None and not options.draft_model.exists():
        raise ConfigError(f"--draft-model {options.draft_model} does not exist")
    if options.kv_pool_gib is not None and not 0 < options.kv_pool_gib < 1 << 20:
        raise ConfigError(f"--kv-pool-gib is {options.kv_pool_gib}; it must be above 0")
    if not 0 <= options.vanish_grace_s <= 86_400:
        raise ConfigError(f"--vanish-grace-s is {options.vanish_grace_s}; it must lie in 0 to 86400")
    return EngineConfig(
        model=options.model,
        draft_model=options.draft_model,
        dtype=options.dtype,
        device=options.device,
        load_format=options.load_format,
        kv_pool_bytes=None if options.kv_pool_gib is None else int(options.kv_pool_gib * GIB),
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=options.max_model_len,
        threads=options.threads,
        check=options.check,
        knobs=knob_values(options.knob),
    )


def knob_values(pairs: Sequence[str]) -> dict[str, KnobValue]:
    """``ID=VALUE`` texts as values of their knobs' types. Raises `ConfigError`."""
    values: dict[str, KnobValue] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        knob = BY_ID.get(name)
        if not equals:
            raise ConfigError(f"--knob {pair!r} is not ID=VALUE")
        if knob is None:
            raise ConfigError(f"--knob {pair!r}: there is no knob {name!r}; see --list-knobs")
        value = _value(knob, text)
        # What depends on the device is checked when that is known; the rest now.
        why = knob.why_not(
            value, KnobContext(device="cuda", attention=BY_ID["attention"].choices, draft_model="given")
        )
        if why:
            raise ConfigError(f"--knob {pair}: {why}")
        values[name] = value
    return values


def _value(knob: Knob, text: str) -> KnobValue:
    if knob.type == "choice":
        return text
    if knob.type == "bool":
        known = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
        if text.lower() not in known:
            raise ConfigError(f"--knob {knob.id}={text}: not on or off")
        return known[text.lower()]
    try:
        return int(text) if knob.type == "int" else float(text)
    except ValueError:
        kind = "whole number" if knob.type == "int" else "number"
        raise ConfigError(f"--knob {knob.id}={text}: not a {kind}") from None
