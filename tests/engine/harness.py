"""Real engine processes for tests, on a tiny model with random weights made from its config alone."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ipc import messages as m
from ipc.client import Client

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
SLOW_TO_LOAD = TINY | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, config: dict[str, Any] = TINY) -> Path:
    """A model folder that ``--load-format dummy`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class EngineUnderTest:
    """An engine process, ready to be talked to; its model may still be loading."""

    def __init__(
        self, model: Path, *arguments: str, managed: bool = True, max_files: int | None = None
    ) -> None:
        self.command = [sys.executable, "-m", "engine", "--model", str(model), "--load-format", "dummy"]
        self.command += ["--threads", "1", "--kv-pool-gib", "0.02", *arguments]
        if managed:
            self.command.append("--managed")

        def limit_files() -> None:
            if max_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit_files,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine said nothing: {self.errors()}")
        self.ready: dict[str, Any] = json.loads(line)
        self.ctl: str = self.ready["ctl"]

    def errors(self) -> str:
        """Everything it wrote to stderr, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[Client]:
        """A client that has said hello."""
        with Client(self.ctl, **{"silence_s": 60.0, **options}) as client:
            client.hello(60.0)
            yield client

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        with self.client() as client:
            client.wait_ready(240.0)

    def end(self, timeout_s: float = 60.0) -> int:
        """Its exit code, after having it killed if need be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        code = self.process.wait(timeout_s)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition; the generous limit only keeps a broken program from hanging the tests."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.01)


def greedy(client: Client, prompt: str | list[int], max_tokens: int = 12) -> tuple[list[int], str]:
    """Ids and text that the engine answers a prompt with."""
    sampling = m.Sampling(max_tokens=max_tokens, ignore_eos=True)
    ids, text, done = client.submit(prompt, sampling=sampling).result()
    assert done.finish == "length", done
    return ids, text
