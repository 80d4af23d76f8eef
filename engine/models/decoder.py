"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one class, told apart only by `ModelSpec`."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionPlan
from engine.current_device import make_current
from engine.kv_cache import KVCache
from engine.layers.linear import LinearLayer
from engine.layers.mlp import GatedMLP
from engine.layers.rope import RotaryTable
from engine.models.linears import HEAD, PARTS, LinearMaker, LinearTable, Place, TakesCodes, WeightStore
from engine.ops.native_stack import Stacks
from engine.ops.plain import PLAIN
from engine.timing import Part, PartTimer, no_mark


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: LinearLayer  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    head_norm: Tensor | None  # [heads + kv_heads, head_dim], queries' then keys'
    out: LinearLayer
    post_norm: Tensor
    mlp: GatedMLP


class Decoder:
    """Weights and forward pass.

    ``dtype`` float32 means float32 throughout. bfloat16 means that weights, keys, values and attention are
    bfloat16. What lies between the layers (the residual stream, norms, rotations, activations) is bfloat16
    on a GPU and wherever bfloat16 products are the fastest; on a CPU whose products of bfloat16 weights are
    faster in float32 it stays float32, for rounding it would take time and only lose precision.
    """

    def __init__(self, store: WeightStore, maker: LinearMaker, *, max_len: int) -> None:
        """Take the weights, each linear layer as it was loaded. Positions must stay below ``max_len``."""
        self.spec = spec = store.spec
        self.dtype = store.dtype
        self.device = store.device
        self.activation_dtype = maker.activation_dtype
        self.embed = store.plain(HEAD) if spec.tie_word_embeddings else store("embed")
        if store.is_quantized:
            maker.learn_loaded()
        self.layers = [self._layer(store, maker, i) for i in range(spec.num_layers)]
        self.norm = store("norm").to(self.activation_dtype)
        self.head = maker.as_loaded(HEAD)
        self.rotary = RotaryTable(spec.rope, max_len, store.device)
        self.ops = PLAIN
        self._stacks = Stacks()
        self.finite: Tensor | None = None  # whether each of the last pass's tokens was, [tokens]
        self.timer: PartTimer | None = None  # times the parts of each forward pass while it is there

    def _layer(self, take: WeightStore, maker: LinearMaker, i: int) -> _Layer:
        spec, act = self.spec, self.activation_dtype
        at = f"layers.{i}."
        qkv, out, gate_up, down = (maker.as_loaded(Place(i, part)) for part in PARTS)
        head_norm = None
        if spec.qk_norm:
            q_norm, k_norm = take(at + "q_norm"), take(at + "k_norm")
            head_norm = torch.cat(
                (q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1))
            ).to(act)
        return _Layer(
            take(at + "input_norm").to(act),
            qkv,
            head_norm,
            out,
            take(at + "post_norm").to(act),
            GatedMLP(gate_up, down),
        )

    def linear(self, place: Place) -> LinearLayer:
        """The linear layer that stands there."""
        if place == HEAD:
            return self.head
        layer = self.layers[place.layer]
        owner = layer if place.part in ("qkv", "out") else layer.mlp
        found: LinearLayer = getattr(owner, place.part)
        return found

    def set_linear(self, place: Place, linear: LinearLayer) -> None:
        """Put another linear layer of the same shape there. No pass may be under way."""
        self._stacks.forget()
        if place == HEAD:
            self.head = linear
            return
        layer = self.layers[place.layer]
        setattr(layer if place.part in ("qkv", "out") else layer.mlp, place.part, linear)

    def sharing(self, linears: Mapping[Place, LinearLayer]) -> Decoder:
        """Another decoder with these linear layers, which shares everything else."""
        out = copy.copy(self)
        out.finite = out.timer = None
        out._stacks = Stacks()
        out.layers = [replace(layer, mlp=copy.copy(layer.mlp)) for layer in self.layers]
        for place, linear in linears.items():
            out.set_linear(place, linear)
        return out

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionPlan,
        kv: KVCache,
        logit_rows: Tensor | None,
    ) -> Tensor:
        """Compute ids [tokens] at positions [tokens], writing keys and values to slots [tokens] of the pool.

        Returns float32 logits [rows, vocab_size] of the tokens in ``logit_rows`` (None: of every token).
        """
        make_current(self.device)
        spec, eps = self.spec, self.spec.rms_norm_eps
        all_heads = spec.num_heads + 2 * spec.num_kv_heads
        norm, gate, scaled = self.ops.norm, self.ops.gate, attention.needs.scaled
        mark = no_mark if self.timer is None else self.timer.begin()
        x = F.embedding(ids, self.embed).to(self.activation_dtype)  # new memory, which the layers add to
        num_tokens = x.shape[0]
        found = self._stacks.of(
            self, attention, num_tokens, num_tokens if logit_rows is None else logit_rows.shape[0]
        )
        if found is not None:
            stack, plan = found
            mark(Part.OTHER)
            logits, self.finite = stack.run(x, positions, slots, plan, kv, logit_rows, self.timer)
            return logits
        store = self.ops.store.begin(
            self.rotary, positions, slots, kv, attention.needs, self.activation_dtype
        )
        delta: Tensor | None = None  # what the norm that comes next adds to x
        for i, layer in enumerate(self.layers):
            normed = norm(x, delta, layer.input_norm, eps, layer.qkv)
            mark(Part.OTHER)
            qkv = layer.qkv(normed).view(-1, all_heads, spec.head_dim)
            mark(Part.LINEAR)
            q, k, v = store(i, qkv, layer.head_norm, eps)
            attended = attention.attend(i, q, k, v)
            if scaled:
                attended = kv.finish(i, attended)
            mark(Part.ATTENTION)
            delta = layer.out(attended)
            mark(Part.LINEAR)
            normed = norm(x, delta, layer.post_norm, eps, layer.mlp.gate_up)
            mark(Part.OTHER)
            delta = gate(layer.mlp, normed)
            mark(Part.LINEAR)
        if delta is not None:
            x += delta
        # Of every token, not only where logits are wanted: later ones need not show it, behind 8 bits or a
        # window, and a request may lose its blocks to others before it is asked for logits.
        self.finite = x.isfinite().all(dim=-1)
        if logit_rows is not None:
            x = x.index_select(0, logit_rows)
        logits = self.head(norm(x, None, self.norm, eps, self.head))
        mark(Part.HEAD)
        return logits

    @property
    def linears(self) -> dict[Place, LinearLayer]:
        """All linear layers by their places, the head last."""
        inner = [Place(i, part) for i in range(self.spec.num_layers) for part in PARTS]
        return {place: self.linear(place) for place in (*inner, HEAD)}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the embedding and of all forms of the linear layers' weights, a shared tensor once."""
        shared = self.spec.tie_word_embeddings and self.head.nbytes > self.head.own_bytes
        return sum(linear.nbytes for linear in self.linears.values()) + (0 if shared else self.embed.nbytes)

    def table(self) -> LinearTable:
        """What the linear layers, as they are now, read and run for each number of rows."""
        linears = self.linears
        starts = tuple(sorted({start for linear in linears.values() for start in linear.starts}))
        read = [
            sum(linear.read_bytes(start) for place, linear in linears.items() if place != HEAD)
            for start in starts
        ]
        head = [self.head.read_bytes(start) for start in starts]
        return LinearTable(
            starts,
            tuple(read),
            tuple(head),
            tuple(map(self.kernels, starts)),
            tuple(map(self.takes_codes, starts)),
        )

    def kernels(self, rows: int | None = None) -> str:
        """What multiplies ``rows`` rows, or (None) each number of rows: ``linear=...`` and, if it is
        another, ``head=...``. Implementations that serve different layers are joined by ``|``.
        """
        used = defaultdict[str, list[str]](list)
        for place, linear in self.linears.items():
            used["head" if place == HEAD else "linear"].append(linear.kernel(rows))
        inner, head = ("|".join(dict.fromkeys(names)) for names in (used["linear"], used["head"]))
        return f"linear={inner}" if inner == head else f"linear={inner},head={head}"

    def takes_codes(self, rows: int | None = None) -> TakesCodes:
        """Whether the layers' products of ``rows`` rows, or (None) of some number, take `QuantizedRows`.

        The head is left out: it follows a norm of its own, and often stays in a high precision by itself.
        """

        def taken(*parts: str) -> tuple[bool, ...]:
            linears = (linear for place, linear in self.linears.items() if place.part in parts)
            each = ((linear, linear.starts if rows is None else (rows,)) for linear in linears)
            return tuple(dict.fromkeys(linear.takes_codes(n) for linear, numbers in each for n in numbers))

        return TakesCodes(norm=taken("qkv", "gate_up"), mlp=taken("down"))
