"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.nn.half import stored_dtype
from asyncpar.nn.optimizers import Rule
from asyncpar.nn.parameter import Parameter
from asyncpar.zero.buffers import BufferPool
from asyncpar.zero.config import ZeROConfig
from asyncpar.zero.feedback import StepFeedback
from asyncpar.zero.memory import TransientBytes
from asyncpar.zero.partition import Spec, make_partition
from asyncpar.zero.reduction import Means
from asyncpar.zero.row_sum import ReplicaSums, RowSums
from asyncpar.zero.share import Share


def make_means(
    parameters: Sequence[Parameter],
    rule: Rule,
    config: ZeROConfig,
    communicator: Communicator,
    *,
    bytes_held: TransientBytes,
    key: Callable[[], str],
    row_sums: RowSums | None = None,
) -> Means:
    """Divide ``parameters`` over the ranks, and make the states of what this one owns.

    Raises ``UsageError`` for settings that do not go with the parameters or the communicator.
    """
    specs = [
        Spec(name=parameter.name, shape=parameter.shape, dtype=stored_dtype(parameter)) for parameter in parameters
    ]
    _check(specs, config, communicator)
    partition = make_partition(
        specs, communicator.size, bucket_bytes=config.bucket_bytes, most_values=config.reduce_bucket_size
    )
    sums = row_sums or ReplicaSums(communicator, is_compressed=config.gradient_compression, algorithm=config.algorithm)
    keeps_lost = sums.is_lossy and config.error_feedback and communicator.size > 1
    return Means(
        communicator=communicator,
        partition=partition,
        shares=[
            Share(parameter, partition.bounds(index, communicator.rank), rule, config.stage)
            for index, parameter in enumerate(parameters)
        ],
        config=config,
        pool=BufferPool(communicator.empty, reuses=config.pin_memory, bytes_held=bytes_held),
        key=key,
        row_sums=sums,
        feedback=StepFeedback(partition) if keeps_lost else None,
    )


def _check(specs: Sequence[Spec], config: ZeROConfig, communicator: Communicator) -> None:
    if config.gradient_compression:
        for spec in specs:
            if spec.dtype == np.float64:
                raise UsageError(f"gradient_compression: expected float32 or half parameters, got {spec}")
    known = communicator.algorithms("reduce_scatter")
    if config.algorithm is not None and config.algorithm not in known:
        raise UsageError(f"algorithm: expected one of {', '.join(known)}, got {config.algorithm!r}")
