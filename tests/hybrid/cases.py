"""Combinations of layouts, schedules and settings to test: the whole product is far too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import combinations, product
from math import prod
from typing import Any, TypeAlias

from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.core.config.schedule_type import schedule_record
from asyncpar.core.config.three_d import DEFAULT_ORDER
from asyncpar.hybrid import HybridConfig
from asyncpar.nn import TransformerConfig
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.soak import chosen

RANKS = chosen(4, soak=8)

LAYOUTS = (
    *sorted((shape for shape in product((1, 2, 4, 8), repeat=3) if prod(shape) == RANKS), key=max),
    *chosen(((2, 2, 2),), soak=()),
)
"""All factorizations of 4 ranks, and 8 ranks on all three axes, (dp, tp, pp); those of 8 with ``--soak``."""

TWO_CHUNKS = (PipelineScheduleType.INTERLEAVED_ONE_F1B, PipelineScheduleType.ZBV, PipelineScheduleType.DUALPIPE_V)
RECOMPUTES_ALL = "all"
RECOMPUTATIONS = (*MemoryOptimizationStrategy, RECOMPUTES_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination of all there is to choose."""

    layout: tuple[int, int, int]
    schedule: PipelineScheduleType
    zero: ZeROStage
    micro_batches: int
    recompute: str
    is_tied: bool
    is_uneven: bool
    is_sequence_parallel: bool
    order: str
    clip_norm: float | None

    def __str__(self) -> str:
        marks = [
            "x".join(map(str, self.layout)),
            schedule_record(self.schedule).short,
            self.zero,
            f"m{self.micro_batches}",
            self.recompute,
            "tied" * self.is_tied,
            "uneven" * self.is_uneven,
            "sp" * self.is_sequence_parallel,
            self.order * (self.order != DEFAULT_ORDER),
            "clip" * (self.clip_norm is not None),
        ]
        return "-".join(mark for mark in marks if mark)

    @property
    def chunks(self) -> int:
        return 2 if self.schedule in TWO_CHUNKS else 1

    @property
    def rows(self) -> int:
        """Rows of the whole batch; where uneven, replicas have micro-batches of different sizes."""
        dp = self.layout[0]
        return (
            dp * self.micro_batches + (dp * self.micro_batches + 1) // 2 if self.is_uneven else dp * self.micro_batches
        )

    @property
    def layers(self) -> int:
        pieces = self.layout[2] * self.chunks
        return pieces + (pieces + 1) // 2 if self.is_uneven else max(2, pieces)

    @property
    def model(self) -> TransformerConfig:
        """Dimensions that tensor-parallel ranks cannot share equally, where it is uneven; but for the heads."""
        tp = self.layout[1]
        features = 8 if tp < 8 else 16
        return TransformerConfig(
            vocabulary=13 if self.is_uneven else 16,
            length=5 if self.is_uneven else 8,
            features=features,
            heads=max(2, tp),
            mlp_hidden=4 * features - 1 if self.is_uneven else None,
            layers=self.layers,
            dtype="float64",
            tied_embeddings=self.is_tied,
        )

    @property
    def config(self) -> HybridConfig:
        dp, tp, pp = self.layout
        everything = self.recompute == RECOMPUTES_ALL
        pieces, layers = pp * self.chunks, self.layers
        parallelism = ThreeDParallelismConfig(
            dp_size=dp,
            tp_size=tp,
            pp_size=pp,
            num_layers=layers,
            pipeline_schedule=self.schedule,
            num_model_chunks=self.chunks,
            layers_per_stage=tuple(layers // pieces + (at < layers % pieces) for at in range(pieces)),
            memory_strategy=MemoryOptimizationStrategy.BASIC
            if everything
            else MemoryOptimizationStrategy(self.recompute),
            enable_gradient_checkpointing=everything,
            order=self.order,
        )
        return HybridConfig(
            parallelism=parallelism,
            micro_batches=self.micro_batches,
            zero=small_buckets(self.zero),
            clip_norm=self.clip_norm,
        )


def small_buckets(stage: ZeROStage) -> ZeROConfig:
    """Return ``stage`` with many buckets; without sharding it has none of its own, and takes no size."""
    return ZeROConfig(stage=stage) if stage is ZeROStage.NONE else ZeROConfig(stage=stage, bucket_size_mb=0.002)


CHOICES: Mapping[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "schedule": tuple(PipelineScheduleType),
    "zero": tuple(ZeROStage),
    "micro_batches": (4, 1),
    "recompute": RECOMPUTATIONS,
    "is_tied": (False, True),
    "is_uneven": (True, False),
    "is_sequence_parallel": (False, True),
    "order": (DEFAULT_ORDER, "tp-dp-pp"),
    "clip_norm": (0.3, None),
}
assert [field.name for field in fields(Case)] == list(CHOICES)

APART = ({"layout", "schedule"}, {"layout", "recompute"}, {"schedule", "recompute"})
"""Pairs of fields whose choices need not all come together in a sample."""

_PIPELINED = tuple(layout for layout in LAYOUTS if layout[2] > 1)


def whole_product() -> Iterator[Case]:
    """Yield every combination."""
    for values in product(*CHOICES.values()):
        yield Case(**dict(zip(CHOICES, values, strict=True)))


def covering_sample() -> list[Case]:
    """Return cases in which every two choices come together at least once, always the same cases.

    But for ``APART``, which would take too many; every schedule meets every stage of ZeRO in a pipeline of more than
    one rank.
    """
    missing = _pairs_to_cover()
    cases = []
    while missing:
        case = _next_case(missing)
        for pair in _pairs_of(case):
            missing.pop(pair, None)
        cases.append(Case(**case))
    return cases


def small_sample() -> list[Case]:
    """Return few cases of ``covering_sample`` in which every choice occurs, those first that bring most choices."""
    left, cases = covering_sample(), list[Case]()
    missing = {(name, value) for name, values in CHOICES.items() for value in values}

    def brings(case: Case) -> set[_Choice]:
        is_pipelined = case.layout in _PIPELINED
        return missing & {(name, getattr(case, name)) for name in CHOICES if is_pipelined or name != "schedule"}

    while missing:
        cases.append(max(left, key=lambda case: len(brings(case))))
        missing -= brings(cases[-1])
    return cases


_Choice: TypeAlias = tuple[str, Any]
_Pairs: TypeAlias = dict[frozenset[_Choice], None]
"""A set in the order in which it was made."""


def _pairs_to_cover() -> _Pairs:
    pairs: _Pairs = {}
    for (one, values), (other, others) in combinations(CHOICES.items(), 2):
        if {one, other} not in APART:
            pairs |= {frozenset({(one, value), (other, another)}): None for value in values for another in others}
    return pairs


def _pairs_of(case: Mapping[str, Any]) -> list[frozenset[_Choice]]:
    """What concerns schedules counts only where there is a pipeline."""
    is_pipelined = case["layout"] in _PIPELINED
    return [frozenset(pair) for pair in combinations(case.items(), 2) if is_pipelined or "schedule" not in dict(pair)]


def _next_case(missing: _Pairs) -> dict[str, Any]:
    """Begin with a pair that is missing; choose greedily, one by one, what brings most others."""
    case: dict[str, Any] = dict(next(iter(missing)))
    choices = {**CHOICES, "layout": _PIPELINED} if "schedule" in case else CHOICES
    for name, values in choices.items():
        if name not in case:
            case[name] = max(values, key=partial(_gain, name, case, missing))
    return {name: case[name] for name in CHOICES}


def _gain(name: str, case: Mapping[str, Any], missing: _Pairs, value: Any) -> tuple[int, int]:
    """Return how many missing pairs a choice makes with the ones made, and may make with others."""
    now = sum(frozenset({(name, value), chosen}) in missing for chosen in case.items())
    return now, sum((name, value) in pair for pair in missing)
