"""Quantized checkpoints of Hugging Face folders: AWQ, GPTQ, compressed-tensors, block fp8."""

from engine.models.quantized.plan import METHODS, QuantizationPlan, parse
from engine.models.quantized.scheme import Need, Scheme

__all__ = ["METHODS", "Need", "QuantizationPlan", "Scheme", "parse"]
