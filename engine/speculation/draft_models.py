"""The models that draft: where their weights come from, what they take of memory, and drafters made of them.

Weights are there while a knob asks for them, and a pool of keys and values while a drafter is. Both are given
back when speculation is switched off or to another kind; a change of the KV pool rebuilds the pool alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from engine.attention.base import get_backend
from engine.calibration import TEXT
from engine.config import GIB
from engine.kv_cache import KVCache, kv_bytes_per_block
from engine.layers.linear import LinearLayer
from engine.layers.precision import Kind
from engine.layout import Layout, NoRoom
from engine.memory import free_bytes
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.linears import LinearMaker, Place, WeightStore
from engine.models.loader import LoadedModel
from engine.models.reading import Progress
from engine.models.spec import ModelSpec
from engine.runner import ModelRunner
from engine.speculation.model_drafter import ModelDrafter
from engine.speculation.proposals import ProposalSampler
from ipc.messages import KnobValue

log = logging.getLogger(__name__)

ATTENTION = "sdpa"  # that drafts are made with
WIDTH = {"model": 16, "fp8": 8, "int8": 8, "int4": 4}  # about the bits of a weight


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Which model drafts: ``draft``, or ``self`` in a precision."""

    kind: Literal["draft", "self"]
    dtype: Kind | None = None

    @classmethod
    def of(cls, values: Mapping[str, KnobValue]) -> DraftWeights | None:
        """What the knobs ask for, None where no model drafts."""
        match values["speculation"]:
            case "draft":
                return cls("draft")
            case "self":
                return cls("self", cast(Kind, values["spec_self_dtype"]))
        return None


class DraftModels:
    """Weights and memory of models that draft for one target. The step thread owns it.

    ``load`` reads the draft model, to the target's device and in its dtype, and takes a ``progress``; None
    where none was given. It is called once at start, to see that it can serve, and again when it is switched
    on.
    """

    def __init__(
        self,
        target: LoadedModel,
        runner: ModelRunner,
        *,
        max_model_len: int,
        load: Callable[..., LoadedModel] | None,
        progress: Progress,
        wanted: DraftWeights | None,
    ) -> None:
        """Raises `ModelError`, naming both models, if a draft model's tokens are not the target's."""
        self._target = target
        self._runner = runner
        self._max_model_len = max_model_len
        self._load = load
        self.progress = progress  # hears of loading and converting
        self._held: DraftWeights | None = None
        self._decoder: Decoder | None = None  # of the draft model
        self._linears: dict[Place, LinearLayer] = {}  # of the target, in a lower precision
        self._drafter: weakref.ref[ModelDrafter] | None = None
        self._spec: ModelSpec | None = None
        self._file_bytes = 0  # of the draft model's weights
        if load is not None:
            loaded = load(progress=progress)
            check_tokens(target, loaded)
            self._spec, self._file_bytes = loaded.spec, loaded.info.weight_bytes
            if wanted == DraftWeights("draft"):
                self._take(loaded)
            else:
                loaded.weights.clear()
                loaded.quantized.clear()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held for drafting, beside those of the target."""
        own = 0 if self._decoder is None else self._decoder.weight_bytes
        return own + sum(linear.own_bytes for linear in self._linears.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held for drafting."""
        drafter = None if self._drafter is None else self._drafter()
        return 0 if drafter is None else drafter.kv_bytes

    def check(self, values: Mapping[str, KnobValue], now: Layout, then: Layout) -> None:
        """Raise `NoRoom`, saying what is needed and what is there, if these values' drafter cannot be made.

        now, then: what there is beside it, and what there will be. ValueError for a draft that would be the
        target itself.
        """
        wanted = DraftWeights.of(values)
        if wanted is None:
            return
        if wanted.dtype is not None:
            if WIDTH[wanted.dtype] >= WIDTH[str(values["weight_dtype"])]:
                raise ValueError(
                    f"speculation=self in {wanted.dtype} needs weights in a higher precision, but "
                    f"weight_dtype is {values['weight_dtype']}; choose fewer bits for the draft or more for "
                    "the model"
                )
            self._runner.check_lighter(wanted.dtype)
        if wanted == self._held and then.pool == now.pool and self.kv_bytes:
            return
        weights = self.weight_bytes if wanted == self._held else self._bytes_of(wanted)
        kv = then.num_blocks * self._bytes_per_block(wanted, then.block_size)
        pools = then.pool_bytes - now.pool_bytes if then.pool != now.pool else 0
        available = free_bytes(self._runner.device) + self.weight_bytes + self.kv_bytes - pools
        if weights + kv > available:
            raise NoRoom(
                f"drafts with speculation={wanted.kind} would take {weights / GIB:.2f} GiB of weights and "
                f"{kv / GIB:.2f} GiB of keys and values, {max(0, available) / GIB:.2f} GiB can be had"
            )

    def make(self, wanted: DraftWeights) -> ModelDrafter:
        """A drafter over an empty pool of its own, as large as the target's. The last one must be gone.

        Raises MemoryError or RuntimeError if it does not fit, and what loading raises.
        """
        kv = self._runner.kv
        assert kv is not None
        if wanted != self._held:
            self.release()
            if wanted.dtype is None:
                assert self._load is not None  # the knob's choice is refused without
                loaded = self._load(progress=self.progress)
                check_tokens(self._target, loaded)
                self._take(loaded)
            else:
                self._linears = self._runner.lighter(wanted.dtype, self.progress)
                self._held = wanted
        runner, spec = self._runner, self._windowed(wanted)
        decoder = self._decoder or runner.decoder.sharing(self._linears)
        pool = KVCache.allocate(
            spec,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            dtype=decoder.dtype,
            device=runner.device,
        )
        drafter = ModelDrafter(
            wanted.kind,
            decoder,
            spec,
            pool,
            get_backend(ATTENTION),
            ProposalSampler(
                runner.spec.vocab_size, self._target.eos_token_ids, runner.device, runner.padded_ids
            ),
            runner.to_device,
            max_len=min(spec.max_model_len, self._max_model_len),
        )
        self._drafter = weakref.ref(drafter)
        log.info(
            "speculation=%s drafts with %.2f GiB of weights and %.2f GiB of keys and values: %s",
            wanted.kind,
            self.weight_bytes / GIB,
            self.kv_bytes / GIB,
            decoder.kernels(),
        )
        return drafter

    def keep_only(self, wanted: DraftWeights | None) -> None:
        """Give back weights that these are not."""
        if wanted != self._held:
            self.release()

    def release(self) -> None:
        """Give all weights back."""
        self._held, self._decoder, self._linears = None, None, {}
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take(self, loaded: LoadedModel) -> None:
        weights, quantized = dict(loaded.weights), dict(loaded.quantized)
        loaded.weights.clear()
        loaded.quantized.clear()
        runner = self._runner
        with torch.inference_mode():
            store = WeightStore(
                loaded.spec, weights, quantized, dtype=runner.dtype, device=runner.device, consume=True
            )
            self._decoder = Decoder(
                store, LinearMaker(store, measure=runner.measure), max_len=loaded.spec.max_model_len
            )
        store.drop()
        self._held = DraftWeights("draft")

    def _bytes_of(self, wanted: DraftWeights) -> int:
        return self._file_bytes if wanted.dtype is None else self._runner.lighter_bytes(wanted.dtype)

    def _bytes_per_block(self, wanted: DraftWeights, block_size: int) -> int:
        return kv_bytes_per_block(self._spec_of(wanted), block_size, self._runner.dtype)

    def _spec_of(self, wanted: DraftWeights) -> ModelSpec:
        if wanted.dtype is not None:
            return self._runner.spec
        assert self._spec is not None
        return self._spec

    def _windowed(self, wanted: DraftWeights) -> ModelSpec:
        """No layer of a draft model may look back further than the target, which gives up blocks."""
        spec, widest = self._spec_of(wanted), self._runner.window
        if wanted.dtype is not None:
            return self._runner.windowed
        if widest is None:
            return spec
        return replace(spec, layer_windows=tuple(min(own or widest, widest) for own in spec.layer_windows))


def check_tokens(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise `ModelError`, naming both, unless the same ids are the same tokens in both models."""
    why = target.tokenizer.difference_to(draft.tokenizer, TEXT)
    if why:
        raise ModelError(
            f"{draft.info.name} ({draft.info.path}) cannot draft for {target.info.name} "
            f"({target.info.path}): their tokenizers differ: {why}"
        )
