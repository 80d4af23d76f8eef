"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one class, told apart only by `ModelSpec`."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionPlan
from engine.kv_cache import KVCache
from engine.layers.linear import Choice, Linear, choose, plain_choice
from engine.layers.mlp import GatedMLP
from engine.layers.norm import head_rms_norm, rms_norm
from engine.layers.rope import RotaryTable, rotate_
from engine.models.spec import ModelSpec
from engine.timing import Part, PartTimer, no_mark

SAMPLE_ELEMENTS = 16 << 20  # of weights, for measuring linear layers at load


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    head_norm: Tensor | None  # [heads + kv_heads, head_dim], queries' then keys'
    out: Linear
    post_norm: Tensor
    mlp: GatedMLP


class Decoder:
    """Weights and forward pass.

    ``dtype`` float32 means float32 throughout. bfloat16 means that weights, keys, values and attention are
    bfloat16. What lies between the layers (the residual stream, norms, rotations, activations) is bfloat16
    on a GPU and wherever bfloat16 products are the fastest; on a CPU whose products of bfloat16 weights are
    faster in float32 it stays float32, for rounding it would take time and only lose precision.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: MutableMapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        measure: bool = True,
    ) -> None:
        """Take the weights by canonical name, some of them fused into one.

        In ``weights`` the fused ones become views of that one, so that nothing is held twice; a mapping that
        is no longer needed can be cleared afterwards.
        Positions must stay below ``max_len``.
        ``measure`` chooses the linear implementation by measuring; without it the plain one is used.
        """
        self.spec = spec
        self.dtype = dtype
        self.device = device
        take = _Taker(weights, dtype, device)
        self.choice = self._choose(weights) if measure else plain_choice(dtype, device)
        computes_in = self.choice.computes_in
        self.activation_dtype = computes_in if device.type == "cpu" else dtype
        self.embed = take("embed")
        self.layers = [self._layer(take, i) for i in range(spec.num_layers)]
        self.norm = take("norm").to(self.activation_dtype)
        head = self.embed if spec.tie_word_embeddings else take("head")
        self.head = Linear(head, None, self.choice, torch.float32)
        self.rotary = RotaryTable(spec.rope, max_len, device)
        self.finite: Tensor | None = None  # whether each of the last pass's tokens was, [tokens]
        self.timer: PartTimer | None = None  # times the parts of each forward pass while it is there

    def _choose(self, weights: MutableMapping[str, Tensor]) -> Choice:
        samples, elements = [], 0
        for i in range(self.spec.num_layers):
            for group in _FUSED:
                parts = [weights[f"layers.{i}.{name}.weight"] for name in group]
                fused = torch.cat([part.to(self.dtype) for part in parts])
                room = max(1, (SAMPLE_ELEMENTS - elements) // fused.shape[1])
                samples.append(fused[:room].to(self.device))
                elements += samples[-1].numel()
            if elements >= SAMPLE_ELEMENTS - (1 << 20):
                break
        return choose(samples, total_elements=self.spec.num_params, device=self.device)

    def _layer(self, take: _Taker, i: int) -> _Layer:
        spec, act = self.spec, self.activation_dtype
        at = f"layers.{i}."

        def linear(names: tuple[str, ...], bias: bool) -> Linear:
            weight = take.fused(*(f"{at}{name}.weight" for name in names))
            added = take.fused(*(f"{at}{name}.bias" for name in names)) if bias else None
            return Linear(weight, added, self.choice, act)

        head_norm = None
        if spec.qk_norm:
            q_norm, k_norm = take(at + "q_norm"), take(at + "k_norm")
            head_norm = torch.cat(
                (q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1))
            ).to(act)
        return _Layer(
            take(at + "input_norm").to(act),
            linear(_FUSED[0], spec.qkv_bias),
            head_norm,
            linear(_FUSED[1], spec.o_bias),
            take(at + "post_norm").to(act),
            GatedMLP(linear(_FUSED[2], spec.mlp_bias), linear(_FUSED[3], spec.mlp_bias)),
        )

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
        spec, eps = self.spec, self.spec.rms_norm_eps
        rotated = spec.num_heads + spec.num_kv_heads
        mark = no_mark if self.timer is None else self.timer.begin()
        x = F.embedding(ids, self.embed).to(self.activation_dtype)  # new memory, which the layers add to
        cos, sin = self.rotary.at(positions, self.activation_dtype)
        for i, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.input_norm, eps)
            mark(Part.OTHER)
            qkv = layer.qkv(normed).view(-1, rotated + spec.num_kv_heads, spec.head_dim)
            mark(Part.LINEAR)
            qk = qkv[:, :rotated]
            if layer.head_norm is not None:
                qk.copy_(head_rms_norm(qk, layer.head_norm, eps))
            rotate_(qk, cos, sin)
            mark(Part.OTHER)
            q, k, v = kv.store(i, slots, qkv)
            attended = kv.finish(i, attention.attend(i, q, k, v))
            mark(Part.ATTENTION)
            x += layer.out(attended)
            mark(Part.LINEAR)
            normed = rms_norm(x, layer.post_norm, eps)
            mark(Part.OTHER)
            x += layer.mlp(normed)
            mark(Part.LINEAR)
        # Of every token, not only where logits are wanted: later ones need not show it, behind 8 bits or a
        # window, and a request may lose its blocks to others before it is asked for logits.
        self.finite = x.isfinite().all(dim=-1)
        if logit_rows is not None:
            x = x.index_select(0, logit_rows)
        logits = self.head(rms_norm(x, self.norm, eps))
        mark(Part.HEAD)
        return logits

    @property
    def weight_bytes(self) -> int:
        """Bytes that all forms of the weights take."""
        return sum(linear.nbytes for linear in self._linears()) + (
            0 if self.spec.tie_word_embeddings and self._embed_is_a_form() else self.embed.nbytes
        )

    def _embed_is_a_form(self) -> bool:
        return any(not form.packed and form.weight_dtype == self.dtype for form in self.choice.distinct)

    def _linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)
        yield self.head


_FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


class _Taker:
    """Hands out tensors by name, in the model's dtype and on its device."""

    def __init__(
        self, weights: MutableMapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device = device

    def __call__(self, name: str) -> Tensor:
        return self.weights[name].to(device=self.device, dtype=self.dtype)

    def fused(self, *names: str) -> Tensor:
        """The tensors one below the other, as one, of which they become views."""
        parts = [self(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        whole = torch.cat(parts)
        for name, view in zip(names, torch.split(whole, [len(part) for part in parts]), strict=True):
            held = self.weights[name]
            if held.dtype == whole.dtype and held.device == whole.device:
                self.weights[name] = view
        return whole
