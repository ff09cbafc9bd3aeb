"""The choices of a synchronizer's tuner, and their predicted costs by the cost model.

The cost of a step is the all-reduce of each of its buckets, a small cost per bucket, and the work on the one bucket
that nothing else hides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from asyncpar.codecs import AnyCodec, Identity
from asyncpar.collectives.algorithms.catalog import ARENA, work_of
from asyncpar.collectives.communicator import Communicator, cost_model_of
from asyncpar.collectives.cost import CostModel
from asyncpar.collectives.plan import SEGMENT_BYTES, count_pieces, parse_segment, split_segment
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.core.config.slicing import ceil_div
from asyncpar.errors import UsageError
from asyncpar.gradsync.layout import algorithm_of
from asyncpar.gradsync.tuning import AUTO, Choice, Space, Tuner, TuningConfig, tuned_sizes

_BUCKET_SECONDS: Final = 2e-4
"""Cost of a bucket besides its all-reduce, and of a step besides its buckets."""

_WORK_BANDWIDTH: Final = 4e9
"""Bytes/s of packing and unpacking a bucket, and of making a new one."""

BucketSizes = Callable[[float], tuple[int, ...]]
"""Returns the bytes of each bucket, for a bucket size in MiB."""


class StepModel:
    """Predicts the seconds of a step with a choice; ``learn`` updates it with measurements of lanes."""

    def __init__(self, model: CostModel, sizes: BucketSizes, *, has_arena: bool) -> None:
        self._model = model
        self._sizes = sizes
        self._has_arena = has_arena

    def learn(self, *, latency: float | None, bandwidth: float | None) -> None:
        """Use these figures of lanes from now on, seconds and bytes/s; None keeps the known one."""
        self._model = self._model.learn(latency=latency or None, bandwidth=bandwidth or None)

    def predict(self, choice: Choice) -> float:
        """Return the predicted seconds of a step without overlap."""
        sizes = self._sizes(choice.bucket_size_mb)
        exchanges = sum(self._exchange(choice, nbytes) for nbytes in sizes)
        return exchanges + (1 + len(sizes)) * _BUCKET_SECONDS + 2 * max(sizes, default=0) / _WORK_BANDWIDTH

    def _exchange(self, choice: Choice, nbytes: int) -> float:
        algorithm = choice.algorithm
        if algorithm == AUTO:
            algorithm = self._model.choose("all_reduce", nbytes, arena=self._has_arena)
        seconds = self._model.estimate("all_reduce", algorithm, nbytes)
        if algorithm == ARENA or algorithm.startswith("hierarchical"):
            return seconds
        segment = parse_segment(choice.segment) if choice.segment else SEGMENT_BYTES
        pieces = count_pieces(ceil_div(nbytes, self._model.size), segment)
        rounds = work_of("all_reduce", algorithm, self._model.size, nbytes).steps
        return seconds + (pieces - 1) * rounds * self._model.lane.latency / 2  # two pieces are in flight


def check_pin(tuning: TuningConfig, communicator: Communicator) -> None:
    """Raise ``UsageError`` if the pinned algorithm cannot run in the group of ``communicator``."""
    pinned = tuning.pinned_algorithm
    if pinned is None:
        return
    name, segment = split_segment(pinned)
    possible = communicator.algorithms("all_reduce")
    if name not in possible:
        raise UsageError(
            f"tuning: pin {tuning.pin!r}: {name} cannot run here, expected one of {', '.join(possible)}; "
            "pin another one, or none"
        )
    if name == ARENA and segment is not None:
        raise UsageError(f"tuning: pin {tuning.pin!r}: the arena has no messages; pin @{ARENA}")


def make_tuner(
    tuning: TuningConfig,
    communicator: Communicator,
    *,
    bucket_size_mb: float,
    strategy: CommunicationStrategy,
    codec: AnyCodec,
    sizes: BucketSizes,
) -> tuple[Tuner, StepModel]:
    """Return the tuner for the steps of ``communicator``, whose buckets have these ``sizes``, and its predictor.

    It begins with the algorithm of the ``strategy``; where lanes were measured, with the one that they make cheapest.
    Raises ``UsageError`` if the pinned algorithm cannot run.
    """
    check_pin(tuning, communicator)
    if tuning.pinned_algorithm is not None and codec != Identity():
        raise UsageError(
            f"tuning: pin {tuning.pin!r}: with the codec {codec.name} gradients do not go by all-reduces of their own; "
            "pin a bucket size only"
        )
    model = cost_model_of(communicator)
    has_arena = ARENA in communicator.algorithms("all_reduce")
    pinned_size = tuning.pinned_size
    first = bucket_size_mb if pinned_size is None else pinned_size
    predicted = StepModel(model, sizes, has_arena=has_arena)
    algorithms = _algorithms(tuning, communicator, strategy, codec)
    if model.lane.is_measured and algorithms[0] != ARENA:  # whose cost is built in
        algorithms = tuple(sorted(algorithms, key=lambda name: predicted.predict(Choice(first, name))))
    space = Space(
        bucket_sizes_mb=tuned_sizes(first, tuning.bucket_sizes_mb if pinned_size is None else (), sizes),
        algorithms=algorithms,
        segments=_segments(tuning, codec),
        with_messages=frozenset(name for name in model.candidates("all_reduce") if name != ARENA),
    )
    new_buffers = 2 * sum(sizes(first)) / _WORK_BANDWIDTH
    return Tuner(space, predicted.predict, budget=tuning.budget, switch_seconds=new_buffers), predicted


def _algorithms(
    tuning: TuningConfig, communicator: Communicator, strategy: CommunicationStrategy, codec: AnyCodec
) -> tuple[str, ...]:
    """Return the algorithms to choose from, that of the strategy first."""
    if tuning.pinned_algorithm is not None:
        return (split_segment(tuning.pinned_algorithm)[0],)
    first = algorithm_of(strategy, communicator) or AUTO
    is_open = strategy in (CommunicationStrategy.ALL_REDUCE, CommunicationStrategy.ADAPTIVE)
    if codec != Identity() or not is_open or communicator.is_pinned("all_reduce"):
        return (first,)
    arena = ARENA in communicator.algorithms("all_reduce")
    others = cost_model_of(communicator).candidates("all_reduce", arena=arena)
    return (first, *(name for name in others if name != first))


def _segments(tuning: TuningConfig, codec: AnyCodec) -> tuple[str, ...]:
    if tuning.pinned_algorithm is not None:
        return (tuning.pinned_algorithm.partition("/")[2],)
    return ("", *tuning.segments) if codec == Identity() else ("",)
