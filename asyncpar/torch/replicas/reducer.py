"""Reduction of the gradients of replicas during a backward pass.

Theory of operation.  A hook of each parameter moves the gradient into its bucket.  A bucket whose gradients are all
final is reduced in place, by one all-reduce; buckets begin in the order of the plan, which is the same on all ranks.
The pass ends when all buckets are reduced, and after them the sparse gradients, each in one operation.  Where ranks
must agree on which parameters were used, one all-reduce follows.

So a step is a known sequence of collectives.  A rank that cannot continue takes the places of those that it has not
begun, with the reason (``fail``); they end on the other ranks, and the next step matches again.  Gradients of a failed
step are undefined, since some buckets may be reduced; parameters are not touched.

In the first step ranks also exchange the order in which gradients became final, for the next plan.  A step may fail on
some ranks only (at a timeout, by an interrupt), and those do not learn the order, while the others do.  So nothing but
the contents of the buckets depends on it: each plan has as many buckets, and the exchange, which those that know the
order leave out, has a key of its pass.  The reductions of a rank without the order do not match those of a rank with
it, so the next step ends on all ranks with ``OperationMismatch``, and all of them learn the order again.

``gradsync.GradientSynchronizer`` is not used: it keeps results aside until all buckets of all ranks are reduced, which
costs what this saves.  Its plan of buckets and its tuning are used.  With a ``GradientHook`` the buckets go through its
codecs and error feedback instead of one all-reduce each; a rank that fails begins the remaining ones as refused.  A
hook of torch or of the program handles buckets in its own way (``comm_hook.py``).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncpar.codecs import Identity
from asyncpar.collectives.communicator import recorder_of, step_meter
from asyncpar.core.config.names import AllReduceAlgorithm, ReduceOp
from asyncpar.core.observe.records import EventKind, EventState, bucket_name
from asyncpar.errors import UsageError
from asyncpar.gradsync.tuning import TuningConfig
from asyncpar.torch.hook.bucket import HookBucket
from asyncpar.torch.hook.gradient_hook import GradientHook, gradient_hook
from asyncpar.torch.packed import sparse_all_reduce
from asyncpar.torch.process_group import ProcessGroup
from asyncpar.torch.replicas.backward import PassEnd, Waitable, wait_for_all, weakly
from asyncpar.torch.replicas.buckets import GradientBucket, Replicated, make_buckets, plan
from asyncpar.torch.replicas.comm_hook import CommHook
from asyncpar.torch.replicas.logging_data import LoggingData, PassTimes, describe_parameters, in_a_row
from asyncpar.torch.replicas.tuning import ReplicaTuning
from asyncpar.torch.work import Work

_OPERATION = "all_reduce"
_LEAST = np.iinfo(np.int32).min
"""Less than any value that a rank sends."""

_UNORDERED = "gradients in no agreed order"
"""A detail of reductions until ranks know the order of gradients."""

_AT_ONCE: Any = SimpleNamespace(asyncOp=False, timeout=None)
"""Run in the calling thread where possible, which computes the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerSettings:
    """Settings that are equal on all ranks."""

    bucket_bytes: int
    finds_unused: bool
    is_static: bool
    tuning: TuningConfig | None = None


@dataclass(slots=True)
class _GradientPass:
    """One backward pass that reduces gradients."""

    count: int
    ready: list[bool] = field(init=False)
    calls: list[int] = field(init=False)
    """How often the gradient of each parameter was accumulated."""
    is_shadow: bool = False
    """Whether all gradients are zero because this rank has finished."""
    order: list[int] = field(default_factory=list)
    begun: int = 0
    """The number of buckets begun."""
    has_begun_order: bool = False
    """Whether it has begun exchanging the order of gradients."""
    works: list[Waitable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ready = [False] * self.count
        self.calls = [0] * self.count


class GradientReducer:
    """Averages the gradients of ``replicated`` over ``group``; its hooks live as long as this object."""

    def __init__(self, group: ProcessGroup, replicated: Sequence[Replicated], settings: ReducerSettings) -> None:
        self.group = group
        self.replicated = tuple(replicated)
        self._by_name = {each.name: each for each in replicated}
        self._sparse = [each for each in self.replicated if each.is_sparse]
        self._settings = settings
        self.tuning: ReplicaTuning | None = None
        """Chooses size and algorithm of the buckets, if set."""
        if settings.tuning is not None:
            self.tuning = ReplicaTuning(
                settings.tuning,
                group,
                [each.spec for each in self.replicated if not each.is_sparse],
                bucket_bytes=settings.bucket_bytes,
                plan_bytes=partial(_bytes_of_buckets, self.replicated),
            )
        self._order: list[str] | None = None
        """The order of gradients that buckets follow, once it is known."""
        self._plan = self._made = plan(replicated, self._bucket_bytes)
        """The plan of the next pass, equal on all ranks, and the plan of the current buckets."""
        self._adopt(self._make_buckets())
        self._first_sizes = self.bucket_sizes
        self.times = PassTimes()
        self._last_order: list[int] = []
        """Parameters in the order in which their gradients became final in the last pass."""
        self._last_absent: Sequence[int] = ()
        """Parameters without a gradient on this rank in that pass."""
        self.hook: GradientHook | None = None
        """Reduces the buckets through a codec, if set."""
        self.comm_hook: CommHook | None = None
        """Reduces the buckets by a hook of torch or the program, if set."""
        self.is_on = False
        """Whether backward passes reduce gradients; otherwise they accumulate on this rank."""
        self._source = 0
        """The rank whose order of gradients counts."""
        self._factor = 1.0
        """The factor of means over all ranks."""
        self._used = np.zeros(len(self.replicated), np.bool_)
        """Parameters with gradients on this rank since the last step."""
        self._expected: list[int] | None = None
        """With a static graph: how often each gradient is accumulated in a pass, once known."""
        self._has_order = False
        self.name = ""
        """The name of this reducer, equal on all ranks and unique in the group."""
        self._pass: _GradientPass | None = None
        self._end: weakref.ref[PassEnd] | None = None
        self._failed: list[Waitable] = []
        """Operations of passes that failed here, which may still be in progress."""
        self._recorder = recorder_of(group.communicator)
        self._meter = step_meter(group.communicator, "DistributedDataParallel")
        self._passes = 0
        take = weakly(self.on_gradient)
        handles = [
            each.parameter.register_post_accumulate_grad_hook(lambda _, index=index: take(index))
            for index, each in enumerate(self.replicated)
        ]
        self._finalizers = [weakref.finalize(self, handle.remove) for handle in handles]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    def reduces(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether these are the parameters whose gradients are reduced."""
        return len(parameters) == len(self.replicated) and all(
            one is each.parameter for one, each in zip(parameters, self.replicated, strict=True)
        )

    def release(self) -> None:
        """Detach from the parameters, which belong to another reducer or to none."""
        self.await_failed()
        for finalizer in self._finalizers:
            finalizer()

    @property
    def bucket_sizes(self) -> list[int]:
        """Bytes of the buckets, in the order in which they are reduced."""
        return [bucket.array.nbytes for bucket in self._buckets]

    def describe(self) -> LoggingData:
        """Return settings, buckets and times under torch's names."""
        settings, parameters = self._settings, [each.parameter for each in self.replicated]
        found: LoggingData = {
            "bucket_cap_bytes": settings.bucket_bytes,
            "bucket_sizes": in_a_row(self._first_sizes),
            "find_unused_parameters": int(settings.finds_unused),
            "gradient_as_bucket_view": 1,
            "iteration": self.times.passes,
            **describe_parameters(parameters),
        }
        if settings.is_static:
            found["static_graph"] = 1
        hook = self.comm_hook or self.hook
        if hook is not None:
            found["comm_hook"] = gradient_hook.__qualname__ if self.comm_hook is None else self.comm_hook.name
        if not self.times.passes:
            return found
        indices = (" ".join(str(each.index) for each in bucket.members) for bucket in self._buckets)
        return found | {
            **self.times.describe(),
            "has_rebuilt_buckets": int(self._has_order),
            "num_buckets_reduced": len(self._buckets),
            "prev_iteration_grad_ready_order_indices": in_a_row(self._last_order),
            "rebuilt_bucket_sizes": in_a_row(self.bucket_sizes),
            "rebuilt_per_bucket_param_indices": in_a_row(indices),
            "unused_parameter_size": sum(parameters[index].nbytes for index in self._last_absent),
        }

    def use(self, hook: GradientHook, *, is_own: bool = False) -> None:
        """Reduce the buckets through ``hook`` from now on; ``is_own``: another reducer of the model already has it.

        Raises ``UsageError`` if buckets are tuned.
        """
        self._check_not_tuned()
        for each in self.replicated:
            if each.dtype.is_complex:
                raise UsageError(f"codec: expected none for complex gradients, such as {each.name}, got {hook}")
        hook.own(weakly(self.await_failed), again=is_own)
        self.hook = hook

    def use_comm_hook(self, hook: CommHook) -> None:
        """Reduce the buckets by ``hook`` from now on.

        Raises ``UsageError`` if buckets are tuned, and if gradients are sparse, which have no bucket.
        """
        self._check_not_tuned()
        if self._sparse:
            raise UsageError(
                f"{hook}: expected dense gradients, got sparse ones of {self._sparse[0].name}; use "
                "Embedding(sparse=False), no hook, or torch's DistributedDataParallel"
            )
        self.comm_hook = hook

    def _check_not_tuned(self) -> None:
        if self.tuning is not None:
            raise UsageError("tuning: expected no codec and no communication hook with it; leave one of them out")

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Detect the beginning of a backward pass through ``tensors``, outputs of the module."""
        enter = weakly(self.enter)
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: enter())

    def adopt_plan(self) -> None:
        """Rebuild the buckets if their order or size is to change; gradients keep their values."""
        if self._plan.buckets != self._made.buckets:
            self.await_failed()
            self._adopt(self._make_buckets())
        self._made = self._plan

    def set_turn(self, *, source: int, factor: float) -> None:
        """Use from now on the order of gradients on rank ``source``, and the mean over all ranks times ``factor``."""
        self._source = source
        self._factor = factor

    def shadow(self) -> None:
        """Take part in a step of other ranks with zero gradients; gradients become the mean, as on the others."""
        self.await_failed()
        now = self._begin_pass()
        now.is_shadow = True
        self._used[:] = False
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing = 0
        self._complete(now, range(len(self.replicated)))

    def fail(self, error: BaseException, *, taken: int = 0) -> None:
        """End the rest of this rank's step on all ranks, with the reason ``error``.

        ``taken`` places of operations that reduce buckets or exchange figures were taken by others.
        """
        done, self._pass = self._pass, None
        self._end = None
        self._passes += done is None  # the others have one
        self._meter.end(EventState.FAILED)
        begun = 0
        if done is not None:
            begun = done.begun
            self._failed += done.works
            done.works = []
        self._used[:] = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)
        if self.comm_hook is not None:
            if done is None:
                self.comm_hook.begin_pass()
            owed = self.comm_hook.fail(len(self._plan.buckets)) + self._settings.finds_unused
        elif self.hook is None:
            has_figures = self.tuning is not None and self.tuning.exchanges_figures(self._passes)
            owed = len(self._plan.buckets) - begun + len(self._sparse) + self._settings.finds_unused + has_figures
        else:
            owed = len(self._sparse) + self._settings.finds_unused
            self._refuse_buckets(self.hook, begun + taken, error)
            taken = max(0, begun + taken - len(self._plan.buckets))
        for _ in range(owed - taken):
            self._refuse(error)
        self._lose_pass(error, owes_order=done is None or not done.has_begun_order)

    # -- in a backward pass ------------------------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Handle the gradient of parameter ``index``, which autograd has accumulated."""
        self._used[index] = True
        bucket = self._bucket_of[index]
        if not self.is_on:
            if bucket is not None:
                bucket.take(self.replicated[index])
            return
        self.enter()
        try:
            now = self._pass
            if now is None:
                self.await_failed()
                self.adopt_plan()
                bucket = self._bucket_of[index]
                now = self._begin_pass()
                self._meter.works()
                self.times.backward_begins()
            if bucket is not None:
                bucket.take(self.replicated[index])
            if self._is_final(now, index):
                self._set_ready(now, index, bucket)
        except BaseException as error:
            self.fail(error)
            raise

    def enter(self) -> None:
        """Register for the end of this pass, unless done already."""
        if self.is_on and (self._end is None or self._end() is None):
            self._end = weakref.ref(PassEnd(weakly(self.end), weakly(self.lose)))

    def end(self) -> None:
        """Complete the step: reduce the rest, and wait for all of it."""
        now = self._pass
        self._end = None
        if now is None:
            return
        try:
            absent = self._absent(now)
            for index in absent:
                bucket = self._bucket_of[index]
                if bucket is not None:
                    bucket.fill_in(self.replicated[index])
                    bucket.missing -= 1
        except BaseException as error:
            self.fail(error)
            raise
        self._complete(now, absent)

    def _complete(self, now: _GradientPass, absent: Sequence[int]) -> None:
        """Reduce the rest, with all gradients in their places; ``absent`` had none in this pass."""
        self.times.is_computed()
        try:
            for each in self._sparse:
                each.check_sparse()
            if self.comm_hook is not None:
                self._meter.waits()
            self._begin_full(now, is_last=True)
            if self.comm_hook is not None:
                self.comm_hook.finish(is_last=True)
            sums = [self._begin_sparse(now, each) for each in self._sparse]
            use = self._begin_use(now) if self._settings.finds_unused else None
            order = None if self._has_order else self._begin_order(now, absent)
            figures = self._begin_figures(now)
        except BaseException as error:
            self.fail(error)
            raise
        self._pass = None
        for begun in self._buckets:
            begun.missing = len(begun.members)
        self._meter.waits()
        if self.tuning is not None:
            self.tuning.all_final()
        waited = time.perf_counter()
        try:
            wait_for_all(now.works)
        except BaseException as error:
            self._meter.end(EventState.FAILED)
            self._lose_pass(error, owes_order=not now.has_begun_order)
            raise
        self._meter.end()
        self.times.is_over()
        self._last_order, self._last_absent = now.order, absent
        self._tune(figures)
        if self.hook is not None:
            self.hook.add_wait(time.perf_counter() - waited)
        used = self._expected_use() if now.is_shadow else self._used
        if order is not None:
            used = self._learn(order)
        if use is not None:
            used = use
        self._hand_out(absent, used, sums)
        self._used[:] = False

    def lose(self) -> None:
        """Notify the other ranks that an exception has ended the pass."""
        if self._end is not None:  # it has not failed here before
            self.fail(UsageError("an exception has ended the backward pass of this rank; see its traceback there"))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _hand_out(self, absent: Sequence[int], used: NDArray[Any], sums: Sequence[torch.Tensor]) -> None:
        """Make the means the gradients of the parameters; those ``absent`` here get one if they were ``used``."""
        if self._factor != 1.0 and self.comm_hook is None:
            for reduced in [*(bucket.flat for bucket in self._buckets), *sums]:
                reduced.mul_(self._factor)
        for index in absent:
            bucket = self._bucket_of[index]
            if used[index] and bucket is not None:
                self.replicated[index].parameter.grad = bucket.views[index]
        is_absent = {*absent}
        for each, total in zip(self._sparse, sums, strict=True):
            if used[each.index] or each.index not in is_absent:
                each.parameter.grad = total

    def _begin_pass(self) -> _GradientPass:
        self._passes += 1
        self._meter.begin(self._passes)
        self._pass = _GradientPass(len(self.replicated))
        if self.comm_hook is not None:
            self.comm_hook.begin_pass()
        return self._pass

    @property
    def _bucket_bytes(self) -> int:
        return self._settings.bucket_bytes if self.tuning is None else self.tuning.bucket_bytes

    def _begin_figures(self, now: _GradientPass) -> NDArray[Any] | None:
        """Start exchanging the figures of the previous pass, if it was measured; return the array for those of all."""
        if self.tuning is None or not self.tuning.exchanges_figures(self._passes):
            return None
        communicator, own = self.group.communicator, self.tuning.own_message()
        figures = np.zeros((communicator.size, own.size))
        now.works.append(
            self.group.start(
                lambda: communicator.all_gather(own, out=figures), (), operation="all_gather", options=_AT_ONCE
            )
        )
        return figures

    def _tune(self, figures: NDArray[Any] | None) -> None:
        """Process the figures that ranks exchanged in the finished pass, or measure the pass."""
        if self.tuning is None:
            return
        if figures is None:
            self.tuning.measure()
            return
        self.tuning.receive(figures)
        self._replan()

    def _forget_tuning(self) -> None:
        if self.tuning is not None:
            with suppress(UsageError):  # the loop has ended
                self.tuning.forget()
            self._replan()

    def _replan(self) -> None:
        """Plan the buckets of the next pass by the knowledge common to all ranks."""
        self._plan = plan(self.replicated, self._bucket_bytes, self._order)

    def _make_buckets(self) -> list[GradientBucket]:
        return make_buckets(self._plan, self.replicated, self.group.communicator, self.group.thread)

    def _adopt(self, buckets: list[GradientBucket]) -> None:
        """Use ``buckets`` from now on."""
        self._buckets = buckets
        self._bucket_of: list[GradientBucket | None] = [None] * len(self.replicated)
        for bucket in buckets:
            for member in bucket.members:
                self._bucket_of[member.index] = bucket
                if member.parameter.grad is not None:
                    bucket.take(member)

    @property
    def _detail(self) -> str:
        """A detail of the reductions of this pass, which differs between ranks with and without the order."""
        return "" if self._has_order else _UNORDERED

    @property
    def _order_key(self) -> str:
        """The key under which ranks exchange the order of this pass."""
        return f"{self.name}/order/{self._passes}"

    @property
    def _is_recording(self) -> bool:
        """Whether this is the first step of a static graph."""
        return self._settings.is_static and self._expected is None

    def _expected_use(self) -> NDArray[Any]:
        """Return the parameters that other ranks use in each step, where ranks do not exchange that."""
        if self._expected is None:
            return np.ones(len(self.replicated), np.bool_)
        return np.array(self._expected) > 0

    def _is_final(self, now: _GradientPass, index: int) -> bool:
        """Return whether the gradient that was just accumulated is final."""
        now.calls[index] += 1
        if self._settings.is_static:
            return now.calls[index] == (1 if self._expected is None else self._expected[index])
        if now.ready[index]:
            raise UsageError(
                f"parameter {self.replicated[index].name}: expected one gradient in a backward pass, got another; "
                "pass static_graph=True to DistributedDataParallel where checkpointing computes parts of it again"
            )
        return True

    def _set_ready(self, now: _GradientPass, index: int, bucket: GradientBucket | None) -> None:
        now.ready[index] = True
        now.order.append(index)
        if bucket is not None:
            bucket.missing -= 1
            if not bucket.missing and not self._is_recording:
                self._begin_full(now)

    def _begin_full(self, now: _GradientPass, *, is_last: bool = False) -> None:
        """Start the buckets whose turn it is and whose gradients are complete.

        The last one begins at the end of the pass, after its last gradient; so whatever ends a pass before that, such
        as a hook of the program, leaves a bucket by which the other ranks are notified.
        """
        buckets = self._buckets
        turns = len(buckets) if is_last else len(buckets) - 1
        while now.begun < turns and not buckets[now.begun].missing:
            bucket = buckets[now.begun]
            if not now.begun:
                self.times.first_bucket_begins()
            if self.comm_hook is not None:
                if not (is_last or self.comm_hook.is_free):
                    return
                index = now.begun
                with self.group.agreeing(self._detail):
                    work = self.comm_hook.start(bucket, index=index, is_last=index == len(buckets) - 1)
                now.works.append(work)
            elif self.hook is None:
                now.works.append(self._begin_bucket(now.begun, bucket))
            else:
                with self.group.agreeing(self._detail):
                    work = self.hook.start(self._given(now.begun, bucket.flat))
                now.works.append(work)
            now.begun += 1
        assert not is_last or now.begun == len(buckets), "all gradients are there"

    def _begin_sparse(self, now: _GradientPass, member: Replicated) -> torch.Tensor:
        """Start averaging a sparse gradient; return the tensor of the mean."""
        share = member.sparse_share(self.group.size(), is_zero=now.is_shadow)
        make = sparse_all_reduce(self.group.communicator, share, "sum")
        now.works.append(self.group.start(make, [share], operation=_OPERATION, options=_AT_ONCE, detail=self._detail))
        return share

    def _begin_bucket(self, index: int, bucket: GradientBucket) -> Work:
        recorder = self._recorder
        name = recorder.name(bucket_name(index, Identity.name))
        ticket = recorder.begin(EventKind.BUCKET, name, nbytes=bucket.array.nbytes)
        try:
            algorithm = None if self.tuning is None else self.tuning.algorithm
            work = self._begin(bucket.array, "mean", [bucket.flat], algorithm=algorithm)
        except BaseException:
            recorder.end(ticket, EventState.FAILED)
            raise
        work.when_over(lambda error: recorder.end(ticket, EventState.COMPLETED if error is None else EventState.FAILED))
        return work

    def _begin(
        self,
        array: NDArray[Any],
        op: ReduceOp,
        tensors: Sequence[torch.Tensor],
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
    ) -> Work:
        communicator = self.group.communicator
        return self.group.start(
            lambda: communicator.all_reduce(array, op, algorithm=algorithm, key=key),
            tensors,
            operation=_OPERATION,
            options=_AT_ONCE,
            detail=self._detail,
        )

    def _given(self, index: int, buffer: torch.Tensor, refusal: BaseException | None = None) -> HookBucket:
        """Return bucket ``index`` of the plan, for the hook."""
        return HookBucket(
            index=index,
            is_last=index == len(self._plan.buckets) - 1,
            buffer=buffer,
            parameters=tuple(each.parameter for each in self._members(index)),
            refusal=refusal,
        )

    def _members(self, index: int) -> list[Replicated]:
        return [self._by_name[slot.name] for slot in self._plan.buckets[index].slots]

    def _refuse_buckets(self, hook: GradientHook, begun: int, error: BaseException) -> None:
        """End the buckets on all ranks that this one has not begun; the ranks agree on them first, if they must."""
        if not begun:
            self.await_failed()
        for index in range(begun, len(self._plan.buckets)):
            buffer = torch.empty(self._plan.buckets[index].count, dtype=self._members(index)[0].dtype)
            with suppress(UsageError), self.group.agreeing(self._detail):  # UsageError: the group or the loop has ended
                self._failed.append(hook.start(self._given(index, buffer, error)))

    def _absent(self, now: _GradientPass) -> list[int]:
        """Return the parameters without a final gradient.  Raises ``UsageError`` if all must have one."""
        absent = [index for index, is_ready in enumerate(now.ready) if not is_ready]
        if self._is_recording or not absent:
            return absent
        if self._expected is None:
            if self._settings.finds_unused:
                return absent
            name = self.replicated[absent[0]].name
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise UsageError(
                f"parameter {name}{more}: expected a gradient in each backward pass, got none; pass "
                "find_unused_parameters=True to DistributedDataParallel, or use it in forward on every rank"
            )
        odd = [index for index in absent if self._expected[index]]
        if odd:
            raise UsageError(
                f"parameter {self.replicated[odd[0]].name}: expected {self._expected[odd[0]]} gradients, as in the "
                f"first step, got {now.calls[odd[0]]}; the graph changes, so pass static_graph=False"
            )
        return absent

    def _begin_use(self, now: _GradientPass) -> NDArray[Any]:
        """Start exchanging which parameters were used; return the array for those used on some rank."""
        use = self._used.astype(np.int32)
        now.works.append(self._begin(use, "max", []))
        return use

    def _begin_order(self, now: _GradientPass, absent: Sequence[int]) -> NDArray[Any]:
        """Start exchanging the use of parameters, and the order and numbers of gradients, in four parts of an array."""
        count = len(self.replicated)
        message = np.zeros(4 * count, np.int32)
        message[:count] = self._used
        if self.group.communicator.rank == self._source:
            message[count : 2 * count] = [*now.order, *absent]
        message[2 * count : 3 * count] = _LEAST if now.is_shadow else now.calls
        message[3 * count :] = _LEAST if now.is_shadow else np.negative(now.calls)
        now.works.append(self._begin(message, "max", [], key=self._order_key))
        now.has_begun_order = True
        return message

    def _learn(self, message: NDArray[Any]) -> NDArray[Any]:
        """Process the agreement of the ranks; return the parameters that were used on some rank."""
        count = len(self.replicated)
        order, most, least = message[count : 2 * count], message[2 * count : 3 * count], -message[3 * count :]
        if self._settings.is_static:
            odd = np.flatnonzero(most != least)
            if len(odd):
                raise UsageError(
                    f"parameter {self.replicated[odd[0]].name}: expected as many gradients on all ranks, got "
                    f"{least[odd[0]]} to {most[odd[0]]}; pass static_graph=False where ranks differ"
                )
            self._expected = most.tolist()
        self._has_order = True
        self._order = [self.replicated[index].name for index in order]
        self._replan()
        self._describe_again()
        return message[:count]

    def _lose_pass(self, error: BaseException, *, owes_order: bool) -> None:
        """Return to what all ranks know, after ``error`` has ended a pass here.

        With ``owes_order`` this rank has not exchanged the order of the pass, for which others may wait.
        """
        self._forget_tuning()
        if owes_order:
            self._refuse(error, key=self._order_key)
        if self._has_order and _UNORDERED in str(error):  # of ``OperationMismatch``, perhaps by a future of torch
            error.add_note("An earlier step has failed on some of the ranks only; the next one works on all of them.")
            self._has_order = False
            self._order = self._expected = None
            self._replan()
        if not self._has_order:
            self._describe_again()

    def _refuse(self, error: BaseException, *, key: str | None = None) -> None:
        """End on the other ranks one operation that this one does not begin."""
        if isinstance(error, dist.DistBackendError):  # for it ``group.refuse`` takes no place, as it did so before
            error = UsageError(str(error))
        communicator = self.group.communicator
        self.group.refuse(_OPERATION, error, lambda: communicator.refuse(_OPERATION, error, key=key))

    def _describe_again(self) -> None:
        """Make ranks with a codec agree on all buckets of the next pass, whether or not they have changed."""
        if self.hook is not None:
            self.hook.describe_again()

    def await_failed(self) -> None:
        """Wait for operations of a failed pass, whose errors were raised then."""
        left, self._failed = self._failed, []
        for work in left:
            with suppress(Exception):
                work.wait()


def _bytes_of_buckets(replicated: Sequence[Replicated], bucket_bytes: int) -> tuple[int, ...]:
    return tuple(bucket.nbytes for bucket in plan(replicated, bucket_bytes).buckets)
