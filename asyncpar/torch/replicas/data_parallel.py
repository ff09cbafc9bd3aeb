"""DistributedDataParallel without copies in and out of buckets.

model = asyncpar.torch.DistributedDataParallel(module)      # in place of torch.nn.parallel.DistributedDataParallel
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.utils._pytree import tree_leaves

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import ALL, find_difference
from asyncpar.codecs import AnyCodec
from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.errors import AsyncparError, PeerCancelled, UsageError
from asyncpar.gradsync.tuning import TuningConfig, TuningOutcome
from asyncpar.torch.errors import as_torch
from asyncpar.torch.hook.gradient_hook import GradientHook, gradient_hook
from asyncpar.torch.instrumentation import not_traced, stepped_over
from asyncpar.torch.process_group import ProcessGroup, own_group
from asyncpar.torch.replicas.buckets import Replicated
from asyncpar.torch.replicas.copies import copy_from, refuse_copies
from asyncpar.torch.replicas.joining import ForwardTurn, ReplicaJoinHook, agree_on_turn, find_last
from asyncpar.torch.replicas.options import ONLY_VALUES, check_only_values
from asyncpar.torch.replicas.reducer import GradientReducer, ReducerSettings

_NAME = "DistributedDataParallel"
_ERROR = "error"
_MIB = 1 << 20
_BUCKET_MIB = 25
_CROWDED_BUCKET_MIB = 256
"""Of ranks that share memory and leave no core idle: what is reduced during backward takes the core from it."""


class DistributedDataParallel(torch.nn.Module, Joinable):
    """``module`` on all ranks of a group, whose gradients are averaged over ranks during ``backward``.

    For modules in the CPU's memory, with the arguments, the semantics and the ``state_dict`` of torch's class of this
    name.  Gradients are views of buckets in memory that the ranks of a host share: they are reduced in place, and the
    optimizer reads them there.  After ``zero_grad(set_to_none=True)`` the next backward restores the views.

    Parameters and buffers are compared over ranks and then copied from rank 0.  ``bucket_cap_mb`` (MiB) bounds a
    bucket.  If it is None, that is 256 where all ranks share memory and have less than two cores each, as nothing can
    be reduced beside backward there, and 25 elsewhere and with ``tuning``.  The first bucket holds 1 MiB, and after the
    first step buckets follow the order in which gradients became final in it on rank 0.  With
    ``find_unused_parameters`` each backward may leave parameters out, which then count as zero on this rank; those that
    no rank has used keep the gradient that they have.  ``static_graph`` says that all backward passes are alike:
    parameters that the first one leaves out are never waited for, and checkpointing may accumulate gradients several
    times.  ``broadcast_buffers`` copies buffers from rank 0 before each forward that follows one with reduction.

    Whether a backward reduces is decided by the last forward before it: inside ``no_sync()`` it does not.  What goes
    wrong on one rank in forward or backward is raised there, and as ``PeerCancelled`` with the reason on the others;
    parameters and optimizer are as before then, and gradients undefined: zero them.

    ``codec`` compresses gradients with error feedback (``int8``, ``powersgd:4`` and the others of ``GradientHook``);
    ``register_comm_hook`` sets more.  ``gradient_hook`` is what does it, with figures and a state dict of its own.

    With ``tuning`` ranks look for the quickest bucket size, algorithm and size of messages while they train (see
    ``TuningConfig`` of ``asyncpar.gradsync``), beginning with ``bucket_cap_mb``; not together with a codec.  Sums may
    then differ in their last bits from step to step and from run to run, though never between ranks.

    ``process_group`` is the default one if it is None; with ``init_sync`` all ranks begin with the parameters of the
    first one.

    Other arguments of torch's class are taken by their names and places.  ``forward_sync_buffers`` is its new name of
    ``broadcast_buffers``.  The rest have one value, and ``UsageError`` says what to do instead of another: None for
    ``device_ids``, ``output_device``, ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``,
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
        codec: str | AnyCodec = "none",
        tuning: TuningConfig | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ONLY_VALUES}
        super().__init__()
        Joinable.__init__(self)
        if forward_sync_buffers is not None:
            broadcast_buffers = forward_sync_buffers
        group = own_group(process_group, _NAME)
        self.module = module
        self.process_group = group
        self.require_backward_grad_sync = True
        self._copies_buffers = broadcast_buffers is not False
        self._is_copy_due = True
        """Do the next forward's buffers come from rank 0?"""
        self._divides_by_initial = True
        """Are gradients divided by the number of all ranks, also when some are through?"""

        def settings() -> ReducerSettings:
            check_only_values(given)
            return ReducerSettings(
                bucket_bytes=_bucket_bytes(bucket_cap_mb, group, tuning),
                finds_unused=find_unused_parameters,
                is_static=static_graph,
                tuning=_checked_tuning(tuning),
            )

        reducer = _agreed_reducer(module, group, settings, codec)
        self._reducer = reducer
        self._replicated = reducer.replicated
        if init_sync:
            copy_from(0, [*module.parameters(), *module.buffers()], group)

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
        """Let backward passes of forwards in this block accumulate gradients on this rank, without reduction."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches, as that of torch's class.

        A rank that leaves the block goes on with gradients of zero until all ranks have left it; then all have the
        parameters of one that was last.  Gradients are divided by the number of all ranks, or without
        ``divide_by_initial_world_size`` by the number of those in the block.  With ``throw_on_early_termination`` all
        ranks raise ``RuntimeError`` when the first has left.  ``Join([model, optimizer])`` does it for several.
        Without ``enable`` nothing of this happens.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what ``Join`` calls on ranks that are through."""
        self._divides_by_initial = bool(kwargs.get("divide_by_initial_world_size", True))
        return ReplicaJoinHook(self._shadow, self._end_join)

    @property
    def join_device(self) -> torch.device:
        """The device of what ``Join`` itself exchanges."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that ``Join`` itself uses."""
        return self.process_group

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Reduce gradients from now on through ``state``, a ``GradientHook`` of this model alone, on all ranks.

        ``hook`` is ``gradient_hook``, for the call that torch's class of this name has; no other can be used.
        """
        try:
            _register(self._reducer, state, hook)
        except AsyncparError as error:
            raise as_torch(error, "register_comm_hook") from None

    @property
    def gradient_hook(self) -> GradientHook | None:
        """What compresses gradients: its ``statistics``, and the ``state_dict`` of error feedback on this rank."""
        return self._reducer.hook

    def tuning_outcome(self) -> TuningOutcome | None:
        """Return the best choice so far, as a pin for ``tuning``, and what finding it has cost; None without tuning."""
        return None if self._reducer.tuning is None else self._reducer.tuning.outcome

    def tuning_table(self) -> str:
        """Return what was tried, what steps with it waited for, and what that cost; empty without ``tuning``."""
        return "" if self._reducer.tuning is None else self._reducer.tuning.table()

    @property
    def bucket_sizes(self) -> list[int]:
        """Bytes of the buckets, in the order in which they are reduced."""
        return self._reducer.bucket_sizes

    def __reduce_ex__(self, _: Any) -> Any:
        raise UsageError("DistributedDataParallel: it cannot be copied or pickled; use its module, or state_dict()")

    def _agree(self, own: ForwardTurn | None) -> ForwardTurn:
        """Return what the ranks do that are not through, under ``Join``."""
        turn = agree_on_turn(self.process_group, own)
        divisor = self.process_group.size() if self._divides_by_initial else turn.active
        self._reducer.set_turn(source=turn.source, factor=self.process_group.size() / divisor)
        return turn

    @not_traced
    def _begin_forward(self) -> ForwardTurn:
        """Do what comes before the module's forward, and return what is done in it."""
        notice = Join.notify_join_context(self)
        if notice is not None:
            notice.wait()
        turn = ForwardTurn(
            reduces=torch.is_grad_enabled() and self.require_backward_grad_sync,
            copies=self._copies_buffers and self._is_copy_due,
        )
        if self._join_config.enable:
            turn = self._agree(turn)
        self._prepare(turn)
        return turn

    @not_traced
    def _end_forward(self, turn: ForwardTurn, outputs: Any) -> None:
        if turn.reduces:
            self._reducer.watch([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)])

    def _prepare(self, turn: ForwardTurn) -> None:
        """Do what all ranks do before a forward; an error in it ends the turn on the others, too."""
        reducer = self._reducer
        buffers = [*self.module.buffers()] if turn.copies else []
        owed = buffers
        reducer.is_on = turn.reduces
        try:
            self._check_parameters()
            owed = []
            copy_from(turn.source, buffers, self.process_group)
            self._is_copy_due = turn.reduces
            if turn.reduces:
                reducer.adopt_plan()
        except BaseException as error:
            self._break_off(turn, error, owed)
            raise

    @not_traced
    def _break_off(self, turn: ForwardTurn, error: BaseException, owed: Sequence[torch.Tensor]) -> None:
        """End on the other ranks what this one has not done of the turn: copies of the buffers ``owed``, the step."""
        refuse_copies(owed, self.process_group, error)
        if turn.reduces:
            self._reducer.fail(error)

    def _shadow(self) -> None:
        """Repeat the collectives of a forward and backward of other ranks, with gradients of zero."""
        turn = self._agree(None)
        self._prepare(turn)
        if turn.reduces:
            self._reducer.shadow()

    def _end_join(self, is_last: bool) -> None:
        """Make all ranks alike, when all are through."""
        source = find_last(self.process_group, is_last=is_last)
        buffers = [*self.module.buffers()] if self._copies_buffers else []
        copy_from(source, [*self.module.parameters(), *buffers], self.process_group)
        self._reducer.set_turn(source=0, factor=1.0)
        self._join_config = _JoinConfig.construct_disabled_join_config()

    def _check_parameters(self) -> None:
        """Raise ``UsageError`` if the module has other parameters than when it was wrapped."""
        for each in self._replicated:
            each.check()
        now = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if [*map(id, now)] != [id(each.parameter) for each in self._replicated]:
            raise UsageError(
                f"parameters: expected the {len(self._replicated)} that require gradients, as when the module was "
                f"wrapped, got {len(now)}, not all of them the same; change parameters before "
                "DistributedDataParallel(module), or wrap it again"
            )


def _run(module: torch.nn.Module, /, *inputs: Any, **kwargs: Any) -> Any:
    """Run ``module``; the compiler begins here: it passes over modules of torch itself that are called from nowhere."""
    return module(*inputs, **kwargs)


def _register(reducer: GradientReducer, state: object, hook: object) -> None:
    if hook is not gradient_hook:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise UsageError(
            f"hook: expected asyncpar.torch.gradient_hook, got {name}; use torch's DistributedDataParallel for others"
        )
    if not isinstance(state, GradientHook):
        raise UsageError(f"state: expected a GradientHook, got {type(state).__name__}")
    if state.group is not reducer.group:
        raise UsageError("state: expected a GradientHook with the process group of the model, got one with another")
    if reducer.hook is not None:
        raise UsageError("state: expected one GradientHook for a model, got another; leave out codec=")
    reducer.use(state)


def _agreed_reducer(
    module: torch.nn.Module, group: ProcessGroup, make_settings: Callable[[], ReducerSettings], codec: str | AnyCodec
) -> GradientReducer:
    """Return the reducer of ``module``, once all ranks have said that they have an equal one.

    Raises ``SettingsDiffer`` on all ranks, which names the first difference, and on the others what one rank refuses.
    """
    reducer, failure = None, None
    told: dict[str, list[str]] = {ALL: [], _ERROR: []}
    try:
        settings = make_settings()
        reducer = GradientReducer(group, _replicated(module), settings)
        hook = GradientHook(codec=codec, group=group, parameters=module.named_parameters())
        if not hook.is_lossless:
            _register(reducer, hook, gradient_hook)
        told[ALL] = [f"{settings}", f"{hook}", *_lines(module)]
    except Exception as error:  # noqa: BLE001  # raised below, when the others know
        failure, told[_ERROR] = error, [f"{type(error).__name__}: {error}"]
    everyone = _exchange(group, told)
    if failure is not None:
        raise as_torch(failure, _NAME)
    assert reducer is not None, "there is one, or an error"
    ranks = group.communicator.ranks
    for rank, other in zip(ranks, everyone, strict=True):
        if other[_ERROR]:
            raise as_torch(PeerCancelled(f"{_NAME}: rank {rank} cannot take part: {other[_ERROR][0]}", rank=rank))
    difference = find_difference(everyone, {ALL: (range(len(ranks)),)}, ranks)
    if difference is not None:
        raise as_torch(SettingsDiffer(str(difference)))
    return reducer


def _bucket_bytes(bucket_cap_mb: float | None, group: ProcessGroup, tuning: TuningConfig | None) -> int:
    size = bucket_cap_mb
    if size is None:
        is_crowded = tuning is None and _are_crowded(group)
        size = _CROWDED_BUCKET_MIB if is_crowded else _BUCKET_MIB
    if not size * _MIB >= 1:
        raise UsageError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb}")
    return int(size * _MIB)


def _are_crowded(group: ProcessGroup) -> bool:
    """Do the ranks share memory, with less than two cores for each?  Ranks of one host find the same."""
    communicator = group.communicator
    shares_memory = len(communicator.hosts) == 1 < communicator.size and ARENA in communicator.algorithms("all_reduce")
    return shares_memory and (os.cpu_count() or 1) < 2 * communicator.size


def _checked_tuning(tuning: object) -> TuningConfig | None:
    if tuning is not None and not isinstance(tuning, TuningConfig):
        raise UsageError(f"tuning: expected a TuningConfig or None, got {type(tuning).__name__}")
    return tuning


def _exchange(group: ProcessGroup, told: dict[str, list[str]]) -> Sequence[dict[str, list[str]]]:
    communicator = group.communicator
    found: list[dict[str, list[str]]] = []

    async def exchange() -> None:
        found.extend(await communicator.all_gather_object(told, wanted=dict[str, list[str]]))

    try:
        group.call(exchange, _NAME)
    except AsyncparError as error:
        raise as_torch(error, _NAME) from None
    return found


def _replicated(module: torch.nn.Module) -> list[Replicated]:
    """Describe the parameters of ``module`` that require gradients, each once."""
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
    places: dict[torch.nn.Parameter, tuple[torch.nn.Module, str]] = {}
    for owner in module.modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, (owner, attribute))
    if not names:
        raise UsageError("module: expected parameters that require gradients, got none; it needs no wrapper")
    return [
        Replicated.of(index, name, parameter, *places[parameter])
        for index, (parameter, name) in enumerate(names.items())
    ]


def _lines(module: torch.nn.Module) -> Iterator[str]:
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            grad = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
            yield f"{kind} {name} {tensor.dtype}{list(tensor.shape)}{grad}"
