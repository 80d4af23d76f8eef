"""NVML's GPU performance monitoring: averages between two samples, from Hopper on.

The support flag is not to be trusted alone, so the first real sample decides. Source: NVML API reference,
"GPM Functions"; NVML wants at least 100 ms between samples.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from engine.cards import Card

_MIN_GAP_S = 0.1
_FINAL = (3, 4, 13)  # NVML_ERROR_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND
_MIB = 1 << 20
_METRICS = {  # NVML_GPM_METRIC_...
    "sm_percent": (2, 1),  # SM_UTIL
    "dram_percent": (10, 1),  # DRAM_BW_UTIL
    "tensor_percent": (5, 1),  # ANY_TENSOR_UTIL
    "pcie_tx": (20, _MIB),  # PCIE_TX_PER_SEC, MiB
    "pcie_rx": (21, _MIB),
    "nvlink_rx": (60, _MIB),  # NVLINK_TOTAL_RX_PER_SEC, MiB
    "nvlink_tx": (61, _MIB),
}


@dataclass(frozen=True, slots=True)
class GpmReading:
    """Averages since the reading before, None where unknown.

    DRAM is a share of the theoretical peak, PCIe and NVLink are bytes a second.
    """

    sm_percent: float | None = None
    dram_percent: float | None = None
    tensor_percent: float | None = None
    pcie_tx: float | None = None
    pcie_rx: float | None = None
    nvlink_rx: float | None = None
    nvlink_tx: float | None = None


class GpmSampler:
    """Reads one card, or part of a card. ``reason``: why the last reading told nothing, if something failed.

    What the card cannot do, or this user may not ask, is not asked again; any other error costs one average.
    """

    def __init__(self, nvml: Any, card: Card) -> None:
        self._nvml = nvml
        self._card = card
        self._last: Any = None
        self._last_s = 0.0
        self._off = False
        self.reason = ""

    def read(self) -> GpmReading:
        """The averages since the last call; unknown in the first one."""
        if self._off:
            return GpmReading()
        self.reason = ""
        try:
            return self._read()
        except Exception as error:
            self.reason = str(error) or type(error).__name__
            self._off = getattr(error, "value", None) in _FINAL
            self.close()  # no average reaches over a failure
            return GpmReading()

    def close(self) -> None:
        """Free what is held of the last sample."""
        last, self._last = self._last, None
        if last is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlGpmSampleFree(last)

    def _read(self) -> GpmReading:
        nvml, card = self._nvml, self._card
        whole = card.handle if card.whole is None else card.whole
        if self._last is None and not nvml.nvmlGpmQueryDeviceSupport(whole).isSupportedDevice:
            self.reason, self._off = "this card has no GPM", True
            return GpmReading()
        now_s = time.monotonic()
        if self._last is not None and now_s - self._last_s < _MIN_GAP_S:
            return GpmReading()
        sample = nvml.nvmlGpmSampleAlloc()
        before, self._last, self._last_s = self._last, sample, now_s
        try:
            if card.whole is None:
                nvml.nvmlGpmSampleGet(card.handle, sample)
            else:
                nvml.nvmlGpmMigSampleGet(whole, nvml.nvmlDeviceGetGpuInstanceId(card.handle), sample)
            return GpmReading() if before is None else self._metrics(before, sample)
        finally:
            if before is not None:
                nvml.nvmlGpmSampleFree(before)

    def _metrics(self, before: Any, after: Any) -> GpmReading:
        nvml = self._nvml
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(_METRICS)
        query.sample1, query.sample2 = before, after
        for slot, (number, _) in enumerate(_METRICS.values()):
            query.metrics[slot].metricId = number
        nvml.nvmlGpmMetricsGet(query)
        told = {
            name: float(query.metrics[slot].value) * unit if query.metrics[slot].nvmlReturn == 0 else None
            for slot, (name, (_, unit)) in enumerate(_METRICS.items())
        }
        return GpmReading(**told)
