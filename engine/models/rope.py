"""Rotary position embedding: the frequencies of every published kind of scaling.

Sources: RoFormer (arXiv 2104.09864); linear and dynamic NTK scaling as transformers publishes them; YaRN
(arXiv 2309.00071); LongRoPE (arXiv 2402.13753); the Llama 3.1 release. The formulas are checked against
``transformers.modeling_rope_utils`` in the tests, element for element.

Two kinds depend on the length of the context. transformers decides it anew for each forward pass, so that
a key depends on what else was in the pass. Here the length that the engine serves (``served_len``) decides
once: *dynamic* uses the plain frequencies up to the model's own length and the frequencies of ``served_len``
beyond; *longrope* uses the short factors up to the original length and the long factors beyond. Both equal
transformers for every context that fits the original length, and for a prompt of ``served_len`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from engine.models.errors import ModelError

Kind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "table"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions become angles. ``rotary_dim`` is even: that many first elements of each head are rotated.

    ``max_position`` is the model's own context, ``original_len`` the one before its context was extended,
    ``served_len`` what the engine serves (0: the model's default). ``short_factor`` and ``long_factor``
    belong to longrope; kind "table" (GGUF files of Llama 3) has its divisors in ``short_factor``.
    """

    kind: Kind
    theta: float
    rotary_dim: int
    max_position: int
    factor: float = 1.0
    original_len: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    proportion: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    served_len: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"unknown rope kind {self.kind!r}; supported: {', '.join(KINDS)}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ModelError(
                f"the rotated part of a head has {self.rotary_dim} elements, an even number is needed"
            )
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise ModelError(f"rope theta is {self.theta}, a positive number is needed")
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise ModelError(f"rope factor is {self.factor}, a positive number is needed")
        half = self.rotary_dim // 2
        if self.kind in ("longrope", "table") and len(self.short_factor) != half:
            raise ModelError(f"rope {self.kind} has {len(self.short_factor)} factors, {half} are needed")
        if self.kind == "longrope" and len(self.long_factor) != half:
            raise ModelError(f"rope longrope has {len(self.long_factor)} long factors, {half} are needed")
        if self.kind in ("yarn", "longrope", "llama3") and self.original_len < 1:
            raise ModelError(
                f"rope {self.kind} needs original_max_position_embeddings, it is {self.original_len}"
            )

    def default_len(self, max_position: int) -> int:
        """The context to serve unless told otherwise; for longrope that of its short factors."""
        if self.kind == "longrope":
            return min(max_position, self.original_len)
        if self.kind == "yarn":
            return max(max_position, int(self.original_len * self.factor))
        return max_position

    def longest(self, default_len: int) -> int:
        """The longest context that may be asked for, in tokens."""
        if self.kind in ("linear", "dynamic"):
            return max(default_len, int(self.max_position * self.factor))
        if self.kind == "longrope":
            return max(default_len, self.max_position)
        return default_len

    def inv_freq(self) -> tuple[torch.Tensor, float]:
        """Inverse frequencies, float32 [rotary_dim / 2], and the factor of cosine and sine.

        Raises `ModelError` for settings that are well formed but yield no finite numbers.
        """
        try:
            inv_freq, scaling = _COMPUTE[self.kind](self)
        except (ArithmeticError, ValueError, TypeError) as error:  # TypeError: a root of a negative number
            raise ModelError(f"rope {self.kind} cannot be computed from its settings: {error}") from error
        if not (bool(inv_freq.isfinite().all()) and math.isfinite(scaling)):
            raise ModelError(f"rope {self.kind} has settings that yield infinite frequencies")
        return inv_freq, scaling

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], *, head_dim: int, max_position: int) -> RopeSpec:
        """Read ``rope_parameters`` (transformers 5) or ``rope_scaling`` and ``rope_theta`` (4)."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"the rope settings in config.json are {given!r}, an object is needed")
        if any(isinstance(value, Mapping) for value in given.values()):
            raise ModelError(f"rope settings per kind of layer ({', '.join(given)}) are not supported")
        return _from_hf(config, given, head_dim=head_dim, max_position=max_position)


def _from_hf(
    config: Mapping[str, Any], given: Mapping[str, Any], *, head_dim: int, max_position: int
) -> RopeSpec:
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in KINDS or kind == "table":
        supported = ", ".join(name for name in KINDS if name != "table")
        raise ModelError(f"unknown rope kind {kind!r}; supported: {supported}")
    outer = "rope_theta", "partial_rotary_factor"
    theta, partial = (_optional(given if name in given else config, name) for name in outer)
    partial = 1.0 if partial is None else partial
    if not 0.0 < partial <= 1.0:
        raise ModelError(f"partial_rotary_factor in config.json is {partial}, it must be in (0, 1]")
    name = "original_max_position_embeddings"
    original = int(_optional(config, name) or _optional(given, name) or max_position)
    factor = _optional(given, "factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise ModelError(f"rope {kind} needs a factor, config.json has none")
        factor = max_position / original if kind in ("yarn", "longrope") else 1.0
    return RopeSpec(
        kind=kind,
        theta=10_000.0 if theta is None else theta,
        # "proportional" rotates the whole head, its last frequencies being 0.
        rotary_dim=head_dim if kind == "proportional" else int(head_dim * partial),
        max_position=max_position,
        factor=factor,
        original_len=original,
        attention_factor=_optional(given, "attention_factor"),
        beta_fast=_optional(given, "beta_fast") or 32.0,
        beta_slow=_optional(given, "beta_slow") or 1.0,
        mscale=_optional(given, "mscale"),
        mscale_all_dim=_optional(given, "mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
        low_freq_factor=_optional(given, "low_freq_factor") or 1.0,
        high_freq_factor=_optional(given, "high_freq_factor") or 4.0,
        proportion=partial,
        short_factor=_floats(given, "short_factor"),
        long_factor=_floats(given, "long_factor"),
    )


def _optional(given: Mapping[str, Any], key: str) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{key} in config.json is {value!r}, a number is needed")
    return float(value)


def _floats(given: Mapping[str, Any], key: str) -> tuple[float, ...]:
    try:
        return tuple(float(x) for x in given.get(key) or ())
    except (TypeError, ValueError):
        raise ModelError(f"rope {key} in config.json is no list of numbers") from None


def _powers(spec: RopeSpec, theta: float | None = None) -> torch.Tensor:
    exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    out: torch.Tensor = (spec.theta if theta is None else theta) ** exponent
    return out


def _default(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(spec), 1.0


def _linear(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(spec) / spec.factor, 1.0


def _dynamic(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    length, dim = max(spec.served_len, spec.max_position), spec.rotary_dim
    stretch = (spec.factor * length / spec.max_position) - (spec.factor - 1)
    return 1.0 / _powers(spec, spec.theta * stretch ** (dim / (dim - 2))), 1.0


def _table(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    return 1.0 / (_powers(spec) * torch.tensor(spec.short_factor, dtype=torch.float32)), 1.0


def _proportional(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    inv = 1.0 / _powers(spec)
    inv[int(spec.proportion * spec.rotary_dim // 2) :] = 0.0
    return inv / spec.factor, 1.0


def _longrope(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    chosen = spec.long_factor if spec.served_len > spec.original_len else spec.short_factor
    scaling = spec.attention_factor
    if scaling is None:
        ratio = spec.factor
        scaling = 1.0 if ratio <= 1.0 else math.sqrt(1 + math.log(ratio) / math.log(spec.original_len))
    return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * _powers(spec)), scaling


def _llama3(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    inv = 1.0 / _powers(spec)
    wavelength = 2 * math.pi / inv
    longest, shortest = spec.original_len / spec.low_freq_factor, spec.original_len / spec.high_freq_factor
    smooth = (spec.original_len / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - smooth) * inv / spec.factor + smooth * inv
    scaled = torch.where(wavelength > longest, inv / spec.factor, between)
    return torch.where(wavelength < shortest, inv, scaled), 1.0


def _yarn(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    def turns_to_dim(turns: float) -> float:
        """The dimension that turns ``turns`` times over the original context (equation 17 solved for d)."""
        return dim * math.log(spec.original_len / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    dim, powers = spec.rotary_dim, _powers(spec)
    low, high = turns_to_dim(spec.beta_fast), turns_to_dim(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv = 1.0 / (spec.factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inv, _yarn_scaling(spec)


def _yarn_scaling(spec: RopeSpec) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


_COMPUTE = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "table": _table,
}
