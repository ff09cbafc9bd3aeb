"""The phases of a step, in their order, as named functions over one bucket.

1. ``pack``: gradients, with what micro-steps have accumulated, go into the bucket.
2. ``tensor_parallel_phase``: the bucket of parameters that every tensor-parallel rank holds whole is averaged, or
   summed, over these ranks.  Slices are never added.
3. ``pipeline_phase``: the bucket of a tied tensor is summed over the first and the last stage; others take no part.
4. ``data_parallel_phase``: the bucket is encoded, reduced over replicas, and decoded, as its scheme does it.
5. ``unpack``: the mean goes back into the gradients, once all buckets of all ranks have come through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.owed import OwedCollective
from asyncpar.core.config.placement import Replication
from asyncpar.errors import UsageError
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.model import HasGradient, Parameters
from asyncpar.gradsync.plan import Bucket, Slot
from asyncpar.gradsync.schemes import Place, ReductionStep, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where gradients come from: ``(grad + accumulated) / micro_steps``.

    With ``as_views`` they lie in the bucket already, and nothing is copied.
    """

    parameters: Parameters
    accumulated: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    micro_steps: int = 1
    as_views: bool = False


def pack(scheme: Scheme, packing: Packing) -> None:
    """Copy the gradients into the bucket, unless they lie there."""
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, and is found by whoever encodes it
        for slot in scheme.bucket.slots:
            place = scheme.flat[slot.start : slot.stop].reshape(slot.shape)
            gradient = packing.parameters[slot.name].grad
            if not (packing.as_views and gradient.ctypes.data == place.ctypes.data):
                np.copyto(place, gradient, casting="same_kind")
            if packing.micro_steps > 1:
                place += packing.accumulated[slot.name]
                place /= packing.micro_steps


def tensor_parallel_phase(scheme: Scheme, groups: SyncGroups, key: Name) -> OwedCollective[Any] | None:
    """Return the reduction over tensor-parallel ranks; None where the bucket or the configuration has none."""
    replicated, tp = scheme.bucket.placement.replicated, groups.tp
    if tp is None or replicated is None:
        return None
    op = "mean" if replicated is Replication.WHOLE else "sum"
    return OwedCollective(lambda: tp.all_reduce(scheme.payload, op=op, key=str(key)))


def pipeline_phase(scheme: Scheme, groups: SyncGroups, key: Name) -> OwedCollective[Any] | None:
    """Return the sum of a tied tensor over the first and the last stage; None where there is nothing to add."""
    tied, embedding = scheme.bucket.placement.tied, groups.embedding
    if embedding is None or tied is None:
        return None
    return OwedCollective(lambda: embedding.all_reduce(scheme.payload, key=str(key)))


def data_parallel_phase(scheme: Scheme, key: Name, place: Place) -> Sequence[ReductionStep]:
    """Return the steps over replicas."""
    return scheme.reduction_steps(key, place)


def unpack(scheme: Scheme, parameters: Parameters, *, factor: float) -> None:
    """Write the reduced bucket times ``factor`` back into the gradients."""
    for slot in scheme.bucket.slots:
        gradient = parameters[slot.name].grad
        reduced = scheme.result[slot.start : slot.stop].reshape(slot.shape)
        if factor == 1.0:
            np.copyto(gradient, reduced, casting="same_kind")
        else:
            np.multiply(reduced, np.asarray(factor, reduced.dtype), out=gradient, casting="same_kind")


def unpack_as_views(scheme: Scheme, parameters: Parameters, *, factor: float) -> None:
    """Make the gradients views of the reduced bucket, after it was multiplied by ``factor``."""
    if factor != 1.0:
        scheme.result *= np.asarray(factor, scheme.result.dtype)
    for slot in scheme.bucket.slots:
        bind(parameters[slot.name], slot, scheme.result)
    scheme.swap()


def bind(parameter: HasGradient, slot: Slot, flat: NDArray[Any]) -> None:
    """Make ``parameter.grad`` the part of ``flat`` that ``slot`` says."""
    view = flat[slot.start : slot.stop].reshape(slot.shape)
    if view.dtype != parameter.grad.dtype:
        raise UsageError(
            f"gradient_as_bucket_view: expected gradients of {view.dtype}, which is what the bucket holds, "
            f"got {parameter.grad.dtype} of {parameter.name}"
        )
    try:
        cast(Any, parameter).grad = view
    except AttributeError as error:
        raise UsageError(f"gradient_as_bucket_view: expected a grad that can be set on {parameter.name}") from error


def find_non_finite(bucket: Bucket, packed: NDArray[Any]) -> list[str]:
    """Return the names of the parameters whose values in ``packed`` are not all finite."""
    return [slot.name for slot in bucket.slots if not np.isfinite(packed[slot.start : slot.stop]).all()]
