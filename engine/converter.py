"""Brings the linear layers of a running model from one precision to another, one layer after the other.

Always from the original weights, which stay in host memory as long as there is room. Codes of AWQ take a
pass over a calibration text and a search, so they are kept once they were found; all others are quick to
make again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.layers.linear import LinearLayer
from engine.layers.precision import ActivationStats, Kind, QuantizedWeight, quantize, quantize_int4
from engine.layers.quantized import AnyRows
from engine.layout import NoRoom
from engine.memory import available_bytes, free_bytes
from engine.models.decoder import Decoder
from engine.models.linears import HEAD, LinearMaker, Place, WeightStore
from engine.models.reading import Meter, Progress
from engine.sizes import size
from engine.weight_precision import PLAIN, WeightPrecision, quantized_bytes

log = logging.getLogger(__name__)

KEEP_SHARE = 0.5  # originals that no layer holds may take this part of the memory that is available
# float32 copies of the largest weight that quantizing makes, measured: 2.7, 5.4 and 9.4.
WORK_COPIES = {"": 3, "rtn": 6, "awq": 10}
STUDY_COPIES = 5  # and that measuring a weight's error makes at least: 4.3


class _Watched:
    """A linear layer that shows its input before it multiplies. The head only looks: nobody reads logits."""

    def __init__(self, linear: LinearLayer, look: Callable[[Tensor], None], *, multiply: bool) -> None:
        self.shape, self.nbytes, self.own_bytes = linear.shape, linear.nbytes, linear.own_bytes
        self.starts, self.read_bytes, self.kernel = linear.starts, linear.read_bytes, linear.kernel
        self._linear, self._look, self._multiply = linear, look, multiply

    def native(self, rows: int) -> None:
        """Never: nobody would look."""

    def takes_codes(self, rows: int) -> bool:
        """Never: whoever looks wants the input itself."""
        return False

    def __call__(self, x: AnyRows) -> Tensor:
        assert isinstance(x, Tensor)
        self._look(x)
        return self._linear(x) if self._multiply else x.new_zeros((x.shape[0], 0))


class Converter:
    """The precision of one decoder's linear layers. The step thread owns it; no step may be computed.

    ``read_text`` runs a calibration text through the decoder, every token of it through the head.
    """

    def __init__(
        self, decoder: Decoder, maker: LinearMaker, store: WeightStore, read_text: Callable[[], None]
    ) -> None:
        self.precision: WeightPrecision | None = WeightPrecision()
        """What all layers are in; None after a conversion that failed."""
        self._decoder = decoder
        self._maker = maker
        self._store = store
        self._read_text = read_text
        self._labels = dict.fromkeys(store.shapes, PLAIN)
        self._codes: dict[Place, QuantizedWeight] = {}  # AWQ's, in host memory
        self._errors: dict[str, list[float]] = {}  # of each layer, by label
        self._learned: set[tuple[str, bool]] = set()
        self._lighter_bytes: dict[Kind, int] = {}
        # Why there are no originals.
        self._gone = "the model was loaded in a low precision" if store.is_quantized else ""

    @property
    def host_bytes(self) -> int:
        """Host memory that is held only to convert from: originals that no layer uses, and AWQ's codes."""
        store = self._store
        unused = 0 if self._gone else max(0, store.nbytes - self._used_bytes())
        kept = unused if store.device.type == "cpu" and not store.is_quantized else store.host_bytes
        shared = store.device.type == "cpu" and self._maker.holds_codes("int4")
        in_use = {place for place, label in self._labels.items() if label == "int4 awq"} if shared else set()
        # Any thread may ask while codes are being found.
        return kept + sum(codes.nbytes for place, codes in self._codes.copy().items() if place not in in_use)

    def keep_originals(self) -> None:
        """Keep the original weights if there is room for what of them no layer holds, or forget them."""
        store = self._store
        extra, free = self.host_bytes, available_bytes()
        if not self._gone and extra > free * KEEP_SHARE:
            self._give_up(extra, free)
        if self._gone:
            store.drop()
            self._codes.clear()

    def check(
        self,
        precision: WeightPrecision,
        spare_bytes: int = 0,
        *,
        forget: bool = False,
        is_spare: bool = False,
    ) -> None:
        """Raise `NoRoom` if the layers cannot be brought to ``precision``, with what is needed and there.

        ``spare_bytes`` of the device are free during the conversion and needed again after it; ``is_spare``:
        they are free already. ``forget``: each original weight is let go once it was converted. How many
        layouts the weights will be held in is only known once their kind was converted to.
        """
        if precision == self.precision:
            return
        if self._gone:
            raise NoRoom(f"weights cannot be converted: {self._gone}")
        cpu, store = self._store.device.type == "cpu", self._store
        phases = [precision, WeightPrecision()] if self._must_read(precision) else [precision]
        new = max(self._added_bytes(phase, forget=forget) for phase in phases)
        work = host = 0
        if precision.kind is not None:
            copies = max(WORK_COPIES[precision.method], STUDY_COPIES if precision.high == "sensitive" else 0)
            largest = max((math.prod(store.shapes[place]) for place in self._wanted(precision)), default=0)
            work = max(0, copies * 4 * largest - spare_bytes)
            if precision.method == "awq":
                places = [place for place in self._wanted(precision) if place not in self._codes]
                host += sum(quantized_bytes("int4", *store.shapes[place]) for place in places)
            if not cpu and not forget:
                host += max(0, store.nbytes - store.host_bytes)
        kept = spare_bytes if is_spare else 0
        wanted = [
            (f"weights in {precision.name}", new + work, free_bytes(store.device) - kept),
            ("host memory for the original weights and AWQ's codes", host, available_bytes()),
        ]
        if cpu:
            wanted = [(f"weights in {precision.name}", new + work + host, available_bytes() - kept)]
        for what, needed, available in wanted:
            if needed > available:
                can = size(max(0, available))
                raise NoRoom(f"{what} would take {size(needed)} more, {can} can be had")

    def convert(
        self,
        precision: WeightPrecision,
        progress: Progress,
        spare_bytes: int = 0,
        *,
        may_forget: bool = False,
    ) -> None:
        """Bring all layers to ``precision``; those that are so already are left alone.

        ``spare_bytes`` of the device are free and needed again afterwards. ``may_forget``: originals that
        there will be no room for are let go one by one, so that memory never holds all weights twice. There
        is no way back then, should it fail.

        Raises what `check` raises, MemoryError or RuntimeError if memory does not suffice after all, and
        ValueError naming the layer whose weight or input is not finite. Some layers may then be converted
        and ``precision`` is None; converting to any precision goes on from there.
        """
        extra, free = self._left_over(precision) if may_forget else (0, 0)
        forget = extra > free * KEEP_SHARE
        is_way_back = self.precision is None and not self._gone  # which there is no other than
        if not is_way_back:
            self.check(precision, forget=forget)
        if precision == self.precision:
            return
        if precision.kind is not None and self._learn(precision) and not is_way_back:
            # They may turn out to be held in more than one layout, which nobody could know before.
            extra, free = self._left_over(precision) if may_forget else (0, 0)
            forget = extra > free * KEEP_SHARE
            self.check(precision, spare_bytes, forget=forget, is_spare=True)
        self.precision = None
        with torch.inference_mode():
            if self._must_read(precision):
                self._convert(WeightPrecision(), progress)
                self._read(precision, progress)
            if forget:
                self._give_up(extra, free)
            self._convert(precision, progress, forget=forget)
        self.precision = precision
        log.info("the weights are in %s: %s", precision.name, self._decoder.kernels())

    def check_lighter(self, kind: Kind) -> None:
        """Raise `NoRoom` with the reason if `lighter` cannot be had. Memory is not looked at."""
        if self._gone:
            raise NoRoom(f"there are no weights to make a draft of: {self._gone}")

    def lighter_bytes(self, kind: Kind) -> int:
        """The bytes of what `lighter` makes, in all forms that are fastest for some number of rows.

        Measures these when it is first asked about a kind, and raises what `lighter` does.
        """
        self.check_lighter(kind)
        found = self._lighter_bytes.get(kind)
        if found is None:
            self._learn(_draft_precision(kind))
            with torch.inference_mode():
                places = [place for place in self._store.shapes if place.layer == 0]
                made = [self._maker.quantized(place, self._rounded(place, kind)) for place in places]
            found = sum(linear.own_bytes for linear in made) * self._store.spec.num_layers
            self._lighter_bytes[kind] = found
        return found

    def lighter(self, kind: Kind, progress: Progress) -> dict[Place, LinearLayer]:
        """New linear layers of the original weights in ``kind``, but for the head; none in use is touched.

        Rounded to nearest, unless better codes were found before. Raises what `check_lighter` raises,
        MemoryError or RuntimeError without memory, and ValueError naming a layer whose weight is not finite.
        """
        self.check_lighter(kind)
        store, precision = self._store, _draft_precision(kind)
        places = [place for place in store.shapes if place != HEAD]
        meter = Meter(f"making a draft in {kind}", sum(map(store.bytes_of, places)), progress)
        made: dict[Place, LinearLayer] = {}
        self._learn(precision)
        with torch.inference_mode():
            for place in places:
                made[place] = self._maker.quantized(place, self._quantized(precision, place))
                meter.add(store.bytes_of(place))
        return made

    def _left_over(self, precision: WeightPrecision) -> tuple[int, int]:
        """Bytes of originals that no layer will hold, and of host memory that will be there beside them."""
        if precision == self.precision or self._gone:
            return 0, 0
        store = self._store
        places = [place for place in self._wanted(precision) if not self._is_embedding(place)]
        added = self._added_bytes(precision) if store.device.type == "cpu" else 0
        return sum(map(store.bytes_of, places)), max(0, available_bytes() - added)

    def _give_up(self, extra: int, free: int) -> None:
        """Note that there are no originals: ``extra`` bytes for them, ``free`` are available."""
        self._gone = (
            f"the original weights were not kept, since {size(extra)} for them was more than half of the "
            f"{size(free)} available; restart the engine with the precision that is wanted"
        )
        log.warning("weight precision cannot be changed while running: %s", self._gone)

    def _is_embedding(self, place: Place) -> bool:
        return place == HEAD and self._store.spec.tie_word_embeddings

    def _convert(self, precision: WeightPrecision, progress: Progress, *, forget: bool = False) -> None:
        store, spec = self._store, self._store.spec
        errors = self._errors.get(precision.label)
        labels = {
            place: PLAIN if precision.keeps(place, spec.num_layers, errors) else precision.label
            for place in store.shapes
        }
        changed = [place for place, label in labels.items() if label != self._labels[place]]
        if not changed:
            return
        to = precision.kind or "the model's own precision"
        meter = Meter(f"converting weights to {to}", sum(map(store.bytes_of, changed)), progress)
        for place in changed:
            label = labels[place]
            if label == PLAIN:
                made = self._maker.plain(place)
            else:
                made = self._maker.quantized(place, self._quantized(precision, place))
                if forget:
                    store.forget(place)
                    self._codes.pop(place, None)
                else:
                    store.to_host(place)
            self._decoder.set_linear(place, made)
            self._labels[place] = label
            meter.add(store.bytes_of(place))

    def _quantized(self, precision: WeightPrecision, place: Place) -> QuantizedWeight:
        assert precision.kind is not None
        found = self._codes.get(place) if precision.method == "awq" else None
        return self._rounded(place, precision.kind) if found is None else found.to(self._store.device)

    def _rounded(self, place: Place, kind: Kind) -> QuantizedWeight:
        try:
            return quantize(self._store.plain(place), kind)
        except ValueError as error:
            raise ValueError(f"{place.name}: {error}") from error

    def _learn(self, precision: WeightPrecision) -> bool:
        """Choose what computes this kind of weights, when it is first wanted for these layers, and only then
        return True.
        """
        assert precision.kind is not None
        with_head = precision.high == "none"
        if (precision.kind, with_head) in self._learned:
            return False
        places = [*self._maker.sample_places(), *([HEAD] if with_head else [])]
        with torch.inference_mode():
            samples = [self._rounded(place, precision.kind) for place in places]
            self._maker.learn(precision.kind, samples)
        self._learned.add((precision.kind, with_head))
        return True

    def _must_read(self, precision: WeightPrecision) -> bool:
        """Whether the calibration text has to be read for ``precision``."""
        if precision.high == "sensitive" and precision.label not in self._errors:
            return True
        return precision.method == "awq" and any(
            place not in self._codes for place in self._wanted(precision)
        )

    def _wanted(self, precision: WeightPrecision) -> list[Place]:
        """Places that are quantized, or may be."""
        spec, errors = self._store.spec, self._errors.get(precision.label)
        return [place for place in self._store.shapes if not precision.keeps(place, spec.num_layers, errors)]

    def _read(self, precision: WeightPrecision, progress: Progress) -> None:
        """Let the text run through the model, whose layers are as loaded, and study each input."""
        places, decoder, num_layers = self._wanted(precision), self._decoder, self._store.spec.num_layers
        errors = [0.0] * num_layers
        how = "searching 4-bit codes (AWQ)" if precision.method == "awq" else "measuring rounding errors"
        meter = Meter(how, sum(map(self._store.bytes_of, places)), progress)

        def study(place: Place, x: Tensor) -> None:
            try:
                error = self._study(precision, place, x, measure=precision.high == "sensitive")
            except ValueError as why:
                raise ValueError(f"{place.name}: {why}") from why
            if place != HEAD:
                errors[place.layer] += error
            meter.add(self._store.bytes_of(place))

        originals = {place: decoder.linear(place) for place in self._store.shapes}
        try:
            for place in places:
                look = _looker(study, place)
                decoder.set_linear(place, _Watched(originals[place], look, multiply=place != HEAD))
            if HEAD not in places:
                decoder.set_linear(HEAD, _Watched(originals[HEAD], _ignore, multiply=False))
            self._read_text()
        finally:
            for place, linear in originals.items():
                decoder.set_linear(place, linear)
        if precision.high == "sensitive":
            self._errors[precision.label] = errors

    def _study(self, precision: WeightPrecision, place: Place, x: Tensor, *, measure: bool) -> float:
        """Find a place's codes; the squared error of its product over x, relative to the product's."""
        assert precision.kind is not None
        weight = self._store.plain(place)
        stats = ActivationStats(weight.shape[1], x.device)
        stats.add(x)
        if precision.method == "awq":
            found = self._codes.get(place)
            if found is None:
                found = quantize_int4(weight, importance=stats.importance, inputs=stats.inputs)
                self._codes[place] = found.to(torch.device("cpu"))
        else:
            found = quantize(weight, precision.kind)
        if not measure:
            return 0.0
        wide = weight.float()
        off = (found.to(weight.device).dequantize() - wide) @ stats.inputs.t()
        exact = wide @ stats.inputs.t()
        return float(off.square().sum() / exact.square().sum().clamp(min=1e-30))

    def _used_bytes(self) -> int:
        """Bytes of the original linear weights that layers hold as they are."""
        layers = self._decoder.linears
        if self._store.spec.tie_word_embeddings:
            layers.pop(HEAD)
        return sum(linear.nbytes - linear.own_bytes for linear in layers.values())

    def _added_bytes(self, precision: WeightPrecision, *, forget: bool = False) -> int:
        """Memory of the device that layers in ``precision`` take beyond what they do now."""
        store, spec, total = self._store, self._store.spec, 0
        cpu = store.device.type == "cpu"
        errors = self._errors.get(precision.label)
        for place, (rows, cols) in store.shapes.items():
            label = PLAIN if precision.keeps(place, spec.num_layers, errors) else precision.label
            if label == self._labels[place]:
                continue
            if precision.kind is not None and label != PLAIN:
                total += quantized_bytes(precision.kind, rows, cols) * self._maker.layouts(precision.kind)
            else:
                forms = self._maker.choice.distinct
                extra = [f for f in forms if f.layout != "dense" or f.weight_dtype != store.dtype or not cpu]
                total += sum(rows * cols * form.weight_dtype.itemsize for form in extra)
            now = self._decoder.linear(place)
            tied = self._is_embedding(place)
            if forget and not tied and label != PLAIN:
                total -= now.own_bytes + store.bytes_of(place)
            else:
                total -= now.own_bytes if cpu or tied else now.nbytes
        return max(0, total)


def _draft_precision(kind: Kind) -> WeightPrecision:
    return WeightPrecision(kind, "awq" if kind == "int4" else "", "head")


def _looker(study: Callable[[Place, Tensor], None], place: Place) -> Callable[[Tensor], None]:
    return lambda x: study(place, x)


def _ignore(_: Tensor) -> None:
    pass
