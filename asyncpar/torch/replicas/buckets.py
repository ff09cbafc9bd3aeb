"""Buckets of gradients in shared memory, and the views of them that are the parameters' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from asyncpar.blocking.thread import LoopThread
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import Bucket, BucketPlan, GradientSpec, plan_buckets
from asyncpar.torch.arrays import array_of, tensor_of

_UNLIMITED = 1 << 30
"""Limit on the number of buckets: their size alone decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A parameter that all ranks hold, and its place in the module: ``owner.attribute``.

    Gradients of ``is_sparse`` ones are sparse tensors, which have no place in a bucket.
    """

    index: int
    name: str
    parameter: torch.nn.Parameter
    owner: torch.nn.Module
    attribute: str
    dtype: torch.dtype
    spec: GradientSpec
    is_sparse: bool

    @classmethod
    def of(
        cls,
        index: int,
        name: str,
        parameter: torch.nn.Parameter,
        owner: torch.nn.Module,
        attribute: str,
        *,
        is_sparse: bool = False,
    ) -> Replicated:
        """Describe a parameter.  Raises ``UsageError`` if its gradient cannot be reduced here."""
        array = array_of(parameter.detach(), f"parameter {name}")
        spec = GradientSpec(name=name, shape=tuple(parameter.shape), dtype=array.dtype)
        return cls(
            index=index,
            name=name,
            parameter=parameter,
            owner=owner,
            attribute=attribute,
            dtype=parameter.dtype,
            spec=spec,
            is_sparse=is_sparse,
        )

    def check(self) -> None:
        """Raise ``UsageError`` if the module has replaced the parameter, or the parameter has changed."""
        held = self.owner._parameters
        now = held[self.attribute] if self.attribute in held else None  # noqa: SIM401  # scripted modules have no ``get``
        if now is not self.parameter:
            raise self._changed("another object" if now is not None else "none")
        if not now.is_cpu:
            raise self._changed(f"one on {now.device}")
        if now.shape != self.spec.shape or now.dtype != self.dtype:
            raise self._changed(f"one of {now.dtype}{list(now.shape)}")

    def sparse_share(self, size: int, *, is_zero: bool) -> torch.Tensor:
        """Return this rank's part of the mean over ``size`` ranks: empty if ``is_zero``, or without a gradient."""
        gradient = None if is_zero else self.parameter.grad
        if gradient is None:
            places = torch.empty((1, 0), dtype=torch.int64)
            none = torch.empty((0, *self.spec.shape[1:]), dtype=self.dtype)
            return torch.sparse_coo_tensor(places, none, self.spec.shape, is_coalesced=True, check_invariants=False)
        return gradient.detach() / size

    def check_sparse(self) -> None:
        """Raise ``UsageError`` unless the gradient is sparse."""
        gradient = self.parameter.grad
        if gradient is not None and gradient.layout is not torch.sparse_coo:
            raise UsageError(
                f"parameter {self.name}: expected a sparse gradient, as its module has sparse=True, got one of layout "
                f"{gradient.layout}; use sparse=False where the parameter is used elsewhere, too"
            )

    def _changed(self, got: str) -> UsageError:
        return UsageError(
            f"parameter {self.name}: expected the one that was wrapped, got {got}; "
            "change parameters before DistributedDataParallel(module), or wrap the module again"
        )


class GradientBucket:
    """One bucket: ``flat`` holds the concatenated gradients of ``members``; ``views`` are their gradients."""

    __slots__ = ("array", "bucket", "flat", "members", "missing", "views")

    def __init__(self, bucket: Bucket, members: Sequence[Replicated], array: NDArray[Any]) -> None:
        self.bucket = bucket
        self.members = tuple(members)
        self.array = array
        self.flat = tensor_of(array)
        self.missing = len(self.members)
        """Members whose gradients are not final in this backward pass."""
        self.views = {member.index: view for member, view in zip(self.members, self.views_of(self.flat), strict=True)}

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of all members in ``flat``, which is as long as the bucket."""
        return [
            _view(flat, slot.start, member.parameter)
            for member, slot in zip(self.members, self.bucket.slots, strict=True)
        ]

    def take(self, member: Replicated) -> None:
        """Make the gradient of ``member`` its view, with the same values.

        Autograd stores the first gradient of a pass in its own memory; the copy reads it from the cache.
        """
        view, gradient = self.views[member.index], member.parameter.grad
        if gradient is view:
            return
        assert gradient is not None, "called for gradients that there are"
        _check(member, gradient)
        view.copy_(gradient.detach())
        member.parameter.grad = view

    def fill_in(self, member: Replicated) -> None:
        """Fill the place of ``member``, which had no gradient in this pass, with its earlier one or zeros."""
        if member.parameter.grad is None:
            self.views[member.index].zero_()
        else:
            self.take(member)


def plan(replicated: Sequence[Replicated], bucket_bytes: int, order: Sequence[str] | None = None) -> BucketPlan:
    """Return buckets of the dense parameters in reverse order of registration, or in ``order``, each of one dtype.

    There are equally many in each order.
    """
    specs = [each.spec for each in replicated if not each.is_sparse]
    found = plan_buckets(specs, bucket_bytes=bucket_bytes, max_buckets=_UNLIMITED, takes_complex=True)
    if order is None:
        return found
    count = len(found.buckets)
    return plan_buckets(
        specs, bucket_bytes=bucket_bytes, max_buckets=count, min_buckets=count, order=order, takes_complex=True
    )


def make_buckets(
    plan: BucketPlan, replicated: Sequence[Replicated], communicator: Communicator, thread: LoopThread
) -> list[GradientBucket]:
    """Return the buckets of ``plan`` in memory that the ranks of this host share.  Raises ``ArenaFull``."""
    by_name = {each.name: each for each in replicated}
    arrays = thread.do(lambda: [communicator.empty(bucket.count, bucket.dtype) for bucket in plan.buckets])
    return [
        GradientBucket(bucket, [by_name[slot.name] for slot in bucket.slots], array)
        for bucket, array in zip(plan.buckets, arrays, strict=True)
    ]


def _view(flat: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a part of ``flat`` with the strides of ``parameter``, or contiguous if that has gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + start)


def _check(member: Replicated, gradient: torch.Tensor) -> None:
    if not gradient.is_cpu or gradient.layout is not torch.strided:
        got = f"one on {gradient.device}" if not gradient.is_cpu else f"one of layout {gradient.layout}"
        raise UsageError(
            f"parameter {member.name}: expected a dense gradient in the CPU's memory, got {got}; "
            "pass Embedding(sparse=True) as it is wrapped or use sparse=False, and torch's DistributedDataParallel for "
            "other devices"
        )
    if gradient.dtype != member.parameter.dtype or gradient.shape != member.parameter.shape:
        raise UsageError(
            f"parameter {member.name}: expected a gradient {member.spec.dtype}{list(member.spec.shape)}, "
            f"got {gradient.dtype}{list(gradient.shape)}; change parameters before they are wrapped"
        )
