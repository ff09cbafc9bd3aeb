"""The signatures of a process group's operations, and the devices whose tensors they take.

``pg.allreduce([x], options)``, ``pg.allreduce(x)`` and ``pg.allreduce(tensor=x, op=dist.ReduceOp.MAX)`` are one method
here, which is always called with its tensors and with options of torch.

Tensors in the CPU's memory are handled here.  For another device a group creates a path when it first sees such a
tensor, on all ranks alike, and passes the whole operation to it.  The path for CUDA is torch's NCCL, where torch has
it, or with ``ASYNCPAR_TORCH_CUDA=asyncpar`` the group's own communicator.  Others can be added to ``device_paths``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from asyncpar.errors import UsageError
from asyncpar.torch.group_base import GroupBase

MakePath = Callable[[dist.Store, int, int, timedelta], Any]
"""Creates a path from a store, a rank, a size and a timeout: a ``torch.distributed.ProcessGroup``."""


CUDA_VARIABLE = "ASYNCPAR_TORCH_CUDA"
TORCH, OWN = "torch", "asyncpar"


def cuda_path_name(environment: Mapping[str, str]) -> str:
    """Return the path of CUDA tensors: ``TORCH``, its ``ProcessGroupNCCL``, or ``OWN``, the group's communicator."""
    name = environment.get(CUDA_VARIABLE) or TORCH
    if name not in (TORCH, OWN):
        raise UsageError(f"{CUDA_VARIABLE}: expected {TORCH} or {OWN}, got {name!r}")
    return name


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise UsageError(
            "NCCL, which would be its path, is missing (this torch was built without it, or sees no GPU; "
            f"{CUDA_VARIABLE}={OWN} on all ranks takes asyncpar's)"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options)


device_paths: dict[str, MakePath] = {"cuda": _nccl}
"""The function that creates the path of a group, by type of device."""


def path_of(group: GroupBase, device: torch.device) -> Any:
    """Return the path of ``group`` for ``device``; raises ``UsageError`` with an alternative if there is none."""
    path = group.paths.get(device.type)
    if path is None and device.type == "cuda" and cuda_path_name(os.environ) == OWN:
        path = group.paths[device.type] = group.own_cuda_path()
    if path is None:
        trouble = f"there is no path for {device.type}"
        make = device_paths.get(device.type)
        if make is not None:
            try:
                path = group.paths[device.type] = make(
                    group.get_group_store(), group.rank(), group.size(), timedelta(seconds=group.seconds)
                )
            except UsageError as error:
                trouble = str(error)
        if path is None:
            raise UsageError(
                f"expected tensors in the CPU's memory, got one on {device}: {trouble}; pass tensor.cpu(), or make a "
                "group of another backend for such tensors"
            )
    return path


F = TypeVar("F", bound=Callable[..., Any])

_LISTS = (list, tuple)  # list | tuple would be created again in each call

Refuse = Callable[..., None]
"""Takes a communicator, an error and the arguments of a refused call, and gives the call its place there."""

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""The field of the options that each argument of the forms without options sets."""


def operation(
    name: str,
    *arguments: str,
    options: type[Any] | None = None,
    extras: Sequence[str] = (),
    refuse: Refuse | None = None,
    leads: int = 0,
) -> Callable[[F], F]:
    """Make a method for an operation, which ``torch.distributed`` calls ``name``.

    Each of ``arguments`` has its names in torch's forms, separated by ``|``.  The method is called with those, and with
    an object of ``options`` at the end: the one given, or one made of ``extras`` (of ``op``, ``root`` and ``timeout``,
    in the order of torch's forms).  If the argument number ``leads`` has tensors on another device than the CPU, the
    operation is passed to the path of that device.  A ``UsageError`` becomes a ``DistBackendError``, too, and names the
    operation.

    A refused call still takes its place in the order of the group, and ends on the other ranks with the reason:
    ``refuse`` notifies them, for messages between two ranks.
    """
    names = [each.split("|") for each in arguments]
    count = len(names)

    def decorate(method: F) -> F:
        attribute = method.__name__

        @functools.wraps(method)
        def call(self: GroupBase, *given: Any, **named: Any) -> Any:
            bound: tuple[Any, ...] | None = None
            try:
                if named or len(given) != count + (options is not None) or (options and type(given[-1]) is not options):
                    bound = _bind(given, named, names, options, extras)
                else:
                    bound = given
                device = _device(bound[leads]) if bound else None
                if device is None:
                    return method(self, *bound)
                path = path_of(self, device)
                if is_own(path):
                    return getattr(path, attribute)(*bound)
            except Exception as error:
                refused = self.refuse(
                    name, error, _notifier(self, name, error, refuse, [*given, *named.values()], bound)
                )
                if refused is error:
                    raise
                raise refused from None
            return getattr(path, attribute)(*bound)

        return cast("F", call)

    return decorate


def _notifier(
    group: GroupBase,
    name: str,
    error: Exception,
    refuse: Refuse | None,
    given: Sequence[Any],
    bound: tuple[Any, ...] | None,
) -> Callable[[], None] | None:
    """Return a function that notifies other ranks of a refused call; None if they do not wait in ``communicator``."""
    paths = [group.paths.get(device.type) for each in given if (device := _device(each)) is not None]
    if any(path is not None and not is_own(path) for path in paths):
        return None
    if refuse is None:
        return lambda: group.communicator.refuse(name, error)
    return None if bound is None else partial(refuse, group.communicator, error, *bound)


def is_own(path: Any) -> bool:
    """Return whether ``path`` uses the communicator of its group, where other ranks wait for its calls."""
    return isinstance(path, GroupBase) or isinstance(getattr(path, "group", None), GroupBase)


def _device(tensors: Any) -> torch.device | None:
    """Return the device of the first tensor; None for the CPU, or where there is no tensor."""
    first = tensors
    while isinstance(first, _LISTS) and first:
        first = first[0]
    return None if not isinstance(first, torch.Tensor) or first.is_cpu else first.device


def _bind(
    given: tuple[Any, ...],
    named: dict[str, Any],
    names: Sequence[Sequence[str]],
    options: type[Any] | None,
    extras: Sequence[str],
) -> tuple[Any, ...]:
    """Return the arguments of one of torch's forms as the method takes them."""
    left = dict(named)
    bound = [*given[: len(names)]]
    for known in names[len(bound) :]:
        found = [name for name in known if name in left]
        if not found:
            raise UsageError(f"{known[0]}: expected this argument, got none")
        bound.append(left.pop(found[0]))
    rest = given[len(names) :]
    if options is not None:
        bound.append(_options(rest, left, options, extras))
    elif rest:
        raise UsageError(f"expected {len(names)} arguments, got {len(given)}")
    if left:
        raise UsageError(f"{next(iter(left))}: expected no such argument")
    return tuple(bound)


def _options(rest: tuple[Any, ...], named: dict[str, Any], kind: type[Any], extras: Sequence[str]) -> Any:
    """Return options of ``kind``: those given, or made of ``extras``, which are removed from ``named``."""
    if "opts" in named:
        rest = (named.pop("opts"), *rest)
    if rest and isinstance(rest[0], kind):
        first, *more = rest
        extras = ()
    else:
        first, more = kind(), [*rest[1:]] if rest and rest[0] is None and not extras else [*rest]
    if len(more) > len(extras):
        raise UsageError(f"opts: expected {kind.__name__}, got {more[len(extras)]!r}")
    values = dict(zip(extras, more, strict=False))
    values |= {name: named.pop(name) for name in extras if name in named}
    for name, value in values.items():
        if value is not None:
            _set(first, name, value)
    return first


def _set(options: Any, name: str, value: Any) -> None:
    """Set the field of ``options`` that the argument ``name`` of an operation stands for."""
    if name == "timeout" and not isinstance(value, timedelta):
        raise UsageError(f"timeout: expected a timedelta, got {value!r}")
    try:
        setattr(options, _FIELDS[name], value)
    except TypeError:
        raise UsageError(f"{name}: expected what torch's {type(options).__name__} takes, got {value!r}") from None
