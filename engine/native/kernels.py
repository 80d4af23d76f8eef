"""The compiled kernels as functions over tensors."""

from __future__ import annotations

import ctypes
import logging
import threading
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from engine.native.build import NotBuilt, build

log = logging.getLogger(__name__)

WEIGHT_DTYPES = (torch.bfloat16, torch.float32)


class PanelWeight:
    """A weight [out, in] laid out in panels for `Kernels.linear`; bias [out] in float32 or None.

    ``nbytes``: of what is held, the rest of the last panel included.
    """

    __slots__ = ("bias", "bias_at", "num_panels", "panels", "panels_at", "shape", "width")

    def __init__(self, weight: Tensor, bias: Tensor | None, panel: int) -> None:
        out, cols = weight.shape
        self.shape = (out, cols)
        self.num_panels = -(-out // panel)
        self.width = self.num_panels * panel
        missing = self.width - out
        padded = torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
        # bfloat16: both halves of a panel take turns, so that one load fetches a pair of vectors.
        halves = padded.view(self.num_panels, 2, panel // 2, cols)
        order = (0, 3, 2, 1) if weight.dtype == torch.bfloat16 else (0, 3, 1, 2)
        self.panels = halves.permute(order).contiguous()
        self.bias = None
        if bias is not None:
            self.bias = torch.nn.functional.pad(bias.float(), (0, missing)).contiguous()
        self.panels_at = self.panels.data_ptr()
        self.bias_at = None if self.bias is None else self.bias.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes


class Kernels:
    """Functions of the library at ``path``. All are safe to call from any thread, and release the GIL."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.panel_width = int(library.panel_width())
        self._linear = {torch.bfloat16: library.linear_bf16, torch.float32: library.linear_fp32}
        for function in self._linear.values():
            function.restype = None
            function.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int]
        self.awake = _Awake(library)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PanelWeight:
        """Lay out a weight [out, in] on the CPU in bfloat16 or float32. Raises ValueError for others."""
        if weight.dtype not in self._linear or weight.dim() != 2 or weight.device.type != "cpu":
            raise ValueError(
                f"weights are {weight.dtype} {list(weight.shape)} on {weight.device}, "
                "bfloat16 or float32 [out, in] on the CPU is needed"
            )
        return PanelWeight(weight, bias, self.panel_width)

    def linear(self, x: Tensor, weight: PanelWeight) -> Tensor:
        """x [rows, in] of any dtype -> float32 [rows, out]: ``x @ weight.T + bias`` with float32 sums.

        Each row's sums run in the same order however many rows there are. Raises ValueError if x does not
        fit.
        """
        out, cols = weight.shape
        if x.dim() != 2 or x.shape[1] != cols or x.device.type != "cpu":
            raise ValueError(f"x is {list(x.shape)} on {x.device}, [rows, {cols}] on the CPU is needed")
        rows, width = x.shape[0], weight.width
        y = torch.empty(rows, width)
        if rows:
            x = x.to(torch.float32).contiguous()
            self._linear[weight.panels.dtype](
                x.data_ptr(),
                rows,
                weight.panels_at,
                weight.num_panels,
                cols,
                weight.bias_at,
                y.data_ptr(),
                torch.get_num_threads(),
            )
        return y if width == out else y[:, :out].contiguous()


class _Awake:
    """While entered, and it may be entered several times, the library's threads stay awake between jobs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._begins, self._ends = library.pass_begins, library.pass_ends
        for mark in (self._begins, self._ends):
            mark.restype, mark.argtypes = None, []

    def __enter__(self) -> None:
        self._begins()

    def __exit__(self, *_: object) -> None:
        self._ends()


_lock = threading.Lock()
_found: Kernels | str | None = None
_NOTHING = nullcontext()


def kernels() -> Kernels | None:
    """The kernels of this machine, compiled at the first call; None if they cannot be had (`unavailable`)."""
    global _found
    with _lock:
        if _found is None:
            try:
                _found = Kernels(build())
            except (NotBuilt, OSError, AttributeError) as error:
                _found = str(error)
                log.warning("kernels in C++ are not used, torch's own are: %s", _found)
        return _found if isinstance(_found, Kernels) else None


def unavailable() -> str:
    """Why there are no kernels; "" if there are."""
    kernels()
    return _found if isinstance(_found, str) else ""


def forward_pass() -> AbstractContextManager[None]:
    """What a forward pass is to run in: it keeps the threads of the kernels awake, if they are in use."""
    return _found.awake if isinstance(_found, Kernels) else _NOTHING
