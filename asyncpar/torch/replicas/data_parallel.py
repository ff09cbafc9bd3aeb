"""DistributedDataParallel without copies in and out of buckets.

model = asyncpar.torch.DistributedDataParallel(module)      # in place of torch.nn.parallel.DistributedDataParallel
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.utils._pytree import tree_leaves

from asyncpar.codecs import AnyCodec
from asyncpar.core.config.names import CodecChoice
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync.tuning import TuningConfig, TuningOutcome
from asyncpar.torch.errors import as_torch
from asyncpar.torch.hook.gradient_hook import GradientHook, gradient_hook
from asyncpar.torch.instrumentation import not_traced, stepped_over
from asyncpar.torch.process_group import ProcessGroup, own_group
from asyncpar.torch.replicas.comm_hook import CommHook
from asyncpar.torch.replicas.copies import copy_from, refuse_copies
from asyncpar.torch.replicas.joining import ForwardTurn, OwnGradients, ReplicaJoinHook, agree_on_turn, find_last
from asyncpar.torch.replicas.logging_data import LoggingData, describe_place
from asyncpar.torch.replicas.offer import NAME, ReducerOffer, find_bucket_bytes
from asyncpar.torch.replicas.reducer import GradientReducer, ReducerSettings
from asyncpar.torch.replicas.replicated_module import ReplicatedModule
from asyncpar.torch.replicas.tuning import ReplicaTuning

_TorchReplicas = torch.nn.parallel.DistributedDataParallel

_OWN = frozenset({"process_group", "_reducer", "_replicas", "_own_gradients"})
"""Attributes that copies do not share."""

_CHANGED = "as other parameters require gradients now"


class DistributedDataParallel(torch.nn.Module, Joinable):
    """``module`` on all ranks of a group, whose gradients are averaged over ranks during ``backward``.

    For modules in the CPU's memory, with the arguments, the semantics and the ``state_dict`` of torch's class of this
    name.  Gradients are views of buckets in memory that the ranks of a host share: they are reduced in place, and the
    optimizer reads them there.  After ``zero_grad(set_to_none=True)`` the next backward restores the views.

    Parameters and buffers are compared over ranks and then copied from rank 0.  ``bucket_cap_mb`` (MiB) bounds a
    bucket.  If it is None, the bound is 256 where all ranks share memory and have less than two cores each, since
    nothing can be reduced concurrently with backward there, and 25 elsewhere and with ``tuning``.  The first bucket
    holds 1 MiB, and after the first step buckets follow the order in which gradients became final in it on rank 0.
    With ``find_unused_parameters`` each backward may leave parameters out, which then count as zero on this rank; those
    that no rank has used keep their current gradient.  ``static_graph`` promises that all backward passes are alike:
    parameters that the first one leaves out are never waited for, and checkpointing may accumulate gradients several
    times.  ``broadcast_buffers`` copies buffers from rank 0 before each forward that follows one with reduction.

    The last forward before a backward decides whether it reduces: inside ``no_sync()`` it does not.  An error on one
    rank in forward or backward is raised there, and as ``PeerCancelled`` with the reason on the others; parameters and
    optimizer are unchanged then, and gradients undefined: zero them.

    ``codec`` compresses gradients with error feedback (``int8``, ``powersgd:4`` and the others of ``GradientHook``);
    ``register_comm_hook`` has more settings.  The compressor is ``gradient_hook``, with statistics and a state dict.

    With ``tuning`` ranks search for the fastest bucket size, algorithm and message size during training (see
    ``TuningConfig`` of ``asyncpar.gradsync``), beginning with ``bucket_cap_mb``; not together with a codec.  Sums may
    then differ in their last bits from step to step and from run to run, but never between ranks.

    If ``process_group`` is None, it is the default one; with ``init_sync`` all ranks begin with the parameters of the
    first one, and with its buffers unless ``broadcast_buffers`` is False.

    Parameters may begin or cease to require gradients between steps, on all ranks alike; while none does, nothing is
    reduced.  Parameters and buffers named by ``_set_params_and_buffers_to_ignore_for_model`` are each rank's own.
    Copies, including those of ``torch.save``, train on the same ranks; a codec starts afresh in them.  Only models of
    the default group can be saved.

    Other arguments of torch's class are accepted by their names and positions.  ``forward_sync_buffers`` is its new
    name of ``broadcast_buffers``.  The rest have one value, and ``UsageError`` suggests an alternative to any other:
    None for ``device_ids``, ``output_device``, ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``,
    ``mixed_precision``, ``device_mesh`` and ``bucket_cap_mb_list``, 0 for ``dim``, False for ``check_reduction``,
    ``skip_all_reduce_unused_params`` and ``batched_grad_copy``, True for ``gradient_as_bucket_view``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[object] | None = None,
        output_device: object = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: object = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        codec: CodecChoice | AnyCodec = "none",
        tuning: TuningConfig | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ONLY_VALUES}
        super().__init__()
        Joinable.__init__(self)
        if forward_sync_buffers is not None:
            broadcast_buffers = forward_sync_buffers
        group = own_group(process_group, NAME)
        self.module = module
        self.process_group = group
        self.require_backward_grad_sync = True
        self._copies_buffers = broadcast_buffers is not False
        self._is_copy_due = True
        """Whether the buffers of the next forward come from rank 0."""
        self._turn = 0, 1.0
        """The rank whose order of gradients counts, and the factor of means over all ranks."""
        self._own_gradients: OwnGradients | None = None
        """The gradients of the last step of this rank, once it has finished before others."""
        self._has_joined = False
        """Whether there has been a ``Join``."""
        self._divides_by_initial = True
        """Whether gradients are divided by the number of all ranks, even if some have finished."""

        self._reducer: GradientReducer | None = None
        """The reducer; None in a copy that has not trained."""
        self._codec = codec

        def make() -> tuple[GradientReducer, list[str]]:
            check_only_values(given)
            self._settings = ReducerSettings(
                bucket_bytes=find_bucket_bytes(bucket_cap_mb, group, tuning),
                finds_unused=find_unused_parameters,
                is_static=static_graph,
                tuning=_checked_tuning(tuning),
            )
            self._replicas = ReplicatedModule(module)
            return self._make_reducer()

        offer = ReducerOffer(make)
        offer.exchange(group)
        self._reducer = offer.take()
        if init_sync:
            self._copy_all(0)

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        _TorchReplicas._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(_TorchReplicas._get_data_parallel_params)

    @stepped_over
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        turn = self._begin_forward()
        try:
            outputs = _run(self.module, *inputs, **kwargs)
        except BaseException as error:
            self._break_off(turn, error, ())
            raise
        self._end_forward(turn, outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward passes of forwards in this block accumulate gradients on this rank, without reduction."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches, like that of torch's class.

        A rank that leaves the block continues with zero gradients until all ranks have left it; then all have the
        parameters of a rank that was last, and each the gradients of its own last step.  Gradients are divided by the
        number of all ranks, or without ``divide_by_initial_world_size`` by the number of those in the block.  With
        ``throw_on_early_termination`` all ranks raise ``RuntimeError`` when the first has left.
        ``Join([model, optimizer])`` does it for several.  Without ``enable`` it does nothing.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that ``Join`` calls on ranks that have finished."""
        self._has_joined, self._own_gradients = True, None
        self._divides_by_initial = bool(kwargs.get("divide_by_initial_world_size", True))
        return ReplicaJoinHook(self._shadow, self._end_join)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that ``Join`` itself exchanges."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that ``Join`` itself uses."""
        return self.process_group

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Reduce gradients from now on by ``hook(state, bucket)``, on all ranks alike, like torch's class.

        With ``gradient_hook`` they go through ``state``, a ``GradientHook`` of this model alone.  Other hooks, those of
        torch (``torch.distributed.algorithms.ddp_comm_hooks``) or the program's, return a ``Future`` of the tensor that
        replaces ``bucket.buffer()``.  They are called for one bucket after the other, each when the future of the
        previous one is done.  Errors in them become a ``RuntimeError`` with the text of the error, since futures do not
        keep its type.
        """
        try:
            if hook is gradient_hook:
                _register(self._made(), state)
            else:
                self._use_comm_hook(CommHook(state, hook, self.process_group))
        except AsyncparError as error:
            raise as_torch(error, "register_comm_hook") from None

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        """Reduce gradients from now on like torch's hook of this type."""
        try:
            self._use_comm_hook(CommHook.builtin(comm_hook_type, self.process_group))
        except AsyncparError as error:
            raise as_torch(error, "_register_builtin_comm_hook") from None

    _register_fused_optim = _TorchReplicas._register_fused_optim

    def _get_ddp_logging_data(self) -> LoggingData:
        """Return settings, buckets and times of passes under the names of torch's class.

        Times are in nanoseconds; ``avg_*`` are means of all passes that reduced gradients, of which torch's class takes
        samples.  ``iteration`` is their number.
        """
        group, reducer = self.process_group, self._reducer
        found: LoggingData = {
            "backend_name": group.getBackendName(),
            "broadcast_buffers": int(self._copies_buffers),
            "device_ids": "",
            "has_sync_bn": int(any(isinstance(part, torch.nn.SyncBatchNorm) for part in self.module.modules())),
            "is_multi_device_module": 0,
            "module_name": type(self.module).__name__,
            "output_device": -1,
            "rank": group.rank(),
            "world_size": group.size(),
            **describe_place(),
        }
        if self._has_joined:
            found["join_uneven_inputs"] = 1
        return found if reducer is None else found | reducer.describe()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing, since all times are kept.  Raises ``UsageError`` for values that torch's class refuses."""
        if sample_rate < 1:
            raise UsageError(f"sample_rate: expected 1 or more, got {sample_rate}")

    @property
    def gradient_hook(self) -> GradientHook | None:
        """The compressor of gradients: its ``statistics``, and the ``state_dict`` of error feedback on this rank."""
        return None if self._reducer is None else self._reducer.hook

    def tuning_outcome(self) -> TuningOutcome | None:
        """Return the best choice so far, as a pin for ``tuning``, and the cost of the search; None without tuning."""
        return None if self._tuning is None else self._tuning.outcome

    def tuning_table(self) -> str:
        """Return the trials, the waits of steps with them, and the cost; empty without ``tuning``."""
        return "" if self._tuning is None else self._tuning.table()

    @property
    def bucket_sizes(self) -> list[int]:
        """Bytes of the buckets, in the order in which they are reduced."""
        return [] if self._reducer is None else self._reducer.bucket_sizes

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise UsageError(
                f"{NAME}: expected the default process group in a model that is saved, as no other has a name for who "
                "loads it; save its module, or its state_dict()"
            )
        return self._kept()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, own_group(None, NAME))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        found = type(self).__new__(type(self))
        memo[id(self)] = found
        found._restore(copy.deepcopy(self._kept(), memo), self.process_group)
        return found

    def _kept(self) -> dict[str, Any]:
        """Return the attributes that are copied, too."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    def _restore(self, state: dict[str, Any], group: ProcessGroup) -> None:
        super().__setstate__(state)
        self.process_group = group
        self._reducer = self._own_gradients = None
        self._replicas = ReplicatedModule(self.module)

    @property
    def _current(self) -> GradientReducer:
        assert self._reducer is not None, "made before what uses it"
        return self._reducer

    @property
    def _tuning(self) -> ReplicaTuning | None:
        return None if self._reducer is None else self._reducer.tuning

    def _made(self) -> GradientReducer:
        """Return the reducer; a copy makes its own now."""
        if self._reducer is None:
            self._renew(ForwardTurn(reduces=True, copies=False), ())
        return self._current

    def _use_comm_hook(self, hook: CommHook) -> None:
        reducer = self._made()
        _check_has_no_hook(reducer)
        reducer.use_comm_hook(hook)

    def _copy_all(self, source: int) -> None:
        """Copy the replicated state from ``source``."""
        buffers = self._replicas.buffers() if self._copies_buffers else []
        copy_from(source, [*self._replicas.parameters(), *buffers], self.process_group)

    def _make_reducer(self) -> tuple[GradientReducer, list[str]]:
        """Return a reducer for the parameters that require gradients now, and the lines that all ranks must share."""
        reducer = GradientReducer(self.process_group, self._replicas.members(), self._settings)
        try:
            hook, comm_hook = self.gradient_hook, None if self._reducer is None else self._reducer.comm_hook
            if comm_hook is not None:
                reducer.use_comm_hook(comm_hook)
            if hook is not None:
                reducer.use(hook, is_own=True)
            else:
                hook = GradientHook(
                    codec=self._codec, group=self.process_group, parameters=self.module.named_parameters()
                )
                if not hook.is_lossless:
                    _register(reducer, hook)
        except BaseException:
            reducer.release()
            raise
        settings = [f"{self._settings}", f"{hook}", f"{comm_hook}"]
        return reducer, [*settings, *self._replicas.lines(has_buffers=self._copies_buffers)]

    def _renew(self, turn: ForwardTurn, owed: Sequence[torch.Tensor]) -> None:
        """Make a reducer for the parameters that currently require gradients, together with all ranks."""
        before = self._reducer
        offer = ReducerOffer(self._make_reducer)
        try:
            try:
                offer.exchange(self.process_group, _CHANGED)
            except BaseException as error:  # others have not come, but have begun the turn
                self._break_off(turn, error, owed, taken=1)
                raise
            self._reducer = offer.take()
        except BaseException:
            if before is not None and before.hook is not None:
                before.use(before.hook, is_own=True)
            raise
        if before is not None:
            before.release()

    def _agree_on_turn(self, own: ForwardTurn | None) -> ForwardTurn:
        """Return the turn of the ranks that have not finished, under ``Join``."""
        turn = agree_on_turn(self.process_group, own)
        divisor = self.process_group.size() if self._divides_by_initial else turn.active
        self._turn = turn.source, self.process_group.size() / divisor
        return turn

    @not_traced
    def _begin_forward(self) -> ForwardTurn:
        """Prepare for the module's forward, and return its turn."""
        notice = Join.notify_join_context(self)
        if notice is not None:
            notice.wait()
        trainable = self._replicas.trainable()
        turn = ForwardTurn(
            reduces=torch.is_grad_enabled() and self.require_backward_grad_sync and bool(trainable),
            copies=self._copies_buffers and self._is_copy_due,
        )
        if self._join_config.enable:
            turn = self._agree_on_turn(turn)
        self._prepare(turn, trainable)
        return turn

    @not_traced
    def _end_forward(self, turn: ForwardTurn, outputs: Any) -> None:
        if turn.reduces:
            self._current.watch([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)])

    def _prepare(self, turn: ForwardTurn, trainable: Sequence[torch.nn.Parameter]) -> None:
        """Do the common work of all ranks before a forward; an error in it ends the turn on the others, too."""
        buffers = self._replicas.buffers() if turn.copies else []
        owed = buffers
        try:
            is_same = self._check_parameters(trainable)
        except BaseException as error:
            self._break_off(turn, error, owed)
            raise
        if turn.reduces and not is_same:
            self._renew(turn, owed)
        if turn.reduces:
            self._current.times.forward_begins()
        if self._reducer is not None:
            self._reducer.is_on = turn.reduces
        try:
            owed = []
            copy_from(turn.source, buffers, self.process_group)
            self._is_copy_due = turn.reduces
            if turn.reduces:
                source, factor = self._turn
                self._current.set_turn(source=source, factor=factor)
                self._current.adopt_plan()
        except BaseException as error:
            self._break_off(turn, error, owed)
            raise

    @not_traced
    def _break_off(
        self, turn: ForwardTurn, error: BaseException, owed: Sequence[torch.Tensor], *, taken: int = 0
    ) -> None:
        """End on the other ranks the rest of this one's turn: copies of the buffers ``owed``, the step.

        ``taken`` operations of the turn have met other ones of this rank.
        """
        taken = refuse_copies(owed, self.process_group, error, taken=taken)
        if turn.reduces and self._reducer is not None:
            self._reducer.fail(error, taken=taken)
        elif turn.reduces and not taken:  # the others make theirs
            self.process_group.refuse(NAME, error, lambda: self.process_group.communicator.refuse(NAME, error))

    def _shadow(self) -> None:
        """Repeat the collectives of a forward and backward of other ranks, with zero gradients.

        Until all have finished, gradients are the means, with which joined optimizers step.
        """
        if self._own_gradients is None:
            self._own_gradients = OwnGradients(self._replicas.parameters())
        turn = self._agree_on_turn(None)
        self._prepare(turn, self._replicas.trainable())
        if turn.reduces:
            self._current.shadow()

    def _end_join(self, is_last: bool) -> None:
        """Make all ranks alike once all have finished."""
        own, self._own_gradients = self._own_gradients, None
        if own is not None:
            own.restore()
        self._copy_all(find_last(self.process_group, is_last=is_last))
        self._turn = 0, 1.0
        self._join_config = _JoinConfig.construct_disabled_join_config()

    def _check_parameters(self, trainable: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether the parameters whose gradients are reduced are exactly ``trainable``, which currently require
        them.

        Raises ``UsageError`` if the module has other parameters than when it was wrapped.
        """
        reducer = self._reducer
        if reducer is not None:
            for each in reducer.replicated:
                each.check()
            if reducer.reduces(trainable):
                return True
        self._replicas.check_known(trainable)
        return False


def _run(module: torch.nn.Module, /, *inputs: Any, **kwargs: Any) -> Any:
    """Run ``module``; the compiler begins here, since it skips modules of torch itself that are called from nowhere."""
    return module(*inputs, **kwargs)


def _register(reducer: GradientReducer, state: object) -> None:
    if not isinstance(state, GradientHook):
        raise UsageError(f"state: expected a GradientHook, got {type(state).__name__}")
    if state.group is not reducer.group:
        raise UsageError("state: expected a GradientHook with the process group of the model, got one with another")
    _check_has_no_hook(reducer)
    reducer.use(state)


def _check_has_no_hook(reducer: GradientReducer) -> None:
    if reducer.hook is not None:
        raise UsageError("state: expected one GradientHook for a model, got another; leave out codec=")
    if reducer.comm_hook is not None:
        raise UsageError(f"hook: expected one for a model, got another after {reducer.comm_hook}")


def _checked_tuning(tuning: object) -> TuningConfig | None:
    if tuning is not None and not isinstance(tuning, TuningConfig):
        raise UsageError(f"tuning: expected a TuningConfig or None, got {type(tuning).__name__}")
    return tuning


_OTHER_DEVICES: Final = "leave it out, as the module is in the CPU's memory, or use torch's class for other devices"

ONLY_VALUES: Final[Mapping[str, tuple[Any, str]]] = {
    "device_ids": (None, _OTHER_DEVICES),
    "output_device": (None, _OTHER_DEVICES),
    "dim": (0, "leave it out: nothing is scattered over devices"),
    "check_reduction": (False, "leave it out: every step is checked on all ranks"),
    "gradient_as_bucket_view": (True, "leave it out, as gradients are always views, or use torch's class"),
    "delay_all_reduce_named_params": (None, "leave it out, or use torch's class"),
    "param_to_hook_all_reduce": (None, "leave it out, or use torch's class"),
    "mixed_precision": (None, "run the forward under torch.autocast, or use torch's class"),
    "device_mesh": (None, "pass process_group=device_mesh.get_group()"),
    "skip_all_reduce_unused_params": (False, "leave it out, or use torch's class"),
    "batched_grad_copy": (False, "leave it out: gradients are not copied into buckets one by one"),
    "bucket_cap_mb_list": (None, "pass bucket_cap_mb, or use torch's class"),
}
"""The value of each argument, and the alternative to passing another."""


def check_only_values(given: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for the first of the arguments ``given`` that has another value than its only one.

    Empty sequences count as None, as in torch's class.
    """
    for name, value in given.items():
        wanted, advice = ONLY_VALUES[name]
        is_empty = wanted is None and isinstance(value, list | tuple) and not value
        if not is_empty and (type(value) is not type(wanted) or value != wanted):
            raise UsageError(f"{name}: expected {wanted}, got {value!r}; {advice}")
