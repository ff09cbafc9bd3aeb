"""What is to be trained, and on what: the question to which layouts are answers.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.config.checks import check_choice, check_count
from asyncpar.config.parallel import DEFAULT_ORDER, MemoryOptimizationStrategy
from asyncpar.config.rank_order import RankOrder
from asyncpar.estimate.machine import Machine
from asyncpar.estimate.shape import ModelShape
from asyncpar.estimate.state import ADAM_STATES, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Training of ``model`` with ``batch`` sequences per step over all replicas, in micro-batches.

    ``optimizer_states`` are what the optimizer keeps of each parameter.  ``recompute``: every layer is computed again
    in the backward pass, whatever ``memory_strategy`` says.  ``order`` lays ranks out along the axes, fastest first.
    """

    model: ModelShape
    machine: Machine
    batch: int
    micro_batch_size: int = 1
    precision: Precision = Precision.FP32
    optimizer_states: int = ADAM_STATES
    memory_strategy: MemoryOptimizationStrategy = MemoryOptimizationStrategy.BASIC
    recompute: bool = False
    sequence_parallel: bool = False
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        check_count("batch", self.batch)
        check_count("micro_batch_size", self.micro_batch_size)
        check_count("optimizer_states", self.optimizer_states, least=0)
        RankOrder.parse(self.order, {"dp": 1, "tp": 1, "pp": 1})
        object.__setattr__(self, "precision", check_choice("precision", Precision, self.precision))
        strategy = check_choice("memory_strategy", MemoryOptimizationStrategy, self.memory_strategy)
        object.__setattr__(self, "memory_strategy", strategy)
