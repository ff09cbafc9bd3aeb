"""The residual block of a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.nn.attention import AttentionSaved, CausalSelfAttention
from asyncpar.nn.mlp import Mlp, MlpSaved
from asyncpar.nn.normalization import LayerNorm, LayerNormSaved
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSaved:
    """What each of the four layers saved."""

    first_norm: LayerNormSaved
    attention: AttentionSaved
    second_norm: LayerNormSaved
    mlp: MlpSaved


class Block(Stage[BlockSaved]):
    """``h = x + attention(norm(x)); y = h + mlp(norm(h))``: normalization first (Xiong et al. 2020)."""

    def __init__(
        self,
        name: str,
        features: int,
        heads: int,
        *,
        initializer: Initializer,
        gain: float = 1.0,
        output_gain: float = 1.0,
    ) -> None:
        self.first_norm = LayerNorm(f"{name}/first_norm", features, initializer=initializer)
        self.attention = CausalSelfAttention(
            f"{name}/attention", features, heads, initializer=initializer, gain=gain, output_gain=output_gain
        )
        self.second_norm = LayerNorm(f"{name}/second_norm", features, initializer=initializer)
        self.mlp = Mlp(
            f"{name}/mlp", features, 4 * features, initializer=initializer, gain=gain, output_gain=output_gain
        )

    def forward(self, x: Array) -> tuple[Array, BlockSaved]:
        normalized, first_norm = self.first_norm.forward(x)
        middle, attention = self.attention.forward(normalized)
        middle += x
        normalized, second_norm = self.second_norm.forward(middle)
        y, mlp = self.mlp.forward(normalized)
        y += middle
        return y, BlockSaved(first_norm=first_norm, attention=attention, second_norm=second_norm, mlp=mlp)

    def backward(self, saved: BlockSaved, dy: Array, on_gradient: OnGradient | None = None) -> Array:
        dnormalized = self.mlp.backward(saved.mlp, dy, on_gradient)
        dmiddle = self.second_norm.backward(saved.second_norm, dnormalized, on_gradient)
        dmiddle += dy
        dnormalized = self.attention.backward(saved.attention, dmiddle, on_gradient)
        dx = self.first_norm.backward(saved.first_norm, dnormalized, on_gradient)
        dx += dmiddle
        return dx

    def parameters(self) -> tuple[Parameter, ...]:
        layers: tuple[Stage[LayerNormSaved] | Stage[AttentionSaved] | Stage[MlpSaved], ...]
        layers = (self.first_norm, self.attention, self.second_norm, self.mlp)
        return tuple(parameter for layer in layers for parameter in layer.parameters())
