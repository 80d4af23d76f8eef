"""The engine process: ``python -m engine`` or ``decodeck-engine``.

The order matters: the sockets answer and the address is printed before torch is imported, so that a window
can connect at once and watch the model load.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import platform
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from engine import __version__
from engine.config import ConfigError, EngineConfig
from engine.knobs import list_knobs
from engine.lifetime import ExitCode, Lifetime, prefer_for_oom_killer, watch_stdin
from engine.logs import RingHandler
from engine.options import engine_config, parser
from engine.server import EngineServer
from ipc import codec
from ipc import messages as m
from ipc.endpoints import (
    Address,
    Connection,
    EndpointError,
    InstanceLock,
    LockHeld,
    check_address,
    default_address,
    start_ticks,
    sweep,
    telemetry_address,
    write_connection,
)

if TYPE_CHECKING:
    from ipc.security import KeyPair

log = logging.getLogger("engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine; returns only if it never began to serve."""
    options = parser().parse_args(arguments)
    if options.list_knobs:
        try:
            return _list_knobs(options)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more
            return ExitCode.OK
    try:
        config = engine_config(options)
        ctl, tel = _addresses(options)
        curve = _keys(options.curve)
    except (ConfigError, EndpointError, OSError, ValueError) as error:
        print(f"decodeck-engine: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    _set_environment(config)
    lifetime = Lifetime()
    try:
        server = _serve(options, config, ctl, tel, lifetime, curve)
    except LockHeld as error:
        print(f"decodeck-engine: {error}", file=sys.stderr)
        return ExitCode.LOCK_HELD
    except (zmq.ZMQError, OSError) as error:
        print(f"decodeck-engine: cannot listen on {ctl.url}: {error}", file=sys.stderr)
        return ExitCode.BIND
    _run(config, server, lifetime, managed=options.managed)
    server.join(timeout_s=2.0)
    lifetime.exit()
    return ExitCode.OK


def _list_knobs(options: argparse.Namespace) -> int:
    """What an engine that starts here with these options would offer, for a model of a usual shape."""
    context = None
    try:
        from engine import availability
        from engine.hardware import DeviceError
    except ImportError as error:
        print(
            f"decodeck-engine: the device cannot be asked ({error}): as declared for a CPU", file=sys.stderr
        )
    else:
        draft = "" if options.draft_model is None else str(options.draft_model)
        try:
            context = availability.without_model(options.device, draft)
        except DeviceError as error:
            print(f"decodeck-engine: {error}", file=sys.stderr)
            return ExitCode.DEVICE
    knobs = list_knobs(context)
    if options.json:
        full = [{name: getattr(knob, name) for name in knob.__struct_fields__} for knob in knobs]
        print(json.dumps(full, indent=1, ensure_ascii=False))
        return ExitCode.OK
    for knob in knobs:
        values = ", ".join(
            choice + (f" ({knob.choice_reasons[choice]})" if choice in knob.choice_reasons else "")
            for choice in knob.choices
        )
        values = values or ("on, off" if knob.type == "bool" else knob.type)
        if knob.minimum is not None and knob.maximum is not None:
            values += f" {knob.minimum:.10g} to {knob.maximum:.10g} {knob.unit}".rstrip()
        note = "" if knob.available else f"  (not available: {knob.reason})"
        default = ("on" if knob.default else "off") if knob.type == "bool" else knob.default
        print(f"{knob.id:24} {knob.apply:10} default {default!s:12} {values}{note}")
    return ExitCode.OK


def _addresses(options: argparse.Namespace) -> tuple[Address, Address]:
    name = options.name or f"engine-{os.getpid()}"

    def check(url: str) -> Address:
        return check_address(url, curve=options.curve is not None, allow_remote=options.allow_remote)

    if options.name and options.ctl:
        raise ConfigError(
            f"--name {options.name} has no meaning beside --ctl {options.ctl}: give one of them"
        )
    ctl = check(options.ctl) if options.ctl else default_address(name)
    tel = check(options.tel) if options.tel else telemetry_address(ctl)
    return ctl, tel


def _set_environment(config: EngineConfig) -> None:
    """What libraries read when they are imported. A value that the user has set stays."""
    threads = str(config.threads or _cpus())
    if "OMP_WAIT_POLICY" not in os.environ:
        # Compute threads that wait spin for some tens of microseconds, then sleep: sleeping at once makes
        # small operations wait for the system, spinning on takes the core that the console needs.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    for name, value in {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Prompts that are tokenized together are, one alone never is; and no process is forked from this one.
        "TOKENIZERS_PARALLELISM": "true",
        "RAYON_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # card numbers as NVML counts them
    }.items():
        os.environ.setdefault(name, value)


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _keys(directory: Path | None) -> tuple[KeyPair, frozenset[bytes]] | None:
    """This engine's keys and those it lets in. Raises `KeyFileError`, `EndpointError` or OSError."""
    if directory is None:
        return None
    from ipc.security import authorized, key_pair

    return key_pair(directory, "engine"), authorized(directory)


def _serve(
    options: argparse.Namespace,
    config: EngineConfig,
    ctl: Address,
    tel: Address,
    lifetime: Lifetime,
    curve: tuple[KeyPair, frozenset[bytes]] | None,
) -> EngineServer:
    """Lock, bind, begin to answer, and say where on stdout. Raises `LockHeld`, OSError or ZMQError."""
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # stacks of an engine that hangs
    prefer_for_oom_killer()
    os.umask(0o077)
    path = ctl.path
    if path is not None:
        sweep(path.parent)
        # Another engine that sweeps up at this moment holds each free lock for an instant.
        lock = InstanceLock(path.with_suffix(".lock"), wait_s=0.5)
        lifetime.on_end(lock.release)
    session = uuid.uuid4().hex
    server = EngineServer(
        ctl,
        tel,
        _info(),
        lifetime,
        session=session,
        knob_values=dict(config.knobs),
        grace_s=options.vanish_grace_s,
        curve=curve,
    )
    _start_logging(server, options.log_level)
    for wanted in (signal.SIGTERM, signal.SIGINT):
        signal.signal(wanted, lambda *_: None)  # the I/O thread hears of it, whatever this thread does
    signal.set_wakeup_fd(server.inbox.wakeup_fd, warn_on_full_buffer=False)
    if path is not None:
        _leave_files(config, server, lifetime, path, tel)
    lifetime.on_stop(server.inbox.wake)
    server.start()
    ready: dict[str, str | int] = {"ready": 1, "ctl": server.ctl_url, "tel": server.tel_url}
    ready |= {"session": session, "pid": os.getpid()}
    if curve is not None:
        ready["public_key"] = curve[0].public.decode()
    say_ready(ready)
    if options.managed:
        watch_stdin(
            lambda: lifetime.end(
                ExitCode.PARENT_GONE, "its console is gone", grace_s=1.0 if server.core is not None else 0.3
            )
        )
    return server


def say_ready(ready: Mapping[str, str | int]) -> None:
    """Print where the engine listens, as one line of JSON.

    It is written at once, its end included: where standard output is not buffered, `print` writes the end of
    the line by itself, and a line of the log that goes to the same pipe can get in between.
    """
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()


def _info() -> m.EngineInfo:
    packages = _packages()
    return m.EngineInfo(
        version=__version__,
        pid=os.getpid(),
        host=codec.clip(socket.gethostname(), 256),
        started_unix_ms=time.time_ns() // 1_000_000,
        python=platform.python_version(),
        packages=packages,
        torch=packages.get("torch", ""),
    )


def _packages() -> dict[str, str]:
    """Versions of what computes and serves, read without importing any of it."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for name in ("torch", "numpy", "tokenizers", "safetensors", "gguf", "pyzmq", "msgspec", "triton"):
        try:
            found[name] = version(name)[:128]
        except PackageNotFoundError:
            continue
    return found


def _start_logging(server: EngineServer, level: str) -> None:
    root = logging.getLogger()
    root.setLevel(level.upper())
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(console)
    root.addHandler(RingHandler(server.inbox.log))


def _leave_files(
    config: EngineConfig, server: EngineServer, lifetime: Lifetime, path: Path, tel: Address
) -> None:
    """Write the connection file and see to it that files of sockets do not outlive the process."""
    pid = os.getpid()
    connection = Connection(
        ctl=server.ctl_url,
        tel=server.tel_url,
        session=server.session,
        pid=pid,
        start_ticks=start_ticks(pid) or 0,
        model=codec.clip(str(config.model)),
    )
    files = [path.with_suffix(".json"), path, *([tel.path] if tel.path is not None else [])]
    write_connection(files[0], connection)
    for file in files:
        lifetime.on_end(lambda file=file: file.unlink(missing_ok=True))  # type: ignore[misc]


def _run(config: EngineConfig, server: EngineServer, lifetime: Lifetime, *, managed: bool) -> None:
    """Load the model and run its step loop on this thread until the process is to end.

    ``managed``: nobody reads standard error as it comes; it is the log of a console's engine.
    """
    failure: tuple[int, str] | None = None
    try:
        server.loading("importing torch")
        from engine.bringup import EXPECTED, bring_up, explain
    except ImportError as error:
        log.exception("torch cannot be imported")
        failure = ExitCode.LOAD_FAILED, f"torch cannot be imported: {error}"
    else:
        running = False
        try:
            core, knobs, tokenizer = bring_up(config, server.sink, server.loading, server.gpu.follow)
            lifetime.on_stop(core.wake)
            server.attach(core, knobs, tokenizer)
            running = True
            core.run(lifetime.stop)
        except Exception as error:
            code, reason = explain(error, running=running)
            plain = isinstance(error, EXPECTED) and not managed and not log.isEnabledFor(logging.DEBUG)
            log.error("%s", reason, exc_info=not plain)
            failure = code, reason
    if failure is not None and not lifetime.stop.is_set():
        lifetime.failure = failure[0]
        if not managed:
            log.info("clients can read the reason until this process is stopped; Ctrl+C stops it")
        server.failed(failure[1])
        while not lifetime.stop.wait(3600.0):
            pass


if __name__ == "__main__":
    sys.exit(main())
