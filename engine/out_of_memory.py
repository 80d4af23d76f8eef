"""Running out of memory: what was asked for and what there was, in bytes, and going on after it.

torch's own error holds its figures only in its text, which changes between versions. The allocator also tells
an observer, at the moment itself: what is free later, when the error is caught, is another figure, since
memory is given back on the way. Sources: torch's CUDACachingAllocator, `torch.cuda.memory_stats`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from engine.memory import available
from engine.sizes import size

log = logging.getLogger(__name__)

ERRORS = (MemoryError, torch.OutOfMemoryError)
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY
CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCaptureUnsupported to ...CaptureWrongThread
# How errors without a class or code of their own begin or end: of torch's allocator for the CPU (the latter
# on Windows), which says how much was asked for; and of CUDA, Triton, cuBLAS and its like, which do not.
HOST_MEMORY = ("can't allocate memory", "not enough memory")
NO_MEMORY = ("out of memory", "_STATUS_ALLOC_FAILED", *HOST_MEMORY)
# What CUDA and its libraries take they take of what the driver has free, not of what torch holds.
BESIDE_TORCH = (
    "it is taken beside what torch holds: end other programs on the card, or give the KV pool less "
    "(kv_pool_gib, gpu_memory_utilization)"
)
MORE_THAN_COUNTS = "Storage size calculation overflowed"  # torch's text where bytes fill more than 64 bits
# After these every use of the device fails until the process is gone. The runtime and the driver number them
# alike, and say them alike. Source: CUDA runtime API, `cudaError`.
LOST = {
    4: "driver shutting down",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
    999: "unknown error",
}
# What speaks of a device by text alone: torch of the runtime, the driver and cuBLAS, Triton, cuDNN.
OF_DEVICE = re.compile(
    r"CUDA (?:driver )?error|Triton Error \[CUDA\]|cuDNN (?:Frontend )?error|CUBLAS_STATUS_"
)
LOST_BY_TEXT = re.compile(
    rf"(?:CUDA (?:driver )?error|Triton Error \[CUDA\]): (?:{'|'.join(map(re.escape, LOST.values()))})"
)

ErrorKind = Literal["memory", "lost", "own"]


def kind_of(error: BaseException) -> ErrorKind:
    """Whether an error is a lack of memory, of a device that is lost, or of what was done itself.

    After the first and the last the device goes on; after the other every use of it fails. torch has one
    class for all that CUDA answers: also where pinned memory, a graph or a kernel that is loaded late finds
    no memory, which its own allocator has no part in; Triton and torch's other libraries have only a text.
    Where neither tells, the device is asked, which waits for what it computes.
    """
    if isinstance(error, ERRORS):
        return "memory"
    # Errors of the engine's own classes may cite such a text of an error that was dealt with.
    if type(error) not in (RuntimeError, torch.AcceleratorError):
        return "own"
    known = _known_kind(error)
    return known if known is not None else "own" if _device_answers() else "lost"


def _known_kind(error: BaseException) -> ErrorKind | None:
    """The kind by code or text; None for an error of the device that may leave it good or not."""
    by_cuda, text = isinstance(error, torch.AcceleratorError), str(error)
    code = getattr(error, "error_code", None) if by_cuda else None
    if code is not None:
        if code == OUT_OF_MEMORY:
            return "memory"
        return "lost" if code in LOST else "own" if code in CAPTURE_ERRORS else None
    if LOST_BY_TEXT.search(text) or (by_cuda and text.startswith(tuple(LOST.values()))):
        return "lost"
    if any(each in text for each in NO_MEMORY):
        return "memory"
    return None if by_cuda or OF_DEVICE.search(text) else "own"


def _device_answers() -> bool:
    """Whether the device still does what it is asked for; True where none was used yet."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # a capture that could not be ended forbids to wait
        return _known_kind(error) in ("memory", "own")
    return True


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes of a card: what is free, by the driver, and what torch's allocator holds and has given out."""

    free: int
    total: int
    reserved: int
    allocated: int

    @classmethod
    def of(cls, device: torch.device) -> CardMemory:
        free, total = torch.cuda.mem_get_info(device)
        return cls(free, total, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))

    def __str__(self) -> str:
        return (
            f"{size(self.free)} of the card's {size(self.total)} are free; "
            f"torch holds {size(self.reserved)}, of which {size(self.allocated)} are in use"
        )


@dataclass(frozen=True, slots=True)
class _Told:
    """What the allocator told of an error that is on its way to whoever catches it."""

    text: str
    at_s: float


RECENT_S = 10  # whatever is caught later than that is another error, of somebody who was not told of
_told: _Told | None = None
_TOLD = "told"  # where an error keeps it


def watch(device: torch.device) -> None:
    """Let the allocator of a GPU tell what was asked for when it has no memory. Once, at start."""
    if device.type != "cuda":
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]  # untyped in torch
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    why = f"torch {torch.__version__} has no way to ask it"
    if attach is not None:
        try:
            attach(_note)
        except RuntimeError as error:  # of PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync, which has none
            why = str(error).splitlines()[0]
        else:
            return
    log.info("what was asked for when memory runs out is not told, only what there was: %s", why)


def _note(index: int, asked: int, _total: int, _free: int) -> None:
    """Called by the allocator, before it raises its error."""
    global _told
    try:
        text = f"{size(asked)} were asked for, {CardMemory.of(torch.device('cuda', index))}"
        _told = _Told(text, time.monotonic())
    except Exception as error:  # raised into the allocator it would hide what happened
        log.warning("what memory there was cannot be told: %s", error)


def _take() -> str | None:
    """What was told of the newest error, once: the next one may be one that nothing is told of."""
    global _told
    told, _told = _told, None
    return told.text if told is not None and time.monotonic() - told.at_s < RECENT_S else None


def shortage(device: torch.device, needed: int) -> str:
    """What is needed of a device's memory and what there is, for an error's text."""
    if device.type == "cuda":
        return f"{size(needed)} are needed, {CardMemory.of(device)}"
    free, where = available()
    return f"{size(needed)} are needed, {size(free)} can be had {where}"


def is_shortage(error: BaseException) -> bool:
    """Whether taking memory failed because there is not as much."""
    return kind_of(error) == "memory" or str(error).startswith(MORE_THAN_COUNTS)


@contextmanager
def allocating(what: str, device: torch.device, needed: int, advice: str) -> Iterator[None]:
    """Where memory for ``what`` is taken: if there is none, MemoryError says what is needed and there.

    Every other error comes as it is.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # the CPU's allocator raises the former
        if not is_shortage(error):
            raise
        let_go(error)
        _take()  # it is told of here
        raise MemoryError(f"no memory for {what}: {shortage(device, needed)}; {advice}") from error


def text_of(error: BaseException) -> str:
    """What an error says, of running out of memory in figures; its kind where it says nothing, as Python's
    own MemoryError does.

    How much was asked for torch's own allocator tells. Nobody does where CUDA, cuBLAS, cuDNN or Triton found
    no memory: then there is what the card has now, and what to do about it.
    """
    said = str(error) or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        if not hasattr(error, _TOLD):  # the same error may be told of twice
            setattr(error, _TOLD, _take() or _present())
        told = getattr(error, _TOLD)
        return f"out of device memory: {told}" if told else said
    by_library = isinstance(error, RuntimeError) and not any(each in said for each in HOST_MEMORY)
    if by_library and kind_of(error) == "memory":
        first = said.splitlines()[0]  # torch adds how to debug kernels
        told = _present()
        unknown = f"{first}, which does not say how much was asked for"
        return f"out of device memory: {unknown}; {told}; {BESIDE_TORCH}" if told else first
    return said


def _present() -> str | None:
    """What memory the card has now, None without one."""
    if not torch.cuda.is_available():
        return None
    return str(CardMemory.of(torch.device("cuda", torch.cuda.current_device())))


def let_go(error: BaseException | None) -> None:
    """Drop the frames of an error and of what led to it: they hold the tensors of what was going on."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def recover(error: BaseException | None, device: torch.device) -> None:
    """Give back what a failed piece of work held, so that the next one finds it."""
    if error is not None:
        text_of(error)  # what was asked for stays with the error, if that is told of later
    _take()
    let_go(error)
    if device.type == "cuda":
        torch.cuda.empty_cache()
