"""Reduction of a bucket's gradients to their owners' means, and gathering of a bucket's values from the owners."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.collectives.communicator import Communicator, agreeing, bucket_span
from asyncpar.core.array_pool import ArrayPool
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.names import ReduceOp
from asyncpar.errors import UsageError
from asyncpar.gradsync.layout import frozen_line
from asyncpar.nn.half import stored_dtype
from asyncpar.nn.optimizers import Rule, all_finite, combined, squared_norm
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.zero.buffers import BufferPool, Loans
from asyncpar.zero.config import ZeROConfig
from asyncpar.zero.memory import TransientBytes
from asyncpar.zero.partition import (
    Partition,
    RowBucket,
    Rows,
    Spec,
    make_partition,
    own_in_row,
    pack_own,
    pack_rows,
    unpack_rows,
    usual_widths,
    values_in_rows,
)
from asyncpar.zero.row_sum import ReplicaSums, RowSum, RowSums, StepFeedback
from asyncpar.zero.share import ParameterShare

_MOST_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Shared settings of reductions and gathers; ``key`` begins the names by which collectives meet.

    ``pool`` lends memory of buckets, ``arrays`` that of gathered values.  ``row_sums`` computes the sums of rows;
    ``feedback`` keeps their errors, None if they are exact.
    """

    communicator: Communicator
    partition: Partition
    shares: Sequence[ParameterShare]
    config: ZeROConfig
    pool: BufferPool
    arrays: ArrayPool
    key: Callable[[], str]
    row_sums: RowSums
    feedback: StepFeedback | None

    @property
    def op(self) -> ReduceOp:
        """The operation by which gradients are reduced."""
        return "mean" if self.config.average else "sum"

    @property
    def frozen(self) -> frozenset[int]:
        """The indices of the currently frozen parameters."""
        return frozenset(index for index, share in enumerate(self.shares) if share.is_frozen)

    @property
    def frozen_detail(self) -> str:
        """Description of frozen parameters, for the fingerprints of reductions; empty if there are none."""
        names = [share.parameter.name for share in self.shares if share.is_frozen]
        if len(names) <= _MOST_NAMES:
            return frozen_line(names) if names else ""
        more = f"{len(names) - _MOST_NAMES} more (checksum {zlib.crc32(' '.join(names).encode()):08x})"
        return frozen_line([*names[:_MOST_NAMES], more])

    def squared_norm(self, without: Collection[str]) -> float:
        """Return the sum of squares of the reduced gradients that this rank owns, except those ``without``."""
        counted = (share for share in self.shares if not share.is_frozen and share.parameter.name not in without)
        return combined(squared_norm(share.own_gradient) for share in counted)

    def overflowed(self) -> list[bool]:
        """Return, for each parameter, whether this rank's part of its reduced gradient is not finite."""
        return [not share.is_frozen and not all_finite(share.own_gradient) for share in self.shares]

    def spoiled(self) -> list[bool]:
        """Return, for each parameter, whether its gradient was not finite on this rank before it was reduced."""
        if self.partition.size == 1:  # a gradient is its own sum
            return self.overflowed()
        return [share.is_spoiled for share in self.shares]

    def names_of(self, marks: Iterable[bool]) -> list[str]:
        """Return the names of the parameters that are marked, in ``marks`` for each."""
        return [share.parameter.name for share, is_marked in zip(self.shares, marks, strict=True) if is_marked]

    def places_of(self, names: Iterable[str] | None) -> list[int]:
        """Return the indices of parameters (None: all), once each, ascending.  Raises ``UsageError`` on other names."""
        place = {share.parameter.name: index for index, share in enumerate(self.shares)}
        chosen = dict.fromkeys(place if names is None else names)
        for name in chosen:
            if name not in place:
                raise UsageError(f"names: expected parameters of this engine, got {name!r}")
        return sorted(place[name] for name in chosen)

    def commit_feedback(self) -> None:
        """Add the encoding errors of this step to the gradients of the next one."""
        if self.feedback is not None:
            self.feedback.commit()

    def forget_gradients(self) -> None:
        """Forget all gradients and their encoding errors."""
        if self.feedback is not None:
            self.feedback.drop()
        for share in self.shares:
            share.zero_grad()


class Contributions:
    """The flat gradients of a round, each kept until all of it is packed; then its memory is reused."""

    def __init__(self, buckets: Iterable[RowBucket]) -> None:
        self._missing = Counter(slot.parameter for bucket in buckets for slot in bucket.slots)
        self._gradients: dict[int, Array | None] = {}
        self._lock = threading.Lock()

    def add(self, index: int, gradient: Array | None) -> None:
        """Add the gradient of a parameter; None stands for zeros."""
        self._gradients[index] = gradient

    def of(self, index: int) -> Array | None:
        """Return the gradient of a parameter that is not fully packed; None stands for zeros."""
        return self._gradients.get(index)

    def packed(self, index: int) -> None:
        """Record that a parameter's place in one bucket is filled.  From any thread."""
        with self._lock:
            self._missing[index] -= 1
            if not self._missing[index]:
                del self._gradients[index]


class BucketReduction:
    """Packs gradients, reduces them and stores the result at its destination.

    ``contributions``, if given, replace the parameters' own gradients.  Ranks take part only if all have the same
    ``detail``.
    """

    def __init__(
        self, bucket: RowBucket, means: Means, contributions: Contributions | None, *, detail: str = ""
    ) -> None:
        self._bucket = bucket
        self._detail = detail
        self._feedback = None if means.feedback is None else means.feedback.of(bucket)
        self._means = means
        self._contributions = contributions
        self._loans = Loans(means.pool)
        self._sum: RowSum | None = None
        self._is_lent = False
        self.owed: list[OwedCollective[Any]] = [OwedCollective(self._begin)]
        if not means.config.stage.shards_states:
            self.owed.append(OwedCollective(self._gather))

    async def run(self) -> None:
        """Reduce the bucket."""
        if self._means.partition.size == 1:
            self._take_alone()
            return
        is_over = False
        nbytes = self._means.partition.bucket_nbytes(self._bucket)
        try:
            with bucket_span(self._means.communicator, self._bucket.index, nbytes, self._means.row_sums.codec_name):
                self._opened()
                await off_loop(self._pack, nbytes=nbytes)
                await self.owed[0].run()
                await off_loop(self._opened().settle, nbytes=nbytes)
                for gather in self.owed[1:]:
                    await gather.run()
                await off_loop(self._unpack, nbytes=nbytes)
            is_over = True
        finally:
            self._close(is_over=is_over)

    def give_up(self) -> None:
        """Abort the reduction of the bucket on all ranks, unless it has begun.  Does not wait."""
        try:
            for owed in self.owed:
                owed.close()
        finally:
            self._close(is_over=False)

    def _begin(self) -> Any:
        opened, key = self._opened(), self._key()
        if not self._detail:
            return opened.begin(key)
        return agreeing(self._means.communicator, self._detail, lambda: opened.begin(key))

    def _opened(self) -> RowSum:
        if self._sum is None:
            means, bucket = self._means, self._bucket
            lent = self._lent_rows()
            self._is_lent = lent is not None
            rows = self._loans.take((means.partition.size, bucket.width), bucket.dtype) if lent is None else lent
            row = self._loans.take((1, bucket.width), bucket.dtype)
            self._sum = means.row_sums.make(rows, row, op=means.op, pool=means.pool, feedback=self._feedback)
        return self._sum

    def _lent_rows(self) -> Rows | None:
        """Return the gradient itself, if it fills the bucket and sums only read it; None: it must be packed."""
        means, bucket = self._means, self._bucket
        if (
            not bucket.slots
            or self._contributions is None
            or not means.row_sums.leaves_rows
            or not means.partition.is_whole(bucket)
        ):
            return None
        gradient = self._contributions.of(bucket.slots[0].parameter)
        if gradient is None or gradient.size != means.partition.size * bucket.width or gradient.dtype != bucket.dtype:
            return None
        return gradient.reshape(means.partition.size, bucket.width)

    def _gather(self) -> Any:
        opened = self._opened()
        return self._means.communicator.all_gather(opened.row[0], out=opened.rows, key=f"{self._key()}/all")

    def _key(self) -> str:
        return f"{self._means.key()}/reduce/{self._bucket.index}"

    def _take_alone(self) -> None:
        """Take a gradient as its own sum, without other replicas."""
        if self._contributions is not None:
            for slot in self._bucket.slots:
                gradient, part = self._gradient(slot.parameter), slice(slot.low, slot.high)
                reduced = np.zeros(slot.high - slot.low, self._bucket.dtype) if gradient is None else gradient[part]
                self._means.shares[slot.parameter].add_reduced(part, reduced)
                self._contributions.packed(slot.parameter)

    def _pack(self) -> None:
        opened, partition = self._opened(), self._means.partition
        for slot in self._bucket.slots:
            if not self._is_lent:
                pack_rows(partition, slot, self._gradient(slot.parameter), opened.rows)
            if self._contributions is not None:
                self._contributions.packed(slot.parameter)
        if not all_finite(opened.rows.reshape(-1)):
            self._find_spoiled(opened.rows)
        opened.prepare()

    def _find_spoiled(self, rows: Rows) -> None:
        """Record the parameters whose gradients are not finite on this rank: their owners see only sums."""
        for slot in self._bucket.slots:
            values = values_in_rows(slot, rows)
            self._means.shares[slot.parameter].is_spoiled |= not all_finite(values.reshape(-1))

    def _gradient(self, index: int) -> Array | None:
        if self._contributions is not None:
            return self._contributions.of(index)
        parameter = self._means.shares[index].parameter
        return parameter.grad.reshape(-1) if parameter.has_grad else None

    def _unpack(self) -> None:
        opened, means = self._opened(), self._means
        if self._feedback is not None:
            self._feedback.store()
        for slot in self._bucket.slots:
            share = means.shares[slot.parameter]
            if not means.config.stage.shards_states:
                unpack_rows(means.partition, slot, opened.rows, share.gradient, ranks=range(means.partition.size))
                continue
            part, reduced = own_in_row(slot, opened.row[0], share.count)
            if means.config.stage.shards_gradients:
                share.add_reduced(part, reduced)
            else:
                share.own_gradient[part] = reduced

    def _close(self, *, is_over: bool) -> None:
        """Release memory; after a failure, memory that others may still read is not reused."""
        if self._sum is not None:
            self._sum.close(is_over=is_over)
        self._loans.close(is_over=is_over)
        self._sum = None


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
    """Divide ``parameters`` over the ranks, and create the states of the part that this one owns.

    Raises ``UsageError`` for settings that do not fit the parameters or the communicator.
    """
    specs = [
        Spec(name=parameter.name, shape=parameter.shape, dtype=stored_dtype(parameter)) for parameter in parameters
    ]
    _check(specs, config, communicator)
    nbytes = sum(spec.count * spec.dtype.itemsize for spec in specs)
    partition = make_partition(
        specs,
        communicator.size,
        bucket_bytes=config.bucket_bytes_of(nbytes),
        most_values=config.reduce_bucket_size,
    )
    sums = row_sums or ReplicaSums(communicator, is_compressed=config.gradient_compression, algorithm=config.algorithm)
    keeps_lost = sums.is_lossy and config.error_feedback and communicator.size > 1
    return Means(
        communicator=communicator,
        partition=partition,
        shares=[
            ParameterShare(parameter, partition.bounds(index, communicator.rank), rule, config.stage)
            for index, parameter in enumerate(parameters)
        ],
        config=config,
        pool=BufferPool(
            communicator.empty,
            reuses=config.pin_memory,
            bytes_held=bytes_held,
            usual=usual_widths(partition, config),
            loans=sums.loans,
        ),
        arrays=bytes_held.arrays,
        key=key,
        row_sums=sums,
        feedback=StepFeedback(partition, np.flatnonzero(sums.senders(partition.size))) if keeps_lost else None,
    )


def _check(specs: Sequence[Spec], config: ZeROConfig, communicator: Communicator) -> None:
    if config.gradient_compression:
        for spec in specs:
            if spec.dtype == np.float64:
                raise UsageError(f"gradient_compression: expected float32 or half parameters, got {spec}")
    known = communicator.algorithms("reduce_scatter")
    if config.algorithm is not None and config.algorithm not in known:
        raise UsageError(f"algorithm: expected one of {', '.join(known)}, got {config.algorithm!r}")


class BucketGather:
    """Gathers the values of one bucket, once.

    ``partition`` is that of ``shares``; the owned values go into ``targets``, the flat values of each parameter.  If
    these have room for padding after them, whole buckets are gathered without a copy.
    """

    def __init__(
        self, bucket: RowBucket, means: Means, partition: Partition, shares: Sequence[ParameterShare], *, key: str
    ) -> None:
        self._bucket = bucket
        self._partition = partition
        self._shares = shares
        self._loans = Loans(means.pool)
        self._communicator = means.communicator
        self._key = key
        self._memory: tuple[Array, Array] | None = None
        self._gather: OwedCollective[Any] = OwedCollective(self._begin)

    async def run(self, targets: Sequence[Array], *, has_own: bool) -> None:
        """Gather the values into ``targets``, which may contain those that this rank owns already."""
        nbytes = self._partition.bucket_nbytes(self._bucket)
        is_over = False
        try:
            self._memory = self._lent_memory(targets)
            if self._memory is None:
                row, rows = self._opened()
                await off_loop(partial(self._pack, row), nbytes=nbytes)
                await self._gather.run()
                await off_loop(partial(self._unpack, rows, targets, has_own), nbytes=nbytes)
            else:
                await self._gather.run()
            is_over = True
        finally:
            self._close(is_over=is_over)

    def give_up(self) -> None:
        """Abort the gather on all ranks, unless it has begun.  Does not wait."""
        try:
            self._gather.close()
        finally:
            self._close(is_over=False)

    def _opened(self) -> tuple[Array, Array]:
        """Return memory for the row of this rank, and for the rows of all."""
        if self._memory is None:
            size, width, dtype = self._partition.size, self._bucket.width, self._bucket.dtype
            self._memory = self._loans.take((width,), dtype), self._loans.take((size, width), dtype)
        return self._memory

    def _lent_memory(self, targets: Sequence[Array]) -> tuple[Array, Array] | None:
        """Return the values themselves as row and rows; None: they must be packed and unpacked."""
        size, width = self._partition.size, self._bucket.width
        if not self._partition.is_whole(self._bucket):
            return None
        index = self._bucket.slots[0].parameter
        own, target = self._shares[index].own_value, targets[index]
        if target.size != size * width or np.may_share_memory(own, target):
            return None
        if own.size < width:
            row = self._loans.take((width,), self._bucket.dtype)
            self._pack(row)
            own = row
        return own, target.reshape(size, width)

    def _begin(self) -> Any:
        row, rows = self._opened()
        return self._communicator.all_gather(row, out=rows, key=f"{self._key}/{self._bucket.index}")

    def _pack(self, row: Array) -> None:
        for slot in self._bucket.slots:
            pack_own(slot, self._shares[slot.parameter].own_value, row)

    def _unpack(self, rows: Array, targets: Sequence[Array], has_own: bool) -> None:
        own = self._communicator.rank if has_own else None
        ranks = [rank for rank in range(self._partition.size) if rank != own]
        for slot in self._bucket.slots:
            unpack_rows(self._partition, slot, rows, targets[slot.parameter], ranks=ranks)

    def _close(self, *, is_over: bool) -> None:
        self._loans.close(is_over=is_over)
        self._memory = None
