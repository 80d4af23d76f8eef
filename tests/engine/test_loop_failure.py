"""A step loop that fails, seen from a client: the server and a real core in this process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from engine.bringup import bring_up, explain
from engine.config import EngineConfig
from engine.lifetime import ExitCode, Lifetime
from engine.server import EngineServer
from ipc import messages as m
from ipc.client import Client, EngineError, EngineGone
from ipc.endpoints import check_address, private_dir, telemetry_address
from tests.engine.harness import write_model


def test_every_stream_ends_with_an_error_and_the_reason_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09: an engine whose loop died says so; nobody waits for ever."""
    directory = private_dir(Path("/tmp") / f"decodeck-test-{os.getpid()}")
    ctl = check_address(f"ipc://{directory}/e.ctl")
    lifetime = Lifetime()
    info = m.EngineInfo(version="1", pid=os.getpid(), host="h", started_unix_ms=1)
    server = EngineServer(ctl, telemetry_address(ctl), info, lifetime, session="s")
    lifetime.on_stop(server.inbox.wake)
    server.start()
    try:
        config = EngineConfig(
            model=write_model(tmp_path / "m"), load_format="dummy", device="cpu", kv_pool_bytes=1 << 22
        )
        core, knobs, tokenizer = bring_up(config, server.sink, server.loading, server.gpu.follow)
        server.attach(core, knobs, tokenizer)
        loop = threading.Thread(target=_run, args=(core, lifetime, server))
        loop.start()
        with Client(server.ctl_url) as client:
            client.hello()
            client.wait_ready(60.0)
            sampling = m.Sampling(max_tokens=5000, ignore_eos=True)
            streams = [client.submit(f"{n}", sampling=sampling) for n in range(3)]
            next(streams[0])
            monkeypatch.setattr(core.scheduler, "advance", _fail)
            for stream in streams:
                done = stream.result()[2]
                assert (done.finish, done.code) == ("error", "internal")
                assert "Traceback" not in done.message
            loop.join()
            with pytest.raises(EngineGone, match="the step loop failed"):
                client.wait_ready(60.0)
            with pytest.raises(EngineError, match="the engine has failed"):
                client.submit("more")
            assert not [row for row in client.snapshot().requests if row.state != "finished"]
    finally:
        lifetime.stop.set()
        server.inbox.wake()
        server.join(30.0)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def _fail(*_: object) -> None:
    raise ArithmeticError("the sum of the blocks is wrong")


def _run(core: object, lifetime: Lifetime, server: EngineServer) -> None:
    try:
        core.run(lifetime.stop)  # type: ignore[attr-defined]
    except Exception as error:
        code, reason = explain(error, running=True)
        assert code == ExitCode.LOOP_FAILED
        time.sleep(0.05)
        server.failed(reason)
