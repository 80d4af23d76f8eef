"""A model on its device with all that steps run with: weights, pool, attention, and the parts of the decoder.

What changes here changes between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionBackend, get_backend, probe
from engine.attention.base import Ints
from engine.batch import BatchBuilder
from engine.calibration import Calibration
from engine.converter import Converter
from engine.graphs.forward import GraphStep
from engine.graphs.switch import Graphs
from engine.kv_cache import KVCache, kv_bytes_per_block, storage_dtype
from engine.kv_scales import KVScales
from engine.layers.linear import LinearLayer
from engine.layers.precision import Kind
from engine.layout import NoRoom
from engine.models.decoder import Decoder
from engine.models.linears import LinearMaker, Place, TakesCodes, WeightStore
from engine.models.loader import LoadedModel
from engine.models.reading import Progress
from engine.models.spec import ModelSpec
from engine.ops.base import Ops
from engine.ops.choice import COMPILE, SAMPLING, make_ops, make_sampling
from engine.ops.choice import kernels as kernels_of
from engine.ops.compiled_ops import CompiledParts
from engine.ops.plain import PLAIN
from engine.plan import Arena
from engine.speculation.verify import DraftSampler
from engine.swap import HostMemory
from engine.timing import PartTimer
from engine.traffic import TrafficModel
from engine.weight_precision import WeightPrecision

AS_LOADED = WeightPrecision()
MAX_KERNELS_CHARS = 256  # what a step row can hold


def _silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Nobody asked how far it is."""


class RunningModel:
    """One model over one KV pool. The step thread owns it, and changes nothing while a step is computed."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: str = "sdpa",
        max_model_len: int | None = None,
        measure: bool = True,
        consume: bool = False,
        check: bool = False,
        calibration_ids: Sequence[int] | None = None,
        precision: WeightPrecision = AS_LOADED,
        progress: Progress = _silent,
    ) -> None:
        """Take a loaded model to ``device`` in ``dtype``, which is also that of the KV pool.

        No position reaches ``max_model_len`` (default: the model's own).
        ``measure`` chooses linear implementations by measuring them (some tenths of a second on a CPU).
        ``loaded`` stays usable and holds nothing twice, unless no linear layer keeps weights as they were
        loaded; ``consume`` empties it, and what no layer holds is freed unless there is room to keep it for
        later conversions.
        ``check`` keeps checksums of blocks in host memory. ``calibration_ids`` are the tokens of a text that
        the scales of a quantized KV cache, and weights in four bits, are calibrated with.
        ``precision`` is that of the weights, ``progress`` hears of their conversion.
        Raises ValueError with the reason if the attention backend cannot run, MemoryError if there is no room
        for the conversion.
        """
        self.spec = loaded.spec
        self.device = device
        self.dtype = dtype
        self.measure = measure  # whether implementations are chosen by measuring
        self.kv: KVCache | None = None
        self._attention = self._backend(attention)
        weights, quantized = loaded.weights, loaded.quantized
        if consume:
            weights, quantized = dict(weights), dict(quantized)
            loaded.weights.clear()
            loaded.quantized.clear()
        with torch.inference_mode():
            store = WeightStore(loaded.spec, weights, quantized, dtype=dtype, device=device, consume=consume)
            maker = LinearMaker(store, measure=measure)
            self.decoder = Decoder(store, maker, max_len=max_model_len or loaded.spec.max_model_len)
        self.sampler = DraftSampler(loaded.spec.vocab_size, loaded.eos_token_ids, device)
        self._padded = loaded.padded_ids.to(device) if loaded.padded_ids.numel() else None
        self.max_len = max_model_len or loaded.spec.max_model_len
        ids = list(calibration_ids or ())[: self.max_len]
        self._calibration = Calibration(ids, self.decoder, lambda: self._attention, self.to_device)
        self._converter = Converter(self.decoder, maker, store, self._read_text)
        self._windowed = self.spec  # the model with the windows that are in force
        self._kv_dtype = "model"
        self._builder: BatchBuilder | None = None
        self._fused: Mapping[str, bool] = {}
        self._compiled = CompiledParts(self.decoder)
        self.graphs = Graphs(self.decoder, self.sampler, self._padded, device)
        self._host = HostMemory(device, check=check)
        try:
            self._converter.convert(precision, progress, may_forget=consume)
        except NoRoom as error:
            raise MemoryError(str(error)) from None
        if consume:
            self._converter.keep_originals()
        self._linears = self.decoder.table()
        self._traffic = self._model_traffic()

    @property
    def attention(self) -> AttentionBackend:
        """The attention backend that steps run with."""
        return self._attention

    @property
    def attention_name(self) -> str:
        """Its name."""
        return self._attention.name

    @property
    def kernels(self) -> str:
        """The implementations that run, such as ``linear=bf16:1+bf16-fp32gemm-packed:2,activations=float32``.

        The number after a linear implementation is the rows from which on it serves.
        """
        return self._kernels(self.decoder.kernels(), self.decoder.takes_codes())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the embedding and of the linear layers' weights, a second form of them included."""
        return self.decoder.weight_bytes

    @property
    def original_bytes(self) -> int:
        """Bytes of memory that are held only to convert weights from."""
        return self._converter.host_bytes

    @property
    def precision(self) -> WeightPrecision | None:
        """The precision of the weights; None after a conversion that failed."""
        return self._converter.precision

    def check_precision(self, precision: WeightPrecision) -> None:
        """Raise `NoRoom`, saying what is needed and what is there, if weights cannot be brought to it."""
        self._converter.check(precision, 0 if self.kv is None else self.kv.nbytes)

    def set_precision(self, precision: WeightPrecision, progress: Progress, pool_bytes: int = 0) -> None:
        """Convert the weights. A change frees the pool, whose content belongs to the old weights; the next
        one takes ``pool_bytes``.

        Raises what `engine.converter.Converter.convert` raises, after which it has to be called again.
        """
        if precision == self.precision:
            return
        self.free_kv()
        self._calibration.forget()
        try:
            self._converter.convert(precision, progress, pool_bytes)
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the old weights' memory, so that it is seen to be free
            self._linears = self.decoder.table()
            self._traffic = self._model_traffic()

    def check_lighter(self, kind: Kind) -> None:
        """Raise `NoRoom` with the reason if the model cannot be had in ``kind`` beside itself."""
        self._converter.check_lighter(kind)

    def lighter_bytes(self, kind: Kind) -> int:
        """The bytes that `lighter` takes. See `engine.converter.Converter.lighter_bytes`."""
        return self._converter.lighter_bytes(kind)

    def lighter(self, kind: Kind, progress: Progress) -> dict[Place, LinearLayer]:
        """The linear layers, but for the head, in ``kind``: a second set beside those that are in use.

        See `engine.converter.Converter.lighter` for what it raises.
        """
        return self._converter.lighter(kind, progress)

    @property
    def windowed(self) -> ModelSpec:
        """The model with the attention windows that are in force."""
        return self._windowed

    @property
    def padded_ids(self) -> Tensor | None:
        """Ids that no token belongs to, int64 on the device; None if there are none."""
        return self._padded

    @property
    def kv_dtype(self) -> str:
        """The precision of keys and values by name (`engine.kv_cache.KV_DTYPES`)."""
        return self._kv_dtype

    @property
    def window(self) -> int | None:
        """The largest attention window over all layers in tokens, None if a layer sees everything."""
        windows = [window for window in self._windowed.layer_windows if window is not None]
        return max(windows) if len(windows) == self.spec.num_layers else None

    def kv_bytes_per_block(self, block_size: int, kv_dtype: str = "model") -> int:
        """Bytes of a block over all layers. ValueError for an unknown kv_dtype."""
        return kv_bytes_per_block(self.spec, block_size, storage_dtype(kv_dtype, self.dtype))

    def allocate_kv(self, num_blocks: int, block_size: int, kv_dtype: str = "model") -> None:
        """Replace the pool by an empty one, the old one being freed first.

        MemoryError if it does not fit, ValueError for an unknown kv_dtype, and what `kv_scales` raises.
        """
        self.free_kv()
        scales = None if kv_dtype == "model" else self.kv_scales(kv_dtype)
        self.kv = KVCache.allocate(
            self.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=kv_dtype,
            scales=scales,
            # 8-bit numbers have to be widened anyway, and then to what the products around them are best in.
            compute_dtype=self.decoder.activation_dtype,
        )
        self._kv_dtype = kv_dtype
        self._host.keep_fitting(self.kv)
        self._builder = BatchBuilder(block_size, num_blocks, self.window)
        self._traffic = self._model_traffic()

    def kv_scales(self, kv_dtype: str) -> KVScales:
        """The scales for keys and values in 8 bits, calibrated when they are first asked for, then kept.

        Call it while no step is computed. Raises `KVScalesError` naming a head that yields no scale,
        ValueError for an unknown kv_dtype or without calibration ids, MemoryError if there is no room for the
        text's keys and values.
        """
        return self._calibration.scales(storage_dtype(kv_dtype, self.dtype), self._windowed)

    def set_window(self, override: int) -> None:
        """Let every layer attend to the last ``override`` tokens at most; 0: to what its own window says.

        A change frees the pool, whose content belongs to the old windows, and forgets calibrated scales.
        """
        if override < 0:
            raise ValueError(f"sliding_window is {override}; it must be 0 (the model's own) or more")
        windows = self.spec.layer_windows
        if override:
            windows = tuple(min(own or override, override) for own in windows)
        if windows != self._windowed.layer_windows:
            self.free_kv()
            self._calibration.forget()
            self._windowed = replace(self.spec, layer_windows=windows)

    def free_kv(self) -> None:
        """Give the pool's memory back and forget all slots."""
        self.graphs.drop()
        self._host.join()
        self.kv = None
        self._builder = None
        self.sampler.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def set_attention(self, name: str) -> None:
        """Change the attention backend from the next step on. ValueError with the reason if it cannot run."""
        self._attention = self._backend(name)

    @property
    def ops(self) -> Ops:
        """The parts of the decoder that can be fused, as steps run with them."""
        return self.decoder.ops

    def set_fused(self, wanted: Mapping[str, bool]) -> None:
        """Fuse these parts of the decoder and of sampling from the next step on, by the ids of their knobs.

        ValueError with the reason for one that cannot run here. Parts that torch is to compile are compiled
        now, unless `compile_parts` has done so; RuntimeError if they cannot be.
        """
        if wanted == self._fused:  # what was captured with the parts that there are stays good
            return
        rest = self._compiled.ops if wanted.get(COMPILE) else PLAIN
        ops = make_ops(wanted, self.spec, self.device, self.decoder.activation_dtype, rest)
        self.sampler.fused = make_sampling(bool(wanted.get(SAMPLING)), self.device)
        self.decoder.ops, self._fused = ops, dict(wanted)

    def must_compile(self, wanted: Mapping[str, object]) -> bool:
        """Whether torch has something to compile before `set_fused`, which takes long."""
        return bool(wanted[COMPILE]) and not self._compiled.ready

    def compile_parts(self, progress: Progress) -> None:
        """Let torch compile parts of the decoder, while steps go on. RuntimeError if it cannot."""
        self._compiled.compile(progress)

    def release(self, slot: int) -> None:
        """Forget what is kept for a slot. Call it when a request leaves its slot, finished or preempted."""
        self.sampler.release(slot)
        if self._builder is not None:
            self._builder.release(slot)

    def set_forward_timing(self, on: bool) -> None:
        """Time the parts of the forward pass from the next step on, or stop doing so."""
        self.decoder.timer = PartTimer(self.device) if on else None

    def allocate_host(self, arena: Arena, num_blocks: int) -> None:
        """Give an arena of host memory ``num_blocks`` blocks, all empty; 0 frees it.

        It is kept as long as the pool has blocks of the same shape, and freed with them by `allocate_kv`.
        Raises MemoryError with the size if it does not fit, RuntimeError without a pool.
        """
        self._host.allocate(arena, num_blocks, self._pool())

    def host_nbytes(self, arena: Arena) -> int:
        """Bytes that an arena of host memory takes."""
        return self._host.nbytes(arena)

    def _read_text(self) -> None:
        """Run the calibration text through the model as it is meant to be run."""
        self._calibration.read(self.spec, every_logit=True)

    def _model_traffic(self) -> TrafficModel:
        return TrafficModel(
            self._windowed,
            self._linears,
            embed_dtype=self.decoder.embed.dtype,
            kv_dtype=storage_dtype(self._kv_dtype, self.dtype),
        )

    def _pool(self) -> KVCache:
        if self.kv is None:
            raise RuntimeError("no KV pool: call allocate_kv first")
        return self.kv

    def _step_kernels(self, tokens: int, replay: GraphStep | None = None) -> str:
        at = self._linears.index(tokens)
        return self._kernels(self._linears.kernels[at], self._linears.takes_codes[at], replay)

    def _kernels(self, linear: str, codes: TakesCodes, replay: GraphStep | None = None) -> str:
        rest = ",activations=" + str(self.decoder.activation_dtype).removeprefix("torch.")
        if fused := kernels_of(self.ops, codes):
            rest += f",{fused}"
        if self.sampler.fused is not None:
            rest += f",sample={self.sampler.fused.name}"
        if self.graphs.on:
            rest += f",graph={'none' if replay is None else replay.shape}"
        return linear[: MAX_KERNELS_CHARS - len(rest)] + rest

    def _backend(self, name: str) -> AttentionBackend:
        reason = probe(name, self.spec, self.device, self.dtype)
        if reason is not None:
            raise ValueError(reason)
        return get_backend(name, self.device, self.dtype)

    def to_device(self, array: Ints) -> Tensor:
        """An array on the runner's device."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
