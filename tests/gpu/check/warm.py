"""Compiles the kernels in several processes at once, so that later stages find them in Triton's cache."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tests.gpu.check.context import Context

MOST_WORKERS = 8
WAIT_S = 60.0


def run(context: Context) -> dict[str, Any]:
    """Seconds in all and of each kernel's first run. In a dry run one process runs the first of them."""
    from tests.gpu.check.cases import cases
    from tests.gpu.check.correctness import sizes

    names = list(cases(sizes(context)))
    workers = min(MOST_WORKERS, max(1, (os.cpu_count() or 2) - 1))
    if context.settings.tiny:
        workers, names = 1, names[:1]
    parts = [names[i::workers] for i in range(workers)]
    began = time.perf_counter()
    found: dict[str, float | str] = {}
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        for future in [pool.submit(first_runs, context.settings.tiny, part) for part in parts]:
            found |= future.result(timeout=max(0.0, began + WAIT_S - time.perf_counter()))
    finally:
        still = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in still:  # what compiles on would run beside the measurements
            process.terminate()
    return {"workers": workers, "seconds": round(time.perf_counter() - began, 2), "first_run": found}


def first_runs(tiny: bool, names: list[str]) -> dict[str, float | str]:
    """Run cases once, in a process of its own: the seconds of each, or what it failed with."""
    from tests.gpu.check.case import TINY, Sizes
    from tests.gpu.check.cases import cases

    makers, found = cases(TINY if tiny else Sizes()), {}
    for name in names:
        began = time.perf_counter()
        try:
            for output in makers[name]().run():
                output.cpu()
        except Exception as error:  # `correctness` will say so too; the other kernels still want warming
            found[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            found[name] = round(time.perf_counter() - began, 2)
    return found  # type: ignore[return-value]
