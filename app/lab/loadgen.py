"""The load generator: a process of its own, one more client of the engine.

``python -m app.lab.loadgen`` reads one JSON line, `Order`, from stdin, then control lines ``{"stop": ...}``;
the end of stdin ends it at once, so it never outlives its console. It writes one JSON line for each `Report`
to stdout.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from typing import BinaryIO

import msgspec

from app.lab.generator import Generator
from app.lab.orders import Control, Order, Report
from app.lab.workload import WorkloadError, WorkloadSpec, workload_sha256
from ipc.client import Client, EngineError, EngineGone, EngineSilent

PROGRESS_EVERY_S = 0.25
_SPARE_FDS = 32  # beside what is open already: sockets of the transport, files of imports


class LoadFailed(Exception):
    """The load cannot be run; the text says why and what to do."""


def check_descriptors(spec: WorkloadSpec) -> None:
    """Raise the soft limit of open files if it is too low; LoadFailed if the hard limit forbids it.

    All requests share two sockets, so the need does not grow with concurrency; but a client that runs out
    of descriptors in mid-run would make errors that look like the engine's.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 16
    need = in_use + _SPARE_FDS
    if soft >= need or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise LoadFailed(
            f"This process may open {hard} files and needs {need} for the load; raise the limit "
            "(ulimit -n) and start again."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def _emit(out: BinaryIO, report: Report) -> None:
    out.write(msgspec.json.encode(report) + b"\n")
    out.flush()


def _listen(stream: BinaryIO, control: queue.Queue[Control | None]) -> None:
    """Control lines to the queue; None at the end of stdin."""
    for line in iter(stream.readline, b""):
        try:
            control.put(msgspec.json.decode(line, type=Control))
        except msgspec.MsgspecError:
            continue
    control.put(None)


def _obey(generator: Generator, control: queue.Queue[Control | None]) -> bool:
    """Carry out control lines; False when the console is gone."""
    while True:
        try:
            line = control.get_nowait()
        except queue.Empty:
            return True
        if line is None:
            return False
        generator.stop(cancel=line.stop == "now")


def run(order: Order, control: queue.Queue[Control | None], out: BinaryIO) -> bool:
    """Run one order to its end. True if it could be run, whether or not its figures are valid."""
    _emit(out, Report(phase="starting", message="Connecting to the engine."))
    try:
        check_descriptors(order.spec)
        digest = workload_sha256(order.spec)
        with Client(order.ctl, name="decodeck load") as client:
            welcome = client.hello()
            client.wait_ready()
            model = client.snapshot().model
            generator = Generator(client, order, model is None or model.has_chat_template)
            first = generator.report("running")
            _emit(out, msgspec.structs.replace(first, session=welcome.session, workload_sha256=digest))
            return _drive(generator, control, out)
    except (LoadFailed, WorkloadError, EngineError, EngineGone, EngineSilent) as error:
        _emit(out, Report(phase="failed", message=str(error)))
        return False


def _drive(generator: Generator, control: queue.Queue[Control | None], out: BinaryIO) -> bool:
    reported_s = time.monotonic()
    try:
        while generator.step():
            if not _obey(generator, control):
                generator.stop(cancel=True)
                return False
            now_s = time.monotonic()
            if now_s - reported_s >= PROGRESS_EVERY_S:
                reported_s = now_s
                _emit(out, generator.report("draining" if generator.draining else "running"))
    except (EngineGone, EngineSilent) as error:
        generator.abandon("engine", str(error))
        generator.invalid.append(f"the engine was lost during the run: {error}")
        _emit(out, generator.report("failed", str(error)))
        return False
    except OSError as error:
        generator.abandon("client", str(error))
        generator.invalid.append(f"this client failed: {error}")
        _emit(out, generator.report("failed", str(error)))
        return False
    generator.judge()
    if generator.gave_up:
        _emit(out, generator.report("failed", generator.gave_up))
        return False
    _emit(out, generator.report("done"))
    return True


def main() -> int:
    """The process: one order from stdin, reports to stdout."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    try:
        order = msgspec.json.decode(stdin.readline(), type=Order)
    except msgspec.MsgspecError as error:
        _emit(stdout, Report(phase="failed", message=f"The order could not be read: {error}"))
        return 2
    control: queue.Queue[Control | None] = queue.Queue()
    threading.Thread(target=_listen, args=(stdin, control), daemon=True).start()
    try:
        return 0 if run(order, control, stdout) else 1
    except BrokenPipeError:
        return 3  # nobody reads any more
    except Exception as error:
        # Left to Python, its exit would abort over the reader of stdin, and hide this one's words.
        traceback.print_exc()
        message = f"The load generator failed: {type(error).__name__}: {error}"
        _emit(stdout, Report(phase="failed", message=message))
        return 4


if __name__ == "__main__":
    sys.stdout.flush()
    status = main()
    os._exit(status)  # a reader of stdin may still hold the interpreter's exit
