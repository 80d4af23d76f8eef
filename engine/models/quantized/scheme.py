"""What a quantized checkpoint holds for one linear layer, and the weight that it makes of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from engine.layers.precision.weights import QuantizedWeight
from engine.models.errors import ModelError


@dataclass(frozen=True, slots=True)
class Need:
    """A tensor of a layer, with the shapes and the safetensors dtypes that it may have.

    An ``optional`` one may be missing. Of a tensor that is ``unused`` nothing is read.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    unused: bool = False


class Scheme(Protocol):
    """How the weights of some linear layers are stored."""

    @property
    def name(self) -> str:
        """For the log, such as ``gptq int4 group 128 desc_act``."""
        ...

    def needs(self, out: int, cols: int) -> dict[str, Need]:
        """The tensors of a layer [out, cols] by the last part of their names. Raises `ModelError`."""
        ...

    def build(self, out: int, cols: int, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight, exactly as stored. Raises `ModelError` if the tensors contradict each other."""
        ...


FLOATS = ("F16", "BF16", "F32")


class Settings:
    """A part of ``quantization_config``: every key must be known, for what is ignored may change the weights.

    ``harmless`` keys say how the checkpoint was made or which kernel to use, and change nothing.
    """

    def __init__(self, what: str, values: Any, harmless: tuple[str, ...] = ()) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{what} in config.json is {values!r}, an object is needed")
        self.what = what
        self._values = dict(values)
        self._unread = {key for key, value in self._values.items() if value is not None} - set(harmless)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default if it is missing or null."""
        self._unread.discard(key)
        value = self._values.get(key)
        return default if value is None else value

    def agreed(self, *keys: str, default: Any) -> Any:
        """The value of a setting that goes by several names. Raises `ModelError` if they contradict."""
        given = {key: value for key in keys if (value := self.get(key)) is not None}
        values = list(given.values())
        if any(value != values[0] for value in values):
            shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
            raise ModelError(f"{self.what} says one thing in several ways that contradict: {shown}")
        return values[0] if values else default

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """A value that must be among ``allowed``; True is not 1. Raises `ModelError`, naming them."""
        value = self.get(key, default)
        if not any(value == option and type(value) is type(option) for option in allowed):
            shown = ", ".join(map(str, allowed))
            raise ModelError(f"{key} of {self.what} is {value!r}; supported: {shown}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1, or -1 for "the whole row". Raises `ModelError`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise ModelError(
                f"{key} of {self.what} is {value!r}, a whole number of at least 1 or -1 is needed"
            )
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty if it is missing. Raises `ModelError`."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ModelError(f"{key} of {self.what} is {value!r}, a list of names is needed")
        return tuple(value)

    def finish(self) -> None:
        """Refuse what was not asked for. Raises `ModelError` naming it."""
        if self._unread:
            unknown = ", ".join(f"{key}={self._values[key]!r}"[:80] for key in sorted(self._unread))
            raise ModelError(
                f"{self.what} has settings that are not known here: {unknown}. They may change what the "
                "weights mean, so the model is not loaded; use another version of it"
            )


def group_size(group: int, cols: int) -> int:
    """The channels of a group: -1 is the whole row. Raises `ModelError` if groups do not fill rows evenly."""
    size = cols if group == -1 else group
    if cols % size:
        raise ModelError(f"{cols} input channels are no multiple of the group size {size}")
    return size


@contextmanager
def built(what: str) -> Iterator[None]:
    """A ValueError within becomes a `ModelError`: the tensors of the file are not what they should be."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"the weights of this {what} checkpoint are damaged: {error}") from error
