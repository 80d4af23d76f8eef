"""How long work takes on the device: the one place where a card and a CPU differ.

On a card calls are captured in a CUDA graph and timed between two events, for launching a kernel from Python
takes longer than most kernels do. The card is kept busy until both events and the graph are on their way to
it. So a figure holds what lies between two nodes of a graph, about a microsecond, as it does in the engine,
and nothing of the host's. Who wants memory to be read and not the cache gives calls over several buffers.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from engine.graphs.driver import stop_recording

Work = Callable[[], object]
MIN_NODES = 24  # launches of a graph that is timed
WARM_S = 0.5
BUSY_CYCLES = 600_000  # about 0.3 ms, longer than it takes to launch a graph of some hundred nodes


class Timer:
    """Takes times on one device."""

    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self.device = device
        self.on_card = device.type == "cuda"
        self._quick = quick  # every call once, on the same buffers: for a dry run
        self._budget_s, self._most = 0.08, 60

    @property
    def cache_bytes(self) -> int:
        """Of the last cache before memory."""
        if not self.on_card:
            return 1 << 16
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def copies(self, nbytes: int, most: int = 48) -> int:
        """Over how many buffers of ``nbytes`` calls must go around so that none finds its own in a cache."""
        if self._quick:
            return 1
        return min(most, max(2, -(-2 * self.cache_bytes // max(1, nbytes))))

    def synchronize(self) -> None:
        if self.on_card:
            torch.cuda.synchronize(self.device)

    def kernel_s(self, calls: Sequence[Work]) -> float:
        """Median seconds of one call. They are run in turn; each launches the same kernels."""
        if not self.on_card:
            return self.wall_s(lambda: [call() for call in calls]) / len(calls)
        rounds = -(-MIN_NODES // len(calls))
        graph = self.captured(lambda: [call() for _ in range(rounds) for call in calls], warm=calls)
        return self.events_s(graph.replay) / (rounds * len(calls))

    def captured(self, work: Work, *, warm: Sequence[Work] = ()) -> torch.cuda.CUDAGraph:
        """A graph of what ``work`` launches, after ``warm`` (or itself) was run so that all is loaded."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for each in warm or (work,):
                each()
        self.synchronize()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
        except BaseException:  # a capture that cannot be ended leaves its own stream behind
            torch.cuda.set_stream(current)
            stop_recording(self.device, pool)
            raise
        return graph

    def events_s(self, work: Work) -> float:
        """Median seconds of the card's own time between two events around ``work``."""
        work()
        self.synchronize()
        times: list[float] = []
        end = time.perf_counter() + self._budget_s
        while self._goes_on(times, end):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e-3)
        return statistics.median(times)

    def wall_s(self, work: Work) -> float:
        """Median seconds of ``work`` on the host's clock, the wait for the device included."""
        times: list[float] = []
        if not self._quick:
            work()
        self.synchronize()
        end = time.perf_counter() + self._budget_s
        while not times or (not self._quick and self._goes_on(times, end)):
            start = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def warm_up(self, work: Work) -> None:
        """Run ``work`` until a card that was idle has raised its clocks."""
        end = time.perf_counter() + (WARM_S if self.on_card else 0.0)
        while time.perf_counter() < end:
            work()
            self.synchronize()

    def _goes_on(self, times: list[float], end: float) -> bool:
        return len(times) < 3 or (time.perf_counter() < end and len(times) < self._most)

    def trim(self) -> None:
        """Give back memory that was let go of, without looking for what refers to itself."""
        if self.on_card:
            torch.cuda.empty_cache()

    def free(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        self.trim()
