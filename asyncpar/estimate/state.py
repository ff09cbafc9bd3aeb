"""Bytes of parameters, gradients and optimizer states, as ZeRO spreads them over replicas.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from asyncpar.config.checks import check_choice, check_count
from asyncpar.zero.config import ZeROStage

ADAM_STATES = 2
"""Moments that Adam and AdamW keep of each parameter; SGD keeps 0, with momentum 1."""

_SINGLE, _HALF = 4, 2


class Precision(StrEnum):
    """FP32: everything takes four bytes.

    MIXED: values, gradients and activations take two; the optimizer keeps values of four beside its states.
    """

    FP32 = "fp32"
    MIXED = "mixed"

    @property
    def value_bytes(self) -> int:
        """Bytes of a value, of a gradient and of an activation."""
        return _SINGLE if self is Precision.FP32 else _HALF


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What one rank holds of the parameters that it computes with, or of each of them."""

    values: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.values + self.gradients + self.optimizer

    def times(self, parameters: int) -> StateBytes:
        """Return the same for ``parameters`` parameters."""
        return StateBytes(
            values=self.values * parameters,
            gradients=self.gradients * parameters,
            optimizer=self.optimizer * parameters,
        )


def bytes_per_parameter(
    stage: ZeROStage | int,
    replicas: int,
    precision: Precision | str = Precision.FP32,
    *,
    optimizer_states: int = ADAM_STATES,
) -> StateBytes:
    """Return what each of ``replicas`` ranks holds for each parameter with ZeRO ``stage``.

    With Adam, for stages 0 to 3 and N replicas: in single precision 16; 8 + 8/N; 4 + 12/N; 16/N; in mixed precision 16;
    4 + 12/N; 2 + 14/N; 16/N.  Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models" (2020), figure 1, where K = 12.
    """
    number = zero_stage_number(stage)
    check_count("replicas", replicas)
    check_count("optimizer_states", optimizer_states, least=0)
    precision = check_choice("precision", Precision, precision)
    master = 0 if precision is Precision.FP32 else _SINGLE
    return StateBytes(
        values=precision.value_bytes / (replicas if number >= 3 else 1),
        gradients=precision.value_bytes / (replicas if number >= 2 else 1),
        optimizer=(master + _SINGLE * optimizer_states) / (replicas if number >= 1 else 1),
    )


def zero_stage_number(stage: ZeROStage | int) -> int:
    """Return 0 to 3 for a stage or its number.  Raises ``UsageError`` for any other."""
    return stage.number if isinstance(stage, ZeROStage) else ZeROStage.of(stage).number
