"""The parts of a decoder compiled by ``torch.compile``, each in one piece.

Compiling takes long, so it is done for one row and for any greater number of rows before the parts are used,
on whatever thread asks for it. Linear layers and attention stay as they are: their implementations are chosen
by measuring, and torch cannot look into them. See "torch.compiler" in PyTorch's documentation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import availability
from engine.layers.linear import LinearLayer
from engine.layers.mlp import GatedMLP
from engine.layers.norm import head_rms_norm, rms_norm
from engine.layers.quantized import AnyRows
from engine.layers.rope import rotate_
from engine.models.decoder import Decoder
from engine.models.reading import Progress
from engine.native import unavailable
from engine.ops.base import Ops
from engine.ops.plain import TorchStoreQKV

NAME = "compile"
STAGE = "compiling parts of the decoder"  # as the console shows it
_ROWS = (1, 3)  # torch compiles for one row by itself, and at once for all greater numbers

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def probe(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device, or None."""
    if device.type == "cuda":
        return availability.probe(device)
    # What keeps the kernels in C++ from being compiled keeps torch from it.
    return unavailable() or None


def _add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    x += delta
    return rms_norm(x, weight, eps)


def _rotate(qk: Tensor, cos: Tensor, sin: Tensor) -> None:
    rotate_(qk, cos, sin)


def _norm_rotate(qk: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float) -> None:
    qk.copy_(head_rms_norm(qk, weight, eps))
    rotate_(qk, cos, sin)


def _silu_mul(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate) * up


class CompiledParts:
    """The parts for one decoder. ``backend`` is torch's: what makes code of what was recorded."""

    def __init__(self, decoder: Decoder, backend: str = "inductor") -> None:
        self._decoder = decoder

        def compiled(part: Callable[P, R]) -> Callable[P, R]:
            return torch.compile(part, fullgraph=True, backend=backend)

        self._run = _Compiled(
            compiled(rms_norm),
            compiled(_add_norm),
            compiled(_rotate),
            compiled(_norm_rotate),
            compiled(_silu_mul),
        )
        self.ready = False

    @property
    def ops(self) -> Ops:
        """The parts, compiled now unless that was done before. See `compile`."""
        if not self.ready:
            self.compile(lambda stage, done_bytes, total_bytes: None)
        return Ops(_AddNorm(self._run), _StoreQKV(self._run), _Gate(self._run))

    def compile(self, progress: Progress) -> None:
        """Compile all parts; steps may go on meanwhile. ``progress`` hears of it before each.

        Raises RuntimeError with what torch says if a part cannot be compiled.
        """
        log.info("compiling parts of the decoder, which takes up to some minutes")
        from torch._inductor import config  # takes long to import, and few need it

        config.compile_threads = 1  # or torch starts processes, which would stay beside the engine
        started = time.perf_counter()
        with torch.inference_mode():
            for rows in _ROWS:
                for name, run in self._calls(rows):
                    progress(STAGE, 0, 0)
                    try:
                        run()
                    except Exception as error:  # of torch's compiler or of the one behind it, of many classes
                        raise RuntimeError(f"torch.compile could not compile {name}: {error}") from error
        self.ready = True
        log.info("compiled parts of the decoder in %.1f s", time.perf_counter() - started)

    def _calls(self, rows: int) -> list[tuple[str, Callable[[], object]]]:
        """One call of each part that the decoder has, with its own weights: torch asks how they were made."""
        decoder, run = self._decoder, self._run
        spec, layer, dtype = decoder.spec, decoder.layers[0], decoder.activation_dtype
        eps = spec.rms_norm_eps

        def some(*shape: int) -> Tensor:
            made = torch.zeros(rows, *shape, dtype=dtype, device=decoder.device)
            if rows > 1:
                torch._dynamo.mark_dynamic(made, 0)
            return made

        x, delta, both = some(spec.hidden_size), some(spec.hidden_size), some(2 * layer.mlp.intermediate)
        qkv = some(spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        positions = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        cos, sin = decoder.rotary.at(positions, dtype)
        qk = qkv[:, : -spec.num_kv_heads]
        if rows > 1:
            for each in (qk, cos, sin):
                torch._dynamo.mark_dynamic(each, 0)
        head_norm = layer.head_norm
        rotate: Callable[[], object] = lambda: run.rotate(qk, cos, sin)  # noqa: E731
        if head_norm is not None:
            weight = head_norm
            rotate = lambda: run.norm_rotate(qk, cos, sin, weight, eps)  # noqa: E731
        return [
            ("the norm", lambda: run.norm(x, decoder.norm, eps)),
            ("the addition and the norm", lambda: run.add_norm(x, delta, decoder.norm, eps)),
            ("the rotation", rotate),
            ("the activation", lambda: run.silu_mul(both)),
        ]


def _packed(x: Tensor) -> Tensor:
    """The same with the strides of its shape, for which parts were compiled. A product's only row may have
    that of the wider memory it was written to."""
    return x.view(-1).view(x.shape) if x.shape[0] == 1 else x


@dataclass(frozen=True, slots=True)
class _Compiled:
    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    norm_rotate: Callable[[Tensor, Tensor, Tensor, Tensor, float], None]
    silu_mul: Callable[[Tensor], Tensor]


class _AddNorm:
    name = NAME
    quantizes = False

    def __init__(self, run: _Compiled) -> None:
        self._run = run

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, to: LinearLayer
    ) -> Tensor:
        if delta is None:
            return self._run.norm(x, weight, eps)
        return self._run.add_norm(x, _packed(delta), weight, eps)


class _StoreQKV(TorchStoreQKV):
    name = NAME

    def __init__(self, run: _Compiled) -> None:
        self._run = run

    def turn(
        self, qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, head_norm: Tensor | None, eps: float
    ) -> None:
        """Compiled. See `TorchStoreQKV.turn`."""
        qk = _packed(qkv)[:, :-kv_heads]
        if head_norm is None:
            self._run.rotate(qk, cos, sin)
        else:
            self._run.norm_rotate(qk, cos, sin, head_norm, eps)


class _Gate:
    name = NAME
    quantizes = False

    def __init__(self, run: _Compiled) -> None:
        self._run = run

    def __call__(self, mlp: GatedMLP, x: AnyRows) -> Tensor:
        return mlp.down(self._run.silu_mul(_packed(mlp.gate_up(x))))
