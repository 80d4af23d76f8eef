"""``quantization_config`` of a config.json: which linear layers are quantized, and how.

Modules go by their names in the checkpoint, such as ``model.layers.0.self_attn.q_proj`` or ``lm_head``.
Whatever is not known is refused by name: a setting that is ignored yields a model that answers fluently and
wrongly. A layer that the lists leave in plain precision, but whose file holds codes (or the reverse), shows
up as a missing tensor, since `QuantizationPlan.needs` says exactly what must be there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.layers.precision.weights import QuantizedWeight
from engine.models.errors import ModelError
from engine.models.quantized import awq, block_fp8, compressed, gptq
from engine.models.quantized.scheme import Need, Scheme, Settings

METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
HEAD = "lm_head"
MAX_PATTERN_CHARS = 400
MAX_TRIES = 4_000_000  # ways in which a pattern may match a name, all of which a failure goes through
_NAME_CHARS = 64  # of a module's name, about


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose names match one of ``patterns`` follow ``scheme``."""

    patterns: tuple[re.Pattern[str], ...]
    all_linear: bool
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """How the linear layers of one checkpoint are stored. ``notes`` are for the log."""

    method: str
    rules: tuple[Rule, ...]
    plain: tuple[re.Pattern[str], ...]
    notes: tuple[str, ...]

    def scheme_for(self, module: str) -> Scheme | None:
        """How the module's weight is stored; None for plain numbers. Named rules go before "all linear"."""
        if any(pattern.match(module) for pattern in self.plain):
            return None
        for rule in self.rules:
            if any(pattern.match(module) for pattern in rule.patterns):
                return rule.scheme
        return next((rule.scheme for rule in self.rules if rule.all_linear), None)

    def needs(self, module: str, out: int, cols: int) -> dict[str, Need] | None:
        """The tensors of a layer [out, cols] by full name; None if it is stored in plain numbers."""
        scheme = self.scheme_for(module)
        if scheme is None:
            return None
        try:
            return {f"{module}.{part}": need for part, need in scheme.needs(out, cols).items()}
        except ModelError as error:
            raise ModelError(f"layer {module}: {error}") from error

    def weight(self, module: str, out: int, cols: int, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight from the tensors that `needs` names (full names), exactly. Raises `ModelError`."""
        scheme = self.scheme_for(module)
        if scheme is None:
            raise ModelError(f"{module} is not quantized in this checkpoint")
        own = {name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items()}
        try:
            return scheme.build(out, cols, own)
        except ModelError as error:
            raise ModelError(f"layer {module}: {error}") from error

    @property
    def name(self) -> str:
        """All schemes, for the log and the model's description."""
        return ", ".join(dict.fromkeys(rule.scheme.name for rule in self.rules))


def parse(config: Any) -> QuantizationPlan:
    """The plan that a ``quantization_config`` describes. Raises `ModelError`."""
    if not isinstance(config, Mapping):
        raise ModelError(f"quantization_config in config.json is {config!r}, an object is needed")
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(config)
    parsers: dict[Any, Callable[[Mapping[str, Any]], Scheme]] = {
        "awq": awq.parse,
        "gptq": gptq.parse,
        "fp8": block_fp8.parse,
    }
    if not isinstance(method, str) or method not in parsers:
        raise ModelError(
            f"weights quantized by {method!r} are not supported; supported: {', '.join(METHODS)}"
        )
    scheme = parsers[method](config)
    plain = list(_list(config, "modules_to_not_convert"))
    if config.get("lm_head") is not True:
        plain.append(HEAD)
    only = config.get("modules_in_block_to_quantize") if method == "gptq" else None
    rule = Rule((), True, scheme) if only is None else Rule(_suffixes(only), False, scheme)
    return QuantizationPlan(str(method), (rule,), tuple(_part_of_name(name) for name in plain), ())


_COMPRESSED_HARMLESS = ("quant_method", "quantization_status", "global_compression_ratio", "version")


def _compressed(config: Mapping[str, Any]) -> QuantizationPlan:
    settings = Settings("the compressed-tensors quantization_config", config, _COMPRESSED_HARMLESS)
    form = settings.one_of("format", (*compressed.FORMATS, "mixed-precision"))
    if settings.get("kv_cache_scheme") is not None:
        raise ModelError(
            "the checkpoint stores scales for keys and values (kv_cache_scheme), which are not read here; "
            "use one without them, the KV cache's own precision can be chosen for every model"
        )
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ModelError(f"sparse weights are not supported: sparsity_config is {sparsity!r}"[:300])
    if settings.get("transform_config"):
        raise ModelError("checkpoints whose weights were rotated (transform_config) are not supported")
    groups = settings.get("config_groups")
    ignored = tuple(_target(name) for name in settings.names("ignore"))
    settings.finish()
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"config_groups of the quantization_config is {groups!r}, an object is needed")
    rules, notes = [], []
    for name, values in groups.items():
        scheme = compressed.parse_group(name, values, None if form == "mixed-precision" else form)
        targets = Settings(f"config group {name}", values).names("targets")
        if not targets:
            raise ModelError(f"config group {name} has no targets")
        named = tuple(_target(target) for target in targets if target != "Linear")
        rules.append(Rule(named, "Linear" in targets, scheme))
        if scheme.activations != "none":
            notes.append(
                f"the checkpoint rounds activations ({scheme.activations}); here they keep their precision"
            )
    if sum(rule.all_linear for rule in rules) > 1:
        raise ModelError("several config groups of the quantization_config target all Linear layers")
    return QuantizationPlan("compressed-tensors", tuple(rules), ignored, tuple(dict.fromkeys(notes)))


def _target(name: str) -> re.Pattern[str]:
    """A module's exact name, or a regular expression after ``re:`` that its beginning must match."""
    if not name.startswith("re:"):
        return re.compile(re.escape(name) + r"\Z")
    text = name.removeprefix("re:")
    if len(text) > MAX_PATTERN_CHARS or _most_tries(text) > MAX_TRIES:
        raise ModelError(f"the pattern {text[:100]!r} in quantization_config is too involved to be run")
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelError(
            f"the pattern {text[:100]!r} in quantization_config is no regular expression: {error}"
        ) from error


def _most_tries(pattern: str) -> float:
    """A bound of the ways in which a regular expression matches a name; a file must not keep the engine busy.

    Each repetition ends somewhere in the name, and each ``|`` adds a choice to its group. What is repeated
    as a group multiplies without end.
    """
    if re.search(r"\)[*+?{]", pattern):
        return math.inf
    repeats = len(re.findall(r"(?<!\()[*+?{]\??", pattern))  # but not the ? of (?: and (?!
    choices = 1
    for part in pattern.split("("):
        choices *= 1 + part.count("|")
    return choices * math.comb(_NAME_CHARS + repeats, repeats)


def _part_of_name(name: str) -> re.Pattern[str]:
    """Whole parts of a name: ``mlp.down`` is in ``layers.0.mlp.down`` and not in ``mlp.down_proj``."""
    return re.compile(rf"(?:.*\.)?{re.escape(name)}(?:\..*)?\Z")


def _suffixes(lists: Any) -> tuple[re.Pattern[str], ...]:
    """``modules_in_block_to_quantize``: lists of module names within a layer."""
    if not isinstance(lists, list) or not lists:
        raise ModelError(f"modules_in_block_to_quantize is {lists!r}, lists of names are needed")
    names = [name for part in lists for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) and name for name in names):
        raise ModelError(f"modules_in_block_to_quantize is {lists!r}, lists of names are needed")
    return tuple(re.compile(rf"(?:.*\.)?{re.escape(name)}\Z") for name in names)


def _list(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return Settings("the quantization_config", config).names(key)
