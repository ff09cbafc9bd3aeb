"""Compressed gradients under DistributedDataParallel.

state = asyncpar.torch.GradientHook(codec="int8")
model = DistributedDataParallel(module)
model.register_comm_hook(state, asyncpar.torch.gradient_hook)
...
print(state.statistics())
"""

# Without the annotations of the future: torch inspects those of hooks.

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from asyncpar.codecs import AnyCodec
from asyncpar.collectives.communicator import step_meter
from asyncpar.core.config.names import CodecChoice
from asyncpar.core.observe.records import EventState
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.torch.hook.bucket import HookBucket
from asyncpar.torch.hook.reducer import MINIMUM_BYTES, HookReducer, HookSettings, Hosts
from asyncpar.torch.hook.state import HookMemory, HookStatistics, HookTally, ParameterNames
from asyncpar.torch.process_group import own_group
from asyncpar.torch.work import Work

_OPERATION = "gradient_hook"
_OUTSIDE = -1
"""The number of the backward pass outside of any, as in ``join``."""


class GradientHook:
    """The state of ``gradient_hook``, one for each model, with equal settings on all ranks.

    ``codec`` is a name that ``codecs.parse_codec`` knows (``int8``, ``int4``, ``bf16``, ``fp16``, ``sign``,
    ``topk:0.01``, ``topk:0.01+int8``, ``randomk:0.1``, ``powersgd:4``, ``none``), ``"auto"``, which measures the link
    between hosts and picks one, or a codec.  ``group`` is the process group of the model, by default that of all ranks.
    With ``error_feedback`` the codec's error of a gradient is added to that of the next step.  Buckets of less than
    ``minimum_bytes``, and those of the first ``warm_up_steps``, are not compressed.

    If there are several ``hosts`` and ranks share one, gradients are added inside each and the codec is used between
    them: True stands for the actual hosts, False for each rank as a host of its own, and a list of lists of ranks
    defines hosts explicitly.  If all ranks are on one host the codec is used between them, except that ``"auto"`` is no
    codec there.  ``parameters``, such as ``model.named_parameters()``, give names to messages and checkpoints instead
    of numbers.

    All ranks end each step with the same bits.  If a gradient is NaN or infinite on some rank, the bucket is NaN on all
    of them, as a loss scaler expects, and error feedback is unchanged.
    """

    def __init__(
        self,
        *,
        codec: CodecChoice | AnyCodec = "int8",
        group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
        minimum_bytes: int = MINIMUM_BYTES,
        warm_up_steps: int = 0,
        hosts: Hosts = True,
        parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.group = own_group(group, "GradientHook")
        self._settings = HookSettings(
            compression=GradientCompressionConfig(codec=codec, error_feedback=error_feedback),
            minimum_bytes=minimum_bytes,
            warm_up_steps=warm_up_steps,
            hosts=hosts,
        )
        self._memory = HookMemory(names=ParameterNames(parameters))
        self._tally = HookTally(codec=self._settings.compression.codec_name, ranks=self.group.size())
        self._reducer: HookReducer | None = None
        self._works: list[Work] = []
        self._backward = _OUTSIDE
        self._await_failed: Callable[[], None] | None = None
        """Waits for the remains of failed passes; set if a single model owns this hook."""
        self._meter = step_meter(self.group.communicator, _OPERATION)
        self._passes = 0

    def __str__(self) -> str:
        return str(self._settings)

    @property
    def is_lossless(self) -> bool:
        """Whether no bucket uses a codec."""
        return self._settings.is_lossless

    def statistics(self) -> HookStatistics:
        """Return the figures of the steps so far.  Call it between steps."""
        return self._tally.statistics(residual_norm=self._memory.residual_norm())

    def reset_statistics(self) -> None:
        """Reset all figures to zero.  Call it between steps."""
        self._tally.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of error feedback and codecs on this rank: tensors by parameter.

        Every rank saves its own.  Without ``parameters`` in the constructor they are named by the order in which
        DistributedDataParallel takes them, which is the same for the same model and bucket size.
        """
        self._check_idle("state_dict")
        return self._memory.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the ``state_dict`` of this rank from an earlier run.  Call it on all ranks, between steps."""
        self._check_idle("load_state_dict")
        if state.get("residuals") and not self._settings.compression.error_feedback:
            raise UsageError("state: expected none of error feedback, which is off here, but there are residuals")
        self._memory.restore(state)

    def reduce(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Start reducing ``bucket`` and return a future of its mean over ranks.  See ``gradient_hook``."""
        self._check_not_owned()
        given, backward = HookBucket.of(bucket), torch._C._current_graph_task_id()
        if given.index == 0:
            if backward != _OUTSIDE and backward == self._backward:
                raise UsageError(
                    "gradient_hook: expected one model, got buckets of two in one backward pass; "
                    "each model needs a GradientHook of its own"
                )
            self._backward = backward
            self._works = []
            self._passes += 1
            self._meter.begin(self._passes)
            self._meter.works()
        work = self.start(given)
        self._works.append(work)
        if given.is_last:
            self._meter.waits()
            if backward != _OUTSIDE:
                torch.autograd.Variable._execution_engine.queue_callback(self._wait)
            else:
                self._meter.end()
        return cast("Future[torch.Tensor]", work.get_future().then(_only))

    # -- for asyncpar.torch.DistributedDataParallel ------------------------------------------------------------------

    def own(self, await_failed: Callable[[], None], *, again: bool = False) -> None:
        """Reserve this hook for one model, which calls ``start`` and waits itself; ``again``, if it has it already.

        ``await_failed`` waits for buckets of passes that failed, whose errors were raised.
        """
        if not again:
            self._check_not_owned()
        if self._reducer is not None and not again:
            raise UsageError("state: expected a GradientHook of its own for each model, got one that was used")
        self._await_failed = await_failed

    def describe_again(self) -> None:
        """Make ranks agree on all buckets of the next backward pass, whether or not they have changed."""
        if self._reducer is not None:
            self._reducer.is_forgotten = True

    def start(self, given: HookBucket) -> Work:
        """Start replacing the gradients in ``given`` by their mean over ranks."""
        return self.group.start(lambda: self._begin(given), [given.buffer], operation=_OPERATION)

    def add_wait(self, seconds: float) -> None:
        """Count the time for which a backward pass has waited at its end."""
        self._tally.add_wait(seconds)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_not_owned(self) -> None:
        if self._await_failed is not None:
            raise UsageError("state: expected a GradientHook of its own for each model, got one that a model has")

    def _begin(self, given: HookBucket) -> Coroutine[Any, Any, None]:
        """Start reducing a bucket; called on the loop."""
        if self._reducer is None:
            self._reducer = HookReducer(self.group.communicator, self._settings, self._memory, self._tally)
        return self._reducer.begin(given)

    def _wait(self) -> None:
        """Wait at the end of backward, before DistributedDataParallel waits for the futures, which lose error types."""
        begun = time.perf_counter()
        works, self._works = self._works, []
        errors: list[BaseException] = []
        for work in works:
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001  # raised below, when nothing is under way any more
                errors.append(error)
        self._meter.end(EventState.FAILED if errors else EventState.COMPLETED)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerCancelled))
        self._tally.add_wait(time.perf_counter() - begun)

    def _check_idle(self, what: str) -> None:
        if self._await_failed is not None:
            self._await_failed()
        if self._reducer is not None and not self._reducer.is_idle:
            raise UsageError(f"{what}: buckets of a backward pass are under way; call it between steps")


def gradient_hook(state: GradientHook, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Replace the gradients in ``bucket`` by their mean over ranks, through the codec of ``state``.

    For ``register_comm_hook`` of DistributedDataParallel, whose process group is one of the backend ``asyncpar``.
    Errors are raised by ``backward``: ``UsageError`` if ranks differ in settings or parameters, ``PeerLost`` and
    similar.
    """
    if not isinstance(state, GradientHook):
        raise UsageError(
            f"state: expected a GradientHook, got {type(state).__name__}; "
            'call model.register_comm_hook(asyncpar.torch.GradientHook(codec="int8"), asyncpar.torch.gradient_hook)'
        )
    return state.reduce(bucket)


def _only(done: Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]
