"""What the library takes by reference. Fields and their order are those of the C++ sources named."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p


class LinearWeight(ctypes.Structure):
    """``PanelWeight`` in ``panels.h``."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "zeros", "bias")),
        *((name, c_int64) for name in ("num_panels", "num_cols", "group")),
    )


class AttentionItems(ctypes.Structure):
    """In ``parts.h``: indices of one step, int64."""

    _fields_ = (
        ("num_items", c_int64),
        *((name, c_void_p) for name in ("firsts", "counts", "positions", "rows", "tables")),
        *((name, c_int64) for name in ("table_width", "block_size")),
    )


class AttentionLayer(ctypes.Structure):
    """In ``parts.h``: one layer."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "k_scales", "v_scales")),
        *((name, c_int64) for name in ("q_row", "heads", "kv_heads", "head_dim", "window")),
        ("scale", c_float),
    )


class QKVStep(ctypes.Structure):
    """In ``parts.h``: the tokens of one step."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "slots", "cos", "sin")),
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim")),
        *((name, c_int) for name in ("product_as", "queries_as", "pool_as")),
    )


class QKVLayer(ctypes.Structure):
    """In ``parts.h``: one layer."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "head_norm", "factors", "q", "k", "v")),
        ("eps", c_float),
    )


class NativeProduct(ctypes.Structure):
    """``Product`` in ``stack.cpp``: a linear layer."""

    _fields_ = (
        *((name, c_void_p) for name in ("multiply", "weight", "order", "input_scales", "bias")),
        ("out", c_int64),
    )


class StackLayer(ctypes.Structure):
    """In ``stack.cpp``: the weights of one layer."""

    _fields_ = (
        *((name, NativeProduct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "head_norm")),
    )


class StackPool(ctypes.Structure):
    """In ``stack.cpp``: what one layer has in the pool."""

    _fields_ = tuple((name, c_void_p) for name in ("k", "v", "k_scales", "v_scales", "factors"))


class Stack(ctypes.Structure):
    """In ``stack.cpp``: all layers, and the head."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "norm")),
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate")),
        ("activations_as", c_int),
        ("eps", c_float),
        ("head", NativeProduct),
    )


class StackStep(ctypes.Structure):
    """In ``stack.cpp``: one step."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "items", "attend", "pools", "windows", "x", "logit_rows")),
        ("num_logits", c_int64),
        *((name, c_void_p) for name in ("logits", "finite", "scratch", "seconds")),
    )


class Drafts(ctypes.Structure):
    """In ``sample.cpp``: what is proposed to a step's requests, and what becomes of it."""

    _fields_ = (
        *((name, c_void_p) for name in ("target", "proposal", "tokens", "cu", "finite")),
        *((name, c_void_p) for name in ("seeds", "positions", "accepted", "own")),
        *((name, c_int64) for name in ("requests", "n")),
        *((name, c_int) for name in ("accept", "residual")),
    )
