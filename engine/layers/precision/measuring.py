"""How long products with quantized weights take here, in each form and for several numbers of rows.

On a CPU, by the clock, as a forward pass computes them. On a card the host only launches, which takes as long
as some of the products do and is nothing once steps are graphs: so a pass is captured, and what lies between
two events around its replay is the card's own time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.graphs.driver import make_driver
from engine.layers.precision.forms import PrecisionForm
from engine.layers.precision.product import Product
from engine.layers.precision.weights import QuantizedWeight
from engine.native import forward_pass
from engine.out_of_memory import kind_of, text_of

log = logging.getLogger(__name__)

PROBE_ROWS = (1, 4, 16, 64, 256)
"""Numbers of rows that are measured. A choice holds from above the one before up to its number."""
FEW = 4  # up to so many rows pass over all samples, which shall not fit into caches
MANY_ROWS_SAMPLES = 4
HOPELESS = 3.0  # a form that takes this many times as long as another is not measured for more rows
PASSES = 4  # of which the best counts


def measure(
    forms: Sequence[PrecisionForm],
    samples: Sequence[QuantizedWeight],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> dict[PrecisionForm, dict[int, float]]:
    """Seconds of one pass over the samples for each form and number of rows, the best of some passes.

    ``dtype``: of activations, in and out. A form that is hopeless for some number of rows from `FEW` on is
    not measured for more: its time is infinite there.
    """
    built = {form: [form.build(weight, None, dtype) for weight in samples] for form in forms}
    times: dict[PrecisionForm, dict[int, float]] = {form: {} for form in forms}
    for rows in PROBE_ROWS:
        inputs = {
            weight.shape[1]: torch.ones(rows, weight.shape[1], dtype=dtype, device=device)
            for weight in samples
        }
        used = slice(None) if rows <= FEW else slice(MANY_ROWS_SAMPLES)
        for form in forms:
            if float("inf") in times[form].values():
                times[form][rows] = float("inf")
                continue
            times[form][rows] = _best_s(form.name, built[form][used], inputs, device)
        best = min(took[rows] for took in times.values())
        for took in times.values():
            if rows > FEW and took[rows] > HOPELESS * best:
                took[rows] = float("inf")
    return times


def _best_s(name: str, products: Sequence[Product], inputs: dict[int, Tensor], device: torch.device) -> float:
    def run() -> None:
        for product in products:
            product(inputs[product.shape[1]])

    if device.type != "cuda":
        return min(_host_s(run) for _ in range(PASSES))
    try:
        replay = _captured(run, device)
    except RuntimeError as error:
        if kind_of(error) != "own":
            raise
        # It may serve steps that are no graphs; what launching takes then counts as its own time.
        log.warning("products by %s cannot be captured in a CUDA graph: %s", name, text_of(error))
        replay = run
    return min(_card_s(replay, device))


def _host_s(run: Callable[[], None]) -> float:
    with forward_pass():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What launches the same at once, after ``run`` was run so that all is compiled and loaded."""
    return make_driver(device).capture(run).replay


def _card_s(replay: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds of the card's own time in each of some passes.

    Before each, more is written than its cache holds: a model is larger than these samples. The card is
    still at that when the host launches, which the time is thus free of.
    """
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(2 * cache, dtype=torch.uint8, device=device)
    marks = []
    for _ in range(PASSES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        other.zero_()
        begin.record()
        replay()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) * 1e-3 for begin, end in marks]
