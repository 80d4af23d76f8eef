"""Names of all that decides what may be reused: keys and values of a prefix, or whole answers."""

from __future__ import annotations

from collections.abc import Mapping

from engine.runner import ModelRunner
from ipc.messages import KnobValue, ModelInfo


def kv_identity(model: ModelInfo, runner: ModelRunner, values: Mapping[str, KnobValue]) -> str:
    """What decides the keys and values of a token, beside the tokens before it and the salt."""
    return f"{_weights(model, runner)}|kv={values['kv_dtype']}|window={values['sliding_window']}"


def answer_identity(model: ModelInfo, runner: ModelRunner, max_model_len: int) -> str:
    """What decides an answer, beside the request and the knobs, as long as the engine runs."""
    return f"{_weights(model, runner)}|{model.tokenizer_sha256}|{runner.kernels}|{max_model_len}"


def _weights(model: ModelInfo, runner: ModelRunner) -> str:
    assert runner.precision is not None  # otherwise there is no pool whose content had to be named
    return f"{model.sha256 or model.path}|{model.name}|{runner.dtype}|{runner.precision.name}"
