"""Communication hooks of torch and of programs: ``hook(state, bucket)`` returns a future of the reduced gradients.

Theory of operation.  A hook begins operations of its own, some of them in callbacks of its future.  All ranks must
begin them in one order, so a hook is called for a bucket only when its future of the previous one is done.  The number
of operations of a hook is unknown: a rank that fails takes the places of as many as the bucket had in the last
successful pass (in the first one, of one for each bucket).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from asyncpar.errors import UsageError
from asyncpar.torch.hook.bucket import HookedBucket
from asyncpar.torch.process_group import ProcessGroup
from asyncpar.torch.replicas.buckets import GradientBucket

Hook = Callable[[Any, Any], Future[torch.Tensor]]

_INSTEAD = {
    "quantization_pertensor_hook": 'codec="int8"',
    "quantization_perchannel_hook": 'codec="int8"',
    "batched_powerSGD_hook": "powerSGD_hook",
}
"""Hooks of torch that run over NCCL only, or nowhere, and their replacements."""


class HookWork:
    """A bucket that a hook reduces."""

    def __init__(self, future: Future[torch.Tensor], bucket: GradientBucket, name: str) -> None:
        self._future = future
        self._bucket = bucket
        self._name = name
        self._is_taken = False
        self._over = threading.Event()
        over = self._over
        future.add_done_callback(lambda _: over.set())

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> bool:
        """Wait for the hook's future and copy its result to the gradients."""
        self._over.wait()  # it can be interrupted, unlike the wait of the future
        found: Any = self._future.wait()
        if not self._is_taken:
            self._take(found)
            self._is_taken = True
        return True

    def _take(self, found: Any) -> None:
        if isinstance(found, Sequence) and len(found) == 1:  # of ``Work.get_future()``
            found = found[0]
        flat = self._bucket.flat
        if not isinstance(found, torch.Tensor) or found.numel() != flat.numel():
            got = f"one of {found.numel()}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise UsageError(
                f"hook {self._name}: expected a future of a tensor of {flat.numel()} values, like bucket.buffer(), "
                f"got {got}"
            )
        if found.data_ptr() != flat.data_ptr() or found.dtype != flat.dtype:
            flat.copy_(found.detach().reshape(-1))


class CommHook:
    """A hook with its ``state``.  Raises ``UsageError`` for anything but a hook."""

    def __init__(self, state: object, hook: object, group: ProcessGroup) -> None:
        self.name = str(getattr(hook, "__qualname__", type(hook).__name__))
        if not callable(hook):
            raise UsageError(f"hook: expected a function hook(state, bucket), got {type(hook).__name__}")
        if self.name in _INSTEAD:
            raise UsageError(
                f"hook: expected one that runs in the CPU's memory, got torch's {self.name}, which fails under torch's "
                f"class there, too; use {_INSTEAD[self.name]}"
            )
        if not _takes_bucket(hook):
            raise UsageError(
                "hook: expected a function hook(state, bucket) that returns a torch.futures.Future of the tensor that "
                f"replaces bucket.buffer(), got {self.name}, which does not take these two"
            )
        self._state = state
        self._hook = cast("Hook", hook)
        self._group = group
        self._counts: list[int] = []
        """The number of operations that the hook has begun for each bucket of the last successful pass."""
        self._begun: list[int] = []
        """The same numbers for the finished buckets of this pass."""
        self._work: HookWork | None = None
        """The work of the last bucket, if it is not known to be over."""
        self._mark: int | None = None
        """The number of operations of the group when that work began."""

    @classmethod
    def builtin(cls, kind: object, group: ProcessGroup) -> CommHook:
        """Return the hook that is equivalent to torch's C++ hook of ``kind``."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # needed only by its users

        found = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if not isinstance(kind, dist.BuiltinCommHookType):
            raise UsageError(f"comm_hook_type: expected one of torch.distributed.BuiltinCommHookType, got {kind!r}")
        return cls(group, found[kind], group)

    def __str__(self) -> str:
        return f"hook {self.name}"

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._begun = []
        self._work = self._mark = None

    @property
    def is_free(self) -> bool:
        """Whether the previous bucket is over."""
        return self._work is None or self._work.is_over

    def start(self, bucket: GradientBucket, *, index: int, is_last: bool) -> HookWork:
        """Call the hook, once the previous bucket is over."""
        self.finish()
        self._mark = self._group._get_sequence_number_for_group()
        parameters = [member.parameter for member in bucket.members]
        given = HookedBucket(bucket.flat, parameters, bucket.views_of, index=index, is_last=is_last)
        future = self._hook(self._state, given)
        if not isinstance(future, torch._C.Future):  # returned by ``then``, too
            raise UsageError(f"{self}: expected a torch.futures.Future, got {type(future).__name__}")
        self._work = HookWork(future, bucket, self.name)
        return self._work

    def finish(self, *, is_last: bool = False) -> None:
        """Wait until the last bucket is over, after which the hook begins no operations for it."""
        if self._work is not None and self._mark is not None:
            self._work.wait()
            self._begun.append(self._group._get_sequence_number_for_group() - self._mark)
            self._work = self._mark = None
        if is_last:
            self._counts = self._begun

    def fail(self, buckets: int) -> int:
        """Return how many operations other ranks begin in this pass of ``buckets`` that this one will not begin.

        Waits for the hook first, whose callbacks may begin some.
        """
        if self._work is not None:
            with suppress(Exception):  # raised where the pass waits for it, or after the error that ended the pass
                self._work.wait()
        begun = [*self._begun]
        if self._mark is not None:
            begun.append(self._group._get_sequence_number_for_group() - self._mark)
        usual = max(self._counts, default=1)
        expected = [*self._counts, *[usual] * buckets][:buckets]
        owed = sum(expected[len(begun) :])
        if self._mark is not None:
            owed += max(0, expected[len(begun) - 1] - begun[-1])
        self.begin_pass()
        return owed


def _takes_bucket(hook: Callable[..., object]) -> bool:
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a C function, which does not describe its parameters
        return True
    return True
