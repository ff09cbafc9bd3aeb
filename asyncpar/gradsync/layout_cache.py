"""Caches the layout between steps, carries residuals and codec state over to a new one, and packs gradients into it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import AnyCodec, Identity, Values
from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.core.config.placement import Placement
from asyncpar.core.config.rank_order import RankOrder
from asyncpar.core.sums import narrowed
from asyncpar.errors import UsageError
from asyncpar.gradsync.choice import Resolved, resolve
from asyncpar.gradsync.config import GradientBucketingConfig, GradientCompressionConfig, NonFinitePolicy
from asyncpar.gradsync.device_choice import DeviceWants
from asyncpar.gradsync.device_sums import Sums
from asyncpar.gradsync.groups import HostGroups, SyncGroups
from asyncpar.gradsync.layout import BucketLayout, SchemeMaker, algorithm_of, is_alike, make_layout
from asyncpar.gradsync.plan import (
    BucketPlan,
    GradientSpec,
    HasGradient,
    Parameters,
    Slot,
    gradient_of,
    plan_buckets,
    set_gradient,
    spec_of,
)
from asyncpar.gradsync.schemes import Exact, Scheme
from asyncpar.gradsync.schemes.device import DeviceScheme, HostMirrors
from asyncpar.gradsync.schemes.device_memory import DevicePlace
from asyncpar.gradsync.tuning import AUTO, Choice

T = TypeVar("T")

_RESIDUAL = "residual/"
_LACKING = "lacking/"
_CODEC = "codec/"
_ORDER = "order"
_CHOICE = "choice of auto"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """Immutable settings of a synchronizer.

    ``hosts``, if given, are the groups that the hierarchical strategy uses as hosts.
    """

    groups: SyncGroups
    rank_order: RankOrder
    hosts: HostGroups | None = None
    bucketing: GradientBucketingConfig
    strategy: CommunicationStrategy
    policy: NonFinitePolicy


@dataclass(slots=True)
class _Kept:
    """Residuals and codec state for the next layout: float32 vectors by parameter's name.

    ``lacking`` is the amount missing from means, equal on all replicas; it becomes residuals in the next layout, since
    only then is it known which ranks have any.  While there is a layout, this holds the vectors of parameters that are
    not in it because they are frozen.
    """

    residuals: dict[str, Values] = field(default_factory=dict)
    codec_state: dict[str, Values] = field(default_factory=dict)
    lacking: dict[str, Values] = field(default_factory=dict)

    def of(self, names: Collection[str]) -> _Kept:
        """Return the vectors kept for ``names``."""
        return _Kept(
            {name: values for name, values in self.residuals.items() if name in names},
            {name: values for name, values in self.codec_state.items() if name in names},
            {name: values for name, values in self.lacking.items() if name in names},
        )


class LayoutCache:
    """Caches the layout of buckets; ``change`` changes ``compression`` between steps, on all ranks alike."""

    def __init__(self, settings: SyncSettings, compression: GradientCompressionConfig) -> None:
        self._settings = settings
        self._layout: BucketLayout | None = None
        self._resolved: Resolved | None = None
        self._chosen: str | None = None
        self._kept = _Kept()
        self._specs: dict[str, GradientSpec] = {}
        self._order: tuple[str, ...] | None = None
        self._place: DevicePlace | None = None
        self._tuned: Choice | None = None
        self.compression = compression
        self.is_observed = False
        """Whether the order in which gradients become final has been observed."""
        self._check_views()

    @property
    def layout(self) -> BucketLayout | None:
        """The layout of the last step; None when the next one makes a new one."""
        return self._layout

    @property
    def codec_table(self) -> str:
        """The table of the measurements and choice of ``"auto"``; empty if it had no choice."""
        return "" if self._resolved is None else self._resolved.table()

    @property
    def must_measure(self) -> bool:
        """Whether ``resolve`` exchanges anything."""
        is_open = self._resolved is None and self._chosen is None
        return is_open and self.compression.is_automatic and self._settings.groups.everyone.size > 1

    async def resolve(self, key: str) -> Resolved:
        """Determine the codec in force, which takes an exchange between ranks where it is ``"auto"``."""
        if self._resolved is None:
            is_hierarchical = self._settings.strategy is CommunicationStrategy.HIERARCHICAL_ALL_REDUCE
            groups, hosts = self._settings.groups, self._settings.hosts
            self._resolved = await resolve(
                self.compression, groups, is_hierarchical=is_hierarchical, key=key, given=hosts, chosen=self._chosen
            )
            self._check_views()
        return self._resolved

    def lay_out(
        self, by_name: Parameters, resolved: Resolved, *, frozen: Mapping[str, Placement] = MappingProxyType({})
    ) -> BucketLayout:
        """Return the layout for these gradients; if they are new, plan it and allocate its buffers.

        ``frozen`` are parameters that currently have none.

        Raises ``UsageError`` for a gradient whose shape or dtype is not that of earlier steps.
        """
        specs = tuple(spec_of(parameter) for parameter in by_name.values())
        replicas = self._settings.groups.replicas
        place = DevicePlace.of(by_name, replicas) if any(spec.is_on_device for spec in specs) else None
        if self._layout is not None and self._layout.describes(specs, frozen) and self._place == place:
            return self._layout
        self._check_same(specs)
        self._settings.groups.check_ties(specs)
        self._place = place
        settled = resolved.settled(sum(spec.count for spec in specs))
        wanted = self._on_devices(settled)
        if place is not None:
            wanted.check()
        self.drop()  # its memory can be used for the new one
        self._resolved = settled
        mirrors = None
        if place is not None and wanted.is_staged(place):
            mirrors, place = HostMirrors(by_name, place), None
        layout = replace(self._make(specs, self._resolved, place, frozen), mirrors=mirrors)
        layout.restore(self._kept.residuals, self._kept.lacking, self._kept.codec_state)
        if not self._has_feedback(settled.codec):
            self._warn_of([spec.name for spec in specs if spec.name in self._kept.lacking])
        if self._settings.bucketing.gradient_as_bucket_view:
            bind_views(layout, by_name)
        self._layout, self._kept = layout, self._kept.of(frozen if self.compression.error_feedback else ())
        self._specs |= {spec.name: spec for spec in specs}
        return layout

    def observe(self, order: Sequence[str]) -> None:
        """Make the next layout follow ``order``, in which gradients became final, if that differs from the plan."""
        self.is_observed = True
        assert self._layout is not None, "a step is just over"
        plan = self._layout.plan
        if order and plan.order != self._plan(plan.specs, tuple(order)).order:
            self._order = tuple(order)
            self.drop()

    def change(self, compression: GradientCompressionConfig) -> None:
        """Use ``compression`` from now on."""
        self.drop()
        self.compression, self._resolved, self._chosen = compression, None, None
        self._check_views()

    def rebucket(self, bucketing: GradientBucketingConfig) -> None:
        """Fuse gradients by ``bucketing`` from now on.  Raises ``UsageError``, with nothing changed, if it cannot."""
        before = self._settings
        self._settings = replace(before, bucketing=bucketing)
        try:
            self._check_views()
        except UsageError:
            self._settings = before
            raise
        self.drop()

    def tune(self, choice: Choice | None) -> None:
        """Use the bucket size and the algorithm of ``choice`` from now on; None: those of the settings."""
        size = self._bucket_size_mb
        self._tuned = choice
        if self._bucket_size_mb != size:
            self.drop()
        for scheme in () if self._layout is None else self._layout.schemes:
            if isinstance(scheme, Exact):
                scheme.algorithm = self._algorithm

    def bucket_bytes(self, specs: Sequence[GradientSpec], bucket_size_mb: float) -> tuple[int, ...]:
        """Return the bytes of the buckets of these gradients, for a bucket size in MiB."""
        plan = self._plan(specs, self._order, bucket_size_mb)
        return tuple(bucket.nbytes for bucket in plan.buckets)

    @property
    def _bucket_size_mb(self) -> float:
        return self._settings.bucketing.bucket_size_mb if self._tuned is None else self._tuned.bucket_size_mb

    @property
    def _algorithm(self) -> AllReduceAlgorithm | None:
        if self._tuned is not None and self._tuned.algorithm != AUTO:
            return self._tuned.name
        return algorithm_of(self._settings.strategy, self._settings.groups.replicas)

    def drop(self) -> None:
        """Free the buffers, but keep the state of parameters."""
        if self._layout is not None:
            residuals = {name: residual.copy() for name, residual in self._layout.residuals()}
            codec_state = self._kept.codec_state | self._layout.codec_state()
            self._kept = _Kept(self._kept.residuals | residuals, codec_state, self._kept.lacking)
            self._layout.close()
            self._layout = None

    def start_over(self) -> None:
        """Forget everything in which ranks may differ: the layout, the observed order, and the measurements."""
        self.drop()
        self._specs, self._order, self.is_observed, self._resolved, self._chosen = {}, None, False, None, None

    def clear(self) -> None:
        """Forget everything."""
        self.start_over()
        self._kept = _Kept()

    def residuals(self) -> dict[str, Values]:
        """Return a copy of each parameter's residual, flat, by name."""
        return {name: residual.copy() for name, residual in self._all_residuals()}

    def residual_norm(self) -> float:
        """Return the norm of all residuals of this rank."""
        return math.sqrt(sum(float(np.vdot(values, values)) for _, values in self._all_residuals()))

    def _all_residuals(self) -> Iterator[tuple[str, Values]]:
        yield from self._kept.residuals.items()
        yield from self._kept.lacking.items()
        if self._layout is not None:
            yield from self._layout.residuals()

    @property
    def nbytes(self) -> int:
        """Bytes of buckets and their encoding buffers, and of codec state that waits for the next layout."""
        waiting = sum(values.nbytes for values in self._kept.codec_state.values())
        return waiting + (0 if self._layout is None else self._layout.nbytes)

    @property
    def residual_nbytes(self) -> int:
        """Bytes used by error feedback."""
        waiting = [*self._kept.residuals.values(), *self._kept.lacking.values()]
        return sum(values.nbytes for values in waiting) + (0 if self._layout is None else self._layout.residual_nbytes)

    def restore_residuals(self, residuals: Mapping[str, Values]) -> None:
        """Replace the residuals."""
        self.drop()
        self._kept.residuals = {name: _flat_copy(values) for name, values in residuals.items()}
        self._kept.lacking = {}

    def owe(self, lacking: Mapping[str, Values]) -> list[str]:
        """Compensate for what means lack, equal on all replicas, by residuals of the next layout, replacing others.

        Returns the names of parameters that cannot be compensated, because nothing is encoded with error feedback.
        """
        self.drop()
        self._kept.residuals, self._kept.lacking = {}, {}
        codec = None if self.compression.is_automatic else self.compression.make_codec()
        if not self._has_feedback(codec):
            return [name for name, values in lacking.items() if np.any(values)]
        self._kept.lacking = {name: _flat_copy(values) for name, values in lacking.items()}
        return []

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of residuals, codec state, the observed order of gradients and the choice of ``"auto"``."""
        codec = self._kept.codec_state | ({} if self._layout is None else self._layout.codec_state())
        residuals = self._kept.residuals | ({} if self._layout is None else dict(self._layout.residuals()))
        state: dict[str, NDArray[Any]] = {f"{_RESIDUAL}{name}": values.copy() for name, values in residuals.items()}
        state |= {f"{_LACKING}{name}": values.copy() for name, values in self._kept.lacking.items()}
        state |= {f"{_CODEC}{name}": kept.copy() for name, kept in codec.items()}
        if self.is_observed and self._order is not None:
            state[_ORDER] = _json(self._order)
        if self._choice is not None:
            state[_CHOICE] = _json(self._choice)
        return state

    @property
    def _choice(self) -> str | None:
        """The name of the codec that ``"auto"`` stands for, once it is known for these gradients."""
        is_known = self.compression.is_automatic and self._resolved is not None and bool(self._specs)
        return self._resolved.codec.name if is_known and self._resolved is not None else self._chosen

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of ``state``."""
        self.drop()
        self._kept, self._resolved, self._chosen = _Kept(), None, None
        for key, values in state.items():
            if key.startswith(_RESIDUAL):
                self._kept.residuals[key.removeprefix(_RESIDUAL)] = _flat_copy(values)
            elif key.startswith(_LACKING):
                self._kept.lacking[key.removeprefix(_LACKING)] = _flat_copy(values)
            elif key.startswith(_CODEC):
                self._kept.codec_state[key.removeprefix(_CODEC)] = _flat_copy(values)
            elif key == _ORDER:
                self._order, self.is_observed = _decoded(key, values, tuple[str, ...]), True
            elif key == _CHOICE:
                self._chosen = _decoded(key, values, str)
            else:
                raise UsageError(
                    f"state: expected {_ORDER}, {_CHOICE} and names that begin with {_RESIDUAL}, {_LACKING} or "
                    f"{_CODEC}, got {key!r}"
                )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _has_feedback(self, codec: AnyCodec | None) -> bool:
        """Return whether ``codec`` can leave residuals; None stands for the codec still to be chosen."""
        return (
            self.compression.error_feedback
            and self._settings.groups.replicas.size > 1
            and not isinstance(codec, Identity)
        )

    def _warn_of(self, lost: Sequence[str]) -> None:
        if lost and self._settings.groups.replicas.rank == 0:
            names = ", ".join(lost)
            _log.warning(
                "residuals of compression from before are dropped without a codec and error feedback: %s", names
            )

    def _plan(
        self, specs: Sequence[GradientSpec], order: tuple[str, ...] | None, bucket_size_mb: float | None = None
    ) -> BucketPlan:
        size = self._bucket_size_mb if bucket_size_mb is None else bucket_size_mb
        most = self._settings.bucketing.max_buckets
        return plan_buckets(specs, bucket_bytes=int(size * (1 << 20)), max_buckets=most, order=order)

    def _make(
        self,
        specs: Sequence[GradientSpec],
        resolved: Resolved,
        place: DevicePlace | None,
        frozen: Mapping[str, Placement],
    ) -> BucketLayout:
        settings, groups, replicas = self._settings, self._settings.groups, self._settings.groups.replicas
        alike = groups.is_data_parallel_only or (
            not resolved.adds_in_hosts
            and is_alike(settings.strategy, replicas, groups.host_patterns, codec=resolved.codec)
        )
        maker = SchemeMaker(
            groups=groups,
            hosts=resolved.hosts,
            codec=resolved.codec,
            has_feedback=self.compression.error_feedback,
            algorithm=self._algorithm,
            as_views=settings.bucketing.gradient_as_bucket_view,
            is_alike=alike,
            place=place,
        )
        compression = f"{self.compression}, {resolved.codec.name} in force"
        agreed = (
            str(settings.bucketing),
            compression,
            f"when not finite: {settings.policy}",
            f"strategy {settings.strategy}",
            f"ranks laid out as {settings.rank_order}",
        )
        plan = self._plan(specs, self._order)
        return make_layout(plan, agreed, maker, is_observed=self._order is not None, frozen=frozen)

    def _check_same(self, specs: Sequence[GradientSpec]) -> None:
        for spec in specs:
            before = self._specs.get(spec.name)
            if before is not None and before != spec:
                raise UsageError(
                    f"parameter {spec.name}: expected a gradient as in earlier steps, {before}, got {spec}; "
                    "call clear_buffers first where that is meant"
                )

    def _on_devices(self, resolved: Resolved) -> DeviceWants:
        settings = self._settings
        return DeviceWants(
            codec=resolved.codec,
            groups=settings.groups,
            policy=settings.policy,
            as_views=settings.bucketing.gradient_as_bucket_view,
            by_hosts=resolved.hosts is not None,
        )

    def release(self) -> None:
        """Free memory on devices; the next step allocates it again."""
        layout = self._layout
        if layout is not None and (layout.mirrors or any(isinstance(one, DeviceScheme) for one in layout.schemes)):
            self.drop()

    def _check_views(self) -> None:
        """Raise ``UsageError`` if gradients cannot be views of buckets because something would reduce them in place."""
        settings = self._settings
        if not settings.bucketing.gradient_as_bucket_view:
            return
        groups = settings.groups
        if groups.everyone.size != groups.replicas.size:
            raise UsageError("gradient_as_bucket_view: not with tensor or pipeline parallelism")
        if settings.policy is NonFinitePolicy.DROP:
            raise UsageError("gradient_as_bucket_view: not with when_not_finite = drop")
        if self._resolved is not None and self._resolved.hosts is not None:
            raise UsageError("gradient_as_bucket_view: not with a codec between hosts only")


def bind_views(layout: BucketLayout, by_name: Parameters) -> None:
    """Move the gradients into the buckets."""
    for scheme in layout.schemes:
        pack(scheme, Packing(parameters=by_name))
        for slot in scheme.bucket.slots:
            bind(by_name[slot.name], slot, scheme.flat)


def _json(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(msgspec.json.encode(value), np.uint8).copy()


def _decoded(key: str, values: NDArray[Any], kind: type[T]) -> T:
    try:
        return msgspec.json.decode(np.asarray(values, np.uint8).tobytes(), type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"state: expected JSON in {key}, but {error}") from error


def _flat_copy(values: NDArray[Any]) -> Values:
    return np.array(values, np.float32).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The source of gradients to pack: ``(grad + accumulated) / micro_steps``.

    With ``as_views`` they are in the bucket already, and nothing is copied.
    """

    parameters: Parameters
    accumulated: Sums = field(default_factory=dict)
    micro_steps: int = 1
    as_views: bool = False
    fetch: Callable[[Iterable[str]], None] | None = None
    """Fetches the gradients of the named parameters before they are read."""


def pack(scheme: Scheme, packing: Packing) -> None:
    """Copy the gradients into the bucket, unless they are there already."""
    if isinstance(scheme, DeviceScheme):
        scheme.pack(packing.parameters)
        if packing.micro_steps > 1:
            scheme.add_micro_steps(packing.accumulated, packing.micro_steps)
        return
    if packing.fetch is not None:
        packing.fetch(slot.name for slot in scheme.bucket.slots)
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, which encoding finds
        for slot in scheme.bucket.slots:
            place = scheme.flat[slot.start : slot.stop].reshape(slot.shape)
            gradient = gradient_of(packing.parameters[slot.name])
            if gradient.shape != slot.shape:
                raise UsageError(
                    f"parameter {slot.name}: expected a gradient of {list(slot.shape)}, got {list(gradient.shape)}"
                )
            if not (packing.as_views and gradient.ctypes.data == place.ctypes.data):
                np.copyto(place, gradient, casting="same_kind")
            if packing.micro_steps > 1:
                total = packing.accumulated[slot.name] + place  # in the dtype of sums, rounded once
                place[...] = narrowed(total / np.asarray(packing.micro_steps, total.dtype), place.dtype)


def unpack(scheme: Scheme, parameters: Parameters, *, factor: float) -> None:
    """Write the reduced bucket times ``factor`` back into the gradients."""
    if isinstance(scheme, DeviceScheme):
        scheme.unpack(parameters, factor=factor)
        return
    for slot in scheme.bucket.slots:
        gradient = parameters[slot.name].grad
        reduced = scheme.result[slot.start : slot.stop].reshape(slot.shape)
        if factor == 1.0:
            np.copyto(gradient, reduced, casting="same_kind")
        else:
            np.multiply(reduced, np.asarray(factor, reduced.dtype), out=gradient, casting="same_kind")


def unpack_as_views(scheme: Scheme, parameters: Parameters, *, factor: float) -> None:
    """Make the gradients views of the reduced bucket, after multiplying it by ``factor``."""
    if factor != 1.0:
        scheme.result *= np.asarray(factor, scheme.result.dtype)
    for slot in scheme.bucket.slots:
        bind(parameters[slot.name], slot, scheme.result)
    scheme.swap()


def bind(parameter: HasGradient, slot: Slot, flat: NDArray[Any]) -> None:
    """Make ``parameter.grad`` the part of ``flat`` at ``slot``."""
    view = flat[slot.start : slot.stop].reshape(slot.shape)
    if view.dtype != parameter.grad.dtype:
        raise UsageError(
            f"gradient_as_bucket_view: expected gradients of {view.dtype}, which is what the bucket holds, "
            f"got {parameter.grad.dtype} of {parameter.name}"
        )
    set_gradient(parameter, view)


def take_final_of(layout: BucketLayout, parameters: Parameters) -> Callable[[int | None, str], None] | None:
    """Return the callback for final gradients in a new step; None for gradients on the host, final at once."""
    mirrors = layout.mirrors
    if mirrors is not None:
        mirrors.begin_step()
        return lambda _, name: mirrors.take_final(name, parameters[name].grad)
    schemes = {scheme.bucket.index: scheme for scheme in layout.schemes if isinstance(scheme, DeviceScheme)}
    if not schemes:
        return None
    for scheme in schemes.values():
        scheme.memory.begin_step()

    def take_final(index: int | None, name: str) -> None:
        if index is not None:
            schemes[index].memory.take_final(parameters[name].grad)

    return take_final


def find_non_finite(scheme: Scheme) -> list[str]:
    """Return the names of the parameters whose values in the bucket are not all finite."""
    if isinstance(scheme, DeviceScheme):
        return scheme.find_non_finite()
    packed = scheme.payload
    return [slot.name for slot in scheme.bucket.slots if not np.isfinite(packed[slot.start : slot.stop]).all()]


def owed_parameter(key: str) -> str | None:
    """Return the parameter whose residual ``state`` stores as ``key``; None if it is something else."""
    prefix = next((prefix for prefix in (_RESIDUAL, _LACKING) if key.startswith(prefix)), None)
    return None if prefix is None else key.removeprefix(prefix)


def is_of_codec(key: str) -> bool:
    """Return whether the entry ``key`` of ``state`` belongs to a codec."""
    return key.startswith(_CODEC)
