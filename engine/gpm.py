"""NVML's GPU performance monitoring: averages between two samples, from Hopper on.

The support flag is not to be trusted alone, so the first real sample decides. Source: NVML API reference,
"GPM Functions"; NVML wants at least 100 ms between samples.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

_MIN_GAP_S = 0.1
_SM_UTIL = 2  # NVML_GPM_METRIC_SM_UTIL
_DRAM_BW_UTIL = 10  # NVML_GPM_METRIC_DRAM_BW_UTIL


@dataclass(frozen=True, slots=True)
class GpmReading:
    """Averages since the reading before, None where unknown. DRAM is a share of the theoretical peak."""

    sm_percent: float | None = None
    dram_percent: float | None = None


class GpmSampler:
    """Reads one card. Turns itself off for good at the first error."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._last: Any = None
        self._last_s = 0.0
        self.off_reason = ""

    def read(self) -> GpmReading:
        """The averages since the last call; unknown in the first one."""
        if self.off_reason:
            return GpmReading()
        try:
            return self._read()
        except Exception as error:
            self.off_reason = str(error) or type(error).__name__
            return GpmReading()

    def _read(self) -> GpmReading:
        nvml = self._nvml
        if self._last is None and not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
            self.off_reason = "this card has no GPM"
            return GpmReading()
        now_s = time.monotonic()
        if self._last is not None and now_s - self._last_s < _MIN_GAP_S:
            return GpmReading()
        sample = nvml.nvmlGpmSampleGet(self._handle, nvml.nvmlGpmSampleAlloc())
        before, self._last, self._last_s = self._last, sample, now_s
        if before is None:
            return GpmReading()
        try:
            return self._metrics(before, sample)
        finally:
            nvml.nvmlGpmSampleFree(before)

    def _metrics(self, before: Any, after: Any) -> GpmReading:
        nvml = self._nvml
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = 2
        query.sample1, query.sample2 = before, after
        query.metrics[0].metricId = _SM_UTIL
        query.metrics[1].metricId = _DRAM_BW_UTIL
        nvml.nvmlGpmMetricsGet(query)
        sm, dram = (
            float(metric.value) if metric.nvmlReturn == 0 else None
            for metric in (query.metrics[0], query.metrics[1])
        )
        return GpmReading(sm_percent=sm, dram_percent=dram)
