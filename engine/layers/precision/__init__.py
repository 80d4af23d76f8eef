"""Linear weights in fp8, int8 and int4: quantizing them, holding them, multiplying with them."""

from engine.layers.precision.awq import ActivationStats
from engine.layers.precision.choice import (
    PrecisionChoice,
    QuantizedLinear,
    choose_precision,
    usable_forms,
)
from engine.layers.precision.forms import PrecisionForm, precision_forms, refused_forms
from engine.layers.precision.fuse import fuse
from engine.layers.precision.quantize import quantize, quantize_fp8, quantize_int4, quantize_int8
from engine.layers.precision.weights import (
    KINDS,
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Kind,
    QuantizedWeight,
)

__all__ = [
    "KINDS",
    "ActivationStats",
    "Fp8BlockWeight",
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "Kind",
    "PrecisionChoice",
    "PrecisionForm",
    "QuantizedLinear",
    "QuantizedWeight",
    "choose_precision",
    "fuse",
    "precision_forms",
    "quantize",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "refused_forms",
    "usable_forms",
]
