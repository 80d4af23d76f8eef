"""The models that draft: where their weights come from, what they take of memory, and drafters made of them.

Weights are there while a knob asks for them, and a draft model's pool of keys and values while its drafter
is. Both are given back when speculation is switched off or to another kind; a change of the KV pool rebuilds
the pool alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch

from engine.calibration import TEXT
from engine.kv_cache import KVCache, kv_bytes_per_block
from engine.layers.linear import LinearLayer
from engine.layers.precision import Kind
from engine.layout import Layout, NoRoom
from engine.memory import free_bytes
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.linears import HEAD, PARTS, LinearMaker, Place, WeightStore
from engine.models.loader import LoadedModel
from engine.models.reading import Progress
from engine.models.spec import ModelSpec
from engine.runner import ModelRunner
from engine.sizes import size
from engine.speculation.draft_attention import DraftAttention
from engine.speculation.model_drafter import NEAR, ModelDrafter
from engine.speculation.proposals import ProposalSampler
from engine.speculation.rounds import RoundDrafter
from engine.speculation.self_drafter import SelfDrafter
from ipc.messages import KnobValue

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class _Weights:
    """What was loaded or made: the draft model, or the target's linear layers in a lower precision."""

    of: DraftWeights
    decoder: Decoder | None = None
    linears: Mapping[Place, LinearLayer] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held beside the target's weights, each form of a linear layer's weights included."""
        own = 0 if self.decoder is None else self.decoder.weight_bytes
        return own + sum(linear.own_bytes for linear in self.linears.values())


class DraftModels:
    """Weights and memory of models that draft for one target. The step thread owns it.

    ``load`` reads the draft model, to the target's device and in its dtype, and takes a ``progress``; None
    where none was given. It is called once at start, to see that it can serve, and again when it is switched
    on. `fetch` alone may run on another thread, while steps are computed and nothing is changed.
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
        self.kept_bytes = 0  # of the device, which the target's steps need and no pool may take
        self._held: _Weights | None = None
        self._fetched: _Weights | None = None  # to be held next
        self._drafter: weakref.ref[RoundDrafter] | None = None
        self._spec: ModelSpec | None = None
        self._quantization = ""  # of the draft model's file
        self._maker: LinearMaker | None = None  # knows which forms are fastest for the draft model
        self._draft_bytes = 0  # of the draft model's weights in these forms
        if load is not None:
            loaded = load(progress=progress)
            check_tokens(target, loaded)
            self._spec, self._quantization = loaded.spec, loaded.info.quantization
            self._measure(loaded)
            if wanted == DraftWeights("draft"):
                self._held = self._take(loaded)
            else:
                loaded.weights.clear()
                loaded.quantized.clear()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held for drafting, beside those of the target."""
        return sum(weights.nbytes for weights in (self._held, self._fetched) if weights is not None)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held for drafting."""
        drafter = self.drafter
        return 0 if drafter is None else drafter.kv_bytes

    @property
    def kept_window(self) -> int | None:
        """For how many tokens a request must keep blocks, None for all.

        A draft model lags behind by what a step brought, and attends to as many tokens from there.
        """
        widest = self._runner.window
        return widest if widest is None or self._load is None else widest + NEAR

    def leave_room(self, pool_bytes: int) -> int:
        """Of the memory there is for pools, the part that the target's may take if a draft model may come.

        The rest is for the draft model's weights, unless they are there already, and for as many blocks.
        """
        if self._spec is None:
            return pool_bytes
        rest = max(0, pool_bytes - (0 if self.weight_bytes else self._draft_bytes))
        own, draft = (per_block(1) for per_block in (self._runner.kv_bytes_per_block, self._bytes_per_block))
        return rest * own // (own + draft)

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
        held = self._there(wanted)
        kv = 0
        if wanted.kind == "draft":
            kv = then.num_blocks * self._bytes_per_block(then.block_size)
        if held is not None and then.pool == now.pool and kv <= self.kv_bytes:
            return
        weights = held.nbytes if held is not None else self._bytes_of(wanted)
        pools = then.pool_bytes - now.pool_bytes if then.pool != now.pool else 0
        # Weights that are held now are given back when others are there, not before.
        available = free_bytes(self._runner.device) + self.kv_bytes - pools - self.kept_bytes
        available += 0 if held is None else held.nbytes
        if weights + kv > available:
            raise NoRoom(
                f"drafts with speculation={wanted.kind} would take {size(weights, 'MiB')} of weights and "
                f"{size(kv, 'MiB')} of keys and values, {size(max(0, available), 'MiB')} can be had; a "
                "smaller KV pool (kv_pool_gib) leaves more"
            )

    def must_fetch(self, values: Mapping[str, KnobValue]) -> bool:
        """Whether weights have to be loaded or made for these values, which takes long."""
        wanted = DraftWeights.of(values)
        return wanted is not None and self._there(wanted) is None

    def fetch(self, values: Mapping[str, KnobValue], now: Layout, then: Layout, progress: Progress) -> None:
        """Load or make the weights for these values, to be taken by `make`; others may still be in use.

        Raises what `check` raises, and what loading and making do: `ModelError`, `NoRoom`, MemoryError,
        RuntimeError and ValueError.
        """
        wanted = DraftWeights.of(values)
        assert wanted is not None
        self.check(values, now, then)
        self._fetched = self._get(wanted, progress)

    def make(self, wanted: DraftWeights) -> RoundDrafter:
        """A drafter; a draft model's has an empty pool of its own. The last one must be gone.

        Raises MemoryError or RuntimeError if it does not fit, and what loading raises.
        """
        weights = self._there(wanted)
        if weights is None:
            self.release()
            weights = self._get(wanted, self.progress)
        self._held, self._fetched = weights, None
        runner = self._runner
        assert runner.kv is not None
        sampler = ProposalSampler(
            runner.spec.vocab_size, self._target.eos_token_ids, runner.device, runner.padded_ids
        )
        drafter: RoundDrafter
        if weights.decoder is None:
            decoder = runner.decoder.sharing(weights.linears)
            drafter = SelfDrafter(
                decoder, runner.windowed, runner.kv, lambda: runner.attention, sampler, runner.to_device,
                runner,
            )  # fmt: skip
        else:
            decoder, spec = weights.decoder, self._windowed()
            pool = KVCache.allocate(
                spec,
                num_blocks=runner.kv.num_blocks,
                block_size=runner.kv.block_size,
                dtype=decoder.dtype,
                device=runner.device,
            )
            attention = DraftAttention(spec, runner.device, decoder.dtype)
            max_len = min(spec.max_model_len, self._max_model_len)
            drafter = ModelDrafter(
                decoder, spec, pool, lambda: attention.beside(runner.attention_name), sampler,
                runner.to_device, max_len=max_len, graphs=runner,
            )  # fmt: skip
        self._drafter = weakref.ref(drafter)
        log.info(
            "speculation=%s drafts with %s of weights and %s of keys and values: %s",
            wanted.kind,
            size(self.weight_bytes, "MiB"),
            size(self.kv_bytes, "MiB"),
            decoder.kernels(),
        )
        return drafter

    def to_measure(self) -> ModelDrafter | None:
        """A drafter of the draft model over the pool that there is, None if its weights are not held.

        It has to be closed before another one is made. Raises what `make` does.
        """
        if self._held is None or self._held.decoder is None:
            return None
        made = self.make(self._held.of)
        assert isinstance(made, ModelDrafter)
        return made

    @property
    def drafter(self) -> RoundDrafter | None:
        """The drafter that was made last, None once it is gone."""
        return None if self._drafter is None else self._drafter()

    def set_fused(self, wanted: Mapping[str, bool]) -> None:
        """Fuse parts of the decoder that drafts, if there is one. See `RoundDrafter.set_fused`."""
        drafter = self.drafter
        if drafter is not None:
            drafter.set_fused(wanted)

    def keep_only(self, wanted: DraftWeights | None) -> None:
        """Give back weights that these are not."""
        if self._held is not None and wanted != self._held.of:
            self.release()

    def forget_fetched(self) -> None:
        """Give back what was fetched and not taken."""
        self._fetched = None

    def release(self) -> None:
        """Give back the weights that are in use."""
        self._held = None
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def _there(self, wanted: DraftWeights) -> _Weights | None:
        return next((w for w in (self._held, self._fetched) if w is not None and w.of == wanted), None)

    def _get(self, wanted: DraftWeights, progress: Progress) -> _Weights:
        if wanted.dtype is not None:
            return _Weights(wanted, linears=self._runner.lighter(wanted.dtype, progress))
        assert self._load is not None  # the knob's choice is refused without
        loaded = self._load(progress=progress)
        check_tokens(self._target, loaded)
        if (loaded.spec, loaded.info.quantization) != (self._spec, self._quantization):
            raise ModelError(
                f"{loaded.info.name} ({loaded.info.path}) is another model than when the engine started; "
                "restart the engine to draft with it"
            )
        return self._take(loaded)

    def _store(self, loaded: LoadedModel, *, consume: bool) -> WeightStore:
        runner = self._runner
        return WeightStore(
            loaded.spec,
            dict(loaded.weights),
            dict(loaded.quantized),
            dtype=runner.dtype,
            device=runner.device,
            consume=consume,
        )

    def _measure(self, loaded: LoadedModel) -> None:
        """Choose the forms of the linear layers, and see from one layer what all will take in them."""
        store = self._store(loaded, consume=False)
        with torch.inference_mode():
            maker = LinearMaker(store, measure=self._runner.measure)
            if store.is_quantized:
                maker.learn_loaded()
            one = sum(maker.as_loaded(Place(0, part)).own_bytes for part in PARTS)
            own = one * loaded.spec.num_layers + maker.as_loaded(HEAD).own_bytes
        store.drop()
        # Of quantized weights no layer holds the loaded ones beside its own forms.
        quantized = sum(weight.nbytes for weight in loaded.quantized.values())
        self._draft_bytes = loaded.info.weight_bytes - quantized + own
        self._maker = maker

    def _take(self, loaded: LoadedModel) -> _Weights:
        maker, store = self._maker, self._store(loaded, consume=True)
        assert maker is not None
        loaded.weights.clear()
        loaded.quantized.clear()
        maker.store = store  # of the same model: what was measured at start holds
        with torch.inference_mode():
            decoder = Decoder(store, maker, max_len=loaded.spec.max_model_len)
        store.drop()
        return _Weights(DraftWeights("draft"), decoder)

    def _bytes_of(self, wanted: DraftWeights) -> int:
        return self._draft_bytes if wanted.dtype is None else self._runner.lighter_bytes(wanted.dtype)

    def _bytes_per_block(self, block_size: int) -> int:
        assert self._spec is not None
        return kv_bytes_per_block(self._spec, block_size, self._runner.dtype)

    def _windowed(self) -> ModelSpec:
        """No layer of a draft model may look back further than the target, which gives up blocks."""
        spec, widest = self._spec, self._runner.window
        assert spec is not None
        if widest is None:
            return spec
        return replace(spec, layer_windows=tuple(min(own or widest, widest) for own in spec.layer_windows))


def check_tokens(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise `ModelError`, naming both, unless the same ids are the same tokens in both models."""
    why = target.tokenizer.difference_to(draft.tokenizer, TEXT)
    if why:
        raise ModelError(
            f"{draft.info.name} cannot draft for {target.info.name}: their tokenizers differ: {why} "
            f"({draft.info.path} for {target.info.path})"
        )
