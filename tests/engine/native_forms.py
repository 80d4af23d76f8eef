"""Linear layers that are all the library's, whatever is fastest for models as small as tests have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.layers.linear import Choice, candidates
from engine.layers.precision import PrecisionChoice, precision_forms
from engine.models import linears

CPU = torch.device("cpu")


def only_native_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights in the model's precision, in int8 and in int4, for every number of rows."""

    def choose(samples: Any, **_: Any) -> Choice:
        (native,) = (form for form in candidates(samples[0].dtype, CPU) if form.layout == "native")
        return Choice((1,), (native,))

    def choose_precision(kind: Any, samples: Any, device: torch.device, **_: Any) -> PrecisionChoice:
        (native,) = (form for form in precision_forms(kind, device) if form.layout == "native")
        return PrecisionChoice((1,), (native,), kind)

    monkeypatch.setattr(linears, "choose", choose)
    monkeypatch.setattr(linears, "choose_precision", choose_precision)
