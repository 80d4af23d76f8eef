"""The compiled kernels as functions over tensors."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.native import panels, selftest
from engine.native.build import NotBuilt, build
from engine.native.panels import PLAIN_KINDS, Panels

log = logging.getLogger(__name__)

WEIGHT_DTYPES = tuple(PLAIN_KINDS)
STORED_AS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""How the library numbers dtypes: ``StoredAs`` in ``parts.h``."""
_ATTENTION = {
    (torch.float32, torch.float32): "fp32_fp32",
    (torch.float32, torch.int8): "fp32_int8",
    (torch.float32, torch.float8_e4m3fn): "fp32_e4m3",
    (torch.bfloat16, torch.bfloat16): "bf16_bf16",
    (torch.bfloat16, torch.int8): "bf16_int8",
    (torch.bfloat16, torch.float8_e4m3fn): "bf16_e4m3",
}
Function = Callable[..., None]


class Kernels:
    """Functions of the library at ``path``. All are safe to call from any thread, and release the GIL."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.panel_width, self.vector_width = int(library.panel_width()), int(library.vector_width())
        # x, its rows; a `LinearWeight` by reference; y; threads. See ``linear.cpp``.
        linear = [c_void_p, c_int64, c_void_p, c_void_p, c_int]
        kinds = ("fp32", "bf16", "int8", "int4")
        self._linear = {kind: _declared(library, f"linear_{kind}", linear) for kind in kinds}
        # x, delta or null, weight, y; rows, columns; eps; threads. See ``norm.cpp``.
        add_norm = [*[c_void_p] * 4, c_int64, c_int64, c_float, c_int]
        # Gate and up side by side, y; rows, columns of y; threads. See ``gate.cpp``.
        silu_mul = [c_void_p, c_void_p, c_int64, c_int64, c_int]
        by_dtype = PLAIN_KINDS.items()
        self.add_norm = {dtype: _declared(library, f"add_norm_{kind}", add_norm) for dtype, kind in by_dtype}
        self.silu_mul = {dtype: _declared(library, f"silu_mul_{kind}", silu_mul) for dtype, kind in by_dtype}
        # A `QKVStep` and a `QKVLayer` by reference; threads.
        self.store_qkv = _declared(library, "store_qkv", [c_void_p, c_void_p, c_int])
        # An `AttentionItems` and an `AttentionLayer` by reference; threads.
        self._attention = {
            dtypes: _declared(library, f"attention_{name}", [c_void_p, c_void_p, c_int])
            for dtypes, name in _ATTENTION.items()
        }
        # A `Stack` and a `StackStep` by reference; threads.
        self.run_stack = _declared(library, "stack_run", [c_void_p, c_void_p, c_int])
        self.stack_scratch = library.stack_scratch
        self.stack_scratch.restype, self.stack_scratch.argtypes = c_int64, [c_void_p, c_void_p]
        # Scores, numbers from row to row, rows, numbers of a row; what is packed. See ``sample.cpp``.
        rows = [c_void_p, *[c_int64] * 3, c_void_p]
        self.sample = _declared(library, "sample", [*rows, c_float, c_void_p, c_int])
        self.probabilities = _declared(library, "probabilities", [*rows, c_void_p, c_int])
        self.penalize = _declared(library, "penalize", [c_void_p, c_int64, c_int64, *[c_void_p] * 4])
        self.reject = _declared(library, "reject", [c_void_p, c_int])
        self.awake = _Awake(library)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Panels:
        """Lay out a weight [out, in] on the CPU in bfloat16 or float32. Raises ValueError for others."""
        return panels.plain(weight, bias, self.panel_width)

    def linear(self, x: Tensor, weight: Panels) -> Tensor:
        """x [rows, in] of any dtype -> float32 [rows, out]: ``x @ weight.T + bias`` with float32 sums.

        Each row's sums run in the same order however many rows there are. Raises ValueError if x does not
        fit.
        """
        out, cols = weight.shape
        if x.dim() != 2 or x.shape[1] != cols or not x.is_cpu:
            raise ValueError(f"x is {list(x.shape)} on {x.device}, [rows, {cols}] on the CPU is needed")
        rows, width = x.shape[0], weight.width
        y = torch.empty(rows, width)
        if rows:
            # Asked before: calls that change nothing take as long as a small product, 120 times a token.
            if x.dtype is not torch.float32:
                x = x.float()
            if not x.is_contiguous():
                x = x.contiguous()
            self._linear[weight.kind](
                x.data_ptr(), rows, weight.reference, y.data_ptr(), torch.get_num_threads()
            )
        return y if width == out else y[:, :out].contiguous()

    def address_of_linear(self, weight: Panels) -> int:
        """Where in memory the function lies that multiplies with such panels."""
        return address(self._linear[weight.kind])

    def attention(self, compute: torch.dtype, held: torch.dtype) -> Function:
        """What attends with queries in ``compute`` to keys and values held in ``held``.

        Raises ValueError where there is none.
        """
        function = self._attention.get((compute, held))
        if function is None:
            raise ValueError(f"there is no attention in {compute} over keys and values in {held}")
        return function


def address(function: Function) -> int:
    """Where in memory a function of the library lies."""
    found = ctypes.cast(function, c_void_p).value  # type: ignore[arg-type]  # what `_declared` gives is one
    assert found is not None
    return found


class _Awake:
    """While entered, and it may be entered several times, the library's threads stay awake between jobs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._begins, self._ends = (_declared(library, name, []) for name in ("pass_begins", "pass_ends"))

    def __enter__(self) -> None:
        self._begins()

    def __exit__(self, *_: object) -> None:
        self._ends()


def _declared(library: ctypes.CDLL, name: str, types: list[Any]) -> Function:
    function = getattr(library, name)
    function.restype, function.argtypes = None, types
    declared: Function = function
    return declared


_lock = threading.Lock()
_found: Kernels | str | None = None
_NOTHING = nullcontext()


def _silent() -> None:
    """Nobody wants to hear that it takes a while."""


def kernels(announce: Callable[[], None] = _silent) -> Kernels | None:
    """The kernels of this machine, compiled at the first call; None if they cannot be had (`unavailable`).

    ``announce`` is called before something is compiled, which takes some seconds.
    """
    global _found
    with _lock:
        if _found is None:
            _found = _find(announce)
            if isinstance(_found, str):
                log.warning("kernels in C++ are not used, torch's own are: %s", _found)
            else:
                log.info("kernels in C++ compute with vectors of %d numbers", _found.vector_width)
        return _found if isinstance(_found, Kernels) else None


def _find(announce: Callable[[], None]) -> Kernels | str:
    """The kernels, or why there are none."""
    try:
        found = Kernels(build(announce=announce))
    except (NotBuilt, OSError, AttributeError) as error:
        return str(error)
    wrong = selftest.wrong(found)
    return f"they were compiled and compute wrongly here ({wrong}): try another compiler" if wrong else found


def unavailable() -> str:
    """Why there are no kernels; "" if there are."""
    kernels()
    return _found if isinstance(_found, str) else ""


def forward_pass() -> AbstractContextManager[None]:
    """What a forward pass is to run in: it keeps the threads of the kernels awake, if they are in use."""
    return _found.awake if isinstance(_found, Kernels) else _NOTHING
