"""The assignment of gradients to buckets: pure data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import UNPLACED, Placement, is_frozen
from asyncpar.core.not_arrays import describe_no_parameter, describe_other
from asyncpar.core.sums import sum_dtype
from asyncpar.device.arrays import device_array, is_device_array
from asyncpar.errors import UsageError
from asyncpar.gradsync.device_sums import added, check_sum

FIRST_BUCKET_BYTES = 1 << 20
_GROWTH = 1.1


_BFLOAT16 = "bfloat16"
"""A dtype that numpy does not count as a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpec:
    """Name, shape, dtype and placement of one gradient, and whether it is on a CUDA device."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    placement: Placement = UNPLACED
    is_on_device: bool = False

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        text = f"{self.name} {'cuda ' if self.is_on_device else ''}{self.dtype}{list(self.shape)}"
        return text if self.placement == UNPLACED else f"{text} {self.placement}"

    @property
    def kind(self) -> tuple[object, ...]:
        """The kind of gradient; those of one kind share buckets.  Each tied tensor has its own, the same on both
        stages.
        """
        return (self.dtype, self.placement, self.name if self.placement.tied is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place ``start:stop`` of one gradient in its bucket, counted in values."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients of one kind that are reduced together, in backward order, without gaps."""

    index: int
    dtype: np.dtype[Any]
    placement: Placement = UNPLACED
    slots: tuple[Slot, ...]

    @property
    def count(self) -> int:
        """Number of values."""
        return self.slots[-1].stop

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(slot.shape for slot in self.slots)

    @property
    def shared_name(self) -> str:
        """A name equal on all ranks that hold the same values of this bucket."""
        return self.placement.tied or self.slots[0].name

    @property
    def turn(self) -> tuple[bool, str, int]:
        """Sort key of buckets that ranks reduce one at a time: ranks of different stages must reach tied ones alike."""
        return self.placement.tied is None, self.placement.tied or "", self.index

    def __str__(self) -> str:
        return f"bucket {self.index} ({self.slots[0].name} to {self.slots[-1].name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """All buckets of a model, starting with the one whose gradients are final first."""

    specs: tuple[GradientSpec, ...]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def order(self) -> tuple[str, ...]:
        """All names, bucket after bucket."""
        return tuple(slot.name for bucket in self.buckets for slot in bucket.slots)


def plan_buckets(
    specs: Sequence[GradientSpec],
    *,
    bucket_bytes: int,
    max_buckets: int,
    min_buckets: int = 0,
    order: Sequence[str] | None = None,
    takes_complex: bool = False,
) -> BucketPlan:
    """Assign every gradient to exactly one bucket, in reverse registration order.

    With ``order``, in that order of names instead, followed by the names it leaves out.  A bucket is closed when one
    more gradient would take it past ``bucket_bytes`` (1 MiB for the first); a larger gradient gets a bucket of its own.
    Each dtype and placement has its own buckets, and each tied tensor one.  If that gives more than ``max_buckets``,
    the limit grows until it does not, and the first bucket is no longer special; if it gives less than ``min_buckets``,
    the largest ones are divided.  Empty gradients are left out.
    ``takes_complex`` admits gradients of complex dtypes, for buckets that no codec compresses.
    """
    _check_specs(specs, np.inexact if takes_complex else np.floating)
    backward = [spec for spec in _in_order(specs, order) if spec.count]
    kinds = {spec.kind for spec in backward}
    if len(kinds) > max_buckets:
        what = "one for each dtype, placement and tied tensor"
        raise UsageError(f"max_buckets: expected at least {len(kinds)}, {what}, got {max_buckets}")
    contents = _fill(backward, first_bytes=min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes=bucket_bytes)
    limit = bucket_bytes
    while len(contents) > max_buckets:
        contents = _fill(backward, first_bytes=limit, bucket_bytes=limit)
        limit = int(limit * _GROWTH) + 1
    while len(contents) < min_buckets and any(len(content) > 1 for content in contents):
        _divide_largest(contents)
    buckets = tuple(_place(index, content) for index, content in enumerate(contents))
    return BucketPlan(specs=tuple(specs), buckets=buckets)


def _fill(specs: Sequence[GradientSpec], *, first_bytes: int, bucket_bytes: int) -> list[list[GradientSpec]]:
    """Return the gradients of each bucket, buckets in order of their first gradient."""
    contents: list[list[GradientSpec]] = []
    current: dict[tuple[object, ...], tuple[list[GradientSpec], int, int]] = {}
    for spec in specs:
        size = spec.count * spec.dtype.itemsize
        content, used, limit = current.get(spec.kind, ([], 0, 0))
        if not content or used + size > limit:
            content, used = [], 0
            limit = bucket_bytes if contents else first_bytes
            contents.append(content)
        content.append(spec)
        current[spec.kind] = (content, used + size, limit)
    return contents


def _divide_largest(contents: list[list[GradientSpec]]) -> None:
    """Divide the largest bucket of several gradients into two that are about equal."""
    index = max(range(len(contents)), key=lambda index: (len(contents[index]) > 1, _nbytes(contents[index])))
    content = contents[index]
    half = min(range(1, len(content)), key=lambda cut: abs(_nbytes(content[:cut]) - _nbytes(content[cut:])))
    contents[index : index + 1] = [content[:half], content[half:]]


def _nbytes(specs: Iterable[GradientSpec]) -> int:
    return sum(spec.count * spec.dtype.itemsize for spec in specs)


def _place(index: int, specs: Sequence[GradientSpec]) -> Bucket:
    slots: list[Slot] = []
    start = 0
    for spec in specs:
        slots.append(Slot(name=spec.name, start=start, stop=start + spec.count, shape=spec.shape))
        start += spec.count
    return Bucket(index=index, dtype=specs[0].dtype, placement=specs[0].placement, slots=tuple(slots))


def _in_order(specs: Sequence[GradientSpec], order: Sequence[str] | None) -> list[GradientSpec]:
    backward = list(reversed(specs))
    if order is None:
        return backward
    place = {name: index for index, name in enumerate(order)}
    return sorted(backward, key=lambda spec: place.get(spec.name, len(place)))


def _check_specs(specs: Sequence[GradientSpec], kind: type[np.inexact[Any]]) -> None:
    seen: set[str] = set()
    ties: dict[str | None, str] = {}
    for spec in specs:
        if spec.name in seen:
            raise UsageError(f"parameters: two are named {spec.name!r}; names must be unique")
        if not (np.issubdtype(spec.dtype, kind) or spec.dtype.name == _BFLOAT16):
            raise UsageError(f"parameter {spec.name}: expected a gradient of a floating dtype, got {spec.dtype}")
        tied = spec.placement.tied
        if tied in ties:
            raise UsageError(
                f"parameter {spec.name}: expected one tensor tied as {tied!r} on a stage, got {ties[tied]}, too"
            )
        if tied is not None:
            ties[tied] = spec.name
        seen.add(spec.name)


class HasGradient(Protocol):
    """Anything with a name and a gradient array, such as ``nn.Parameter``.

    It may also have a ``placement`` (see ``Placement`` for when it is needed), and ``requires_grad``, which is false
    while the parameter is frozen and left out.
    """

    @property
    def name(self) -> str: ...

    @property
    def grad(self) -> NDArray[np.floating[Any]]: ...


class HasParameters(Protocol):
    """Anything that lists this rank's parameters in registration order, such as ``nn.Stage``."""

    def parameters(self) -> Iterable[HasGradient]: ...


Parameters: TypeAlias = Mapping[str, HasGradient]

GradientTree: TypeAlias = "Mapping[str, NDArray[np.floating[Any]] | GradientTree]"
"""Gradients by name, or mappings of them, to any depth; equal on all ranks."""

Gradients: TypeAlias = "Iterable[HasGradient] | GradientTree"


class GradientInTree:
    """The gradient at ``key`` of ``owner``, a mapping; ``name`` is its path, such as ``layer/w``."""

    __slots__ = ("_key", "_owner", "name")

    def __init__(self, name: str, owner: Any, key: str) -> None:
        self.name = name
        self._owner = owner
        self._key = key

    @property
    def grad(self) -> Any:
        return self._owner[self._key]

    @grad.setter
    def grad(self, gradient: Any) -> None:
        self._owner[self._key] = gradient


def gradients_in(tree: Mapping[Any, Any], path: str = "") -> Iterator[GradientInTree]:
    """Yield the gradients of ``tree`` in order.

    Raises ``UsageError`` for keys that are not strings, and for anything but writable arrays.
    """
    for key, value in tree.items():
        if not isinstance(key, str) or not key:
            raise UsageError(f"gradients: expected texts as keys, got {key!r:.80}{f' in {path}' if path else ''}")
        name = f"{path}/{key}" if path else key
        if isinstance(value, Mapping):
            yield from gradients_in(value, name)
            continue
        if not isinstance(value, np.ndarray) and not is_device_array(value):
            raise UsageError(f"gradients: {name}: expected an array, whose mean is written into it, got {value!r:.80}")
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise UsageError(f"gradients: {name}: expected an array that can be written, got a read-only one")
        yield GradientInTree(name, tree, key)


def listed(parameters: Gradients) -> Iterable[HasGradient]:
    """Return the parameters one by one, including those of a plain mapping."""
    return gradients_in(parameters) if isinstance(parameters, Mapping) else parameters


def parameters_by_name(parameters: Gradients) -> dict[str, HasGradient]:
    """Return parameters by name, in registration order.  Raises ``UsageError`` for a name that occurs twice."""
    by_name: dict[str, HasGradient] = {}
    for parameter in listed(parameters):
        name = name_of(parameter)
        if name in by_name:
            raise UsageError(f"parameters: two are named {name!r}; names must be unique")
        by_name[name] = parameter
    return by_name


def name_of(parameter: HasGradient) -> str:
    """Return the name of ``parameter``.  Raises ``UsageError`` for anything else: an array, or a tensor of torch."""
    name: str | None = getattr(parameter, "name", None)  # a tensor has a name, which is None
    if name is None:
        raise UsageError(describe_no_parameter(parameter))
    return name


def trained(parameters: Parameters) -> dict[str, HasGradient]:
    """Return ``parameters`` without the frozen ones."""
    return {name: parameter for name, parameter in parameters.items() if not is_frozen(parameter)}


def frozen_in(parameters: Parameters) -> dict[str, Placement]:
    """Return the placements of the frozen ones of ``parameters``."""
    return {name: getattr(one, "placement", UNPLACED) for name, one in parameters.items() if is_frozen(one)}


def gradient_of(parameter: HasGradient, *, writes: bool = False) -> Any:
    """Return the gradient of ``parameter``, an array of numpy or on a device, writable if ``writes``.

    Raises ``UsageError`` naming the parameter for anything else.
    """
    what = f"parameter {name_of(parameter)}: expected an array as its gradient"
    try:
        gradient: Any = parameter.grad
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}, but reading it raises {type(error).__name__}: {error}") from error
    if gradient is None:
        raise UsageError(f"{what}, got None; leave out parameters without a gradient, on all ranks, or give it zeros")
    if not isinstance(gradient, np.ndarray):
        if is_device_array(gradient):
            return gradient
        raise UsageError(f"{what}, got {describe_other(gradient, 'tensor')}")
    if writes and not gradient.flags.writeable:
        raise UsageError(f"{what} that can be written, got a read-only one; give the parameter a copy of it")
    return gradient


def check_final(specs: Iterable[GradientSpec], parameters: Parameters, *, as_views: bool) -> None:
    """Raise ``UsageError`` naming the parameter unless means can be written to all gradients.

    ``as_views``: each is replaced by another array.  After this check, writing cannot fail.
    """
    for spec in specs:
        parameter = parameters[spec.name]
        gradient = gradient_of(parameter, writes=not as_views)
        if not isinstance(gradient, np.ndarray):
            if not device_array(gradient, f"gradient of {spec.name}").is_writable:
                raise UsageError(f"parameter {spec.name}: expected a gradient that can be written, got a read-only one")
        elif (gradient.shape, gradient.dtype) != (spec.shape, spec.dtype):
            raise UsageError(
                f"parameter {spec.name}: expected a gradient as when the step began, {spec}, "
                f"got {gradient.dtype}{list(gradient.shape)}"
            )
        if as_views:
            set_gradient(parameter, gradient)


def set_gradient(parameter: HasGradient, gradient: Any) -> None:
    """Replace the gradient array of ``parameter``.  Raises ``UsageError`` if it does not accept one."""
    settable: Any = parameter
    try:
        settable.grad = gradient
    except AttributeError as error:
        raise UsageError(
            f"gradient_as_bucket_view: expected a grad that can be set on {parameter.name}; give its class a setter, "
            "or leave gradient_as_bucket_view out"
        ) from error


def spec_of(parameter: HasGradient) -> GradientSpec:
    """Return the specification of a parameter's gradient."""
    placement = getattr(parameter, "placement", UNPLACED)
    if not isinstance(placement, Placement):
        raise UsageError(f"parameter {parameter.name}: expected a Placement as its placement, got {placement!r}")
    gradient = gradient_of(parameter)
    is_on_device = not isinstance(gradient, np.ndarray) and is_device_array(gradient)
    described = device_array(gradient, f"gradient of {parameter.name}") if is_on_device else gradient
    return GradientSpec(
        name=parameter.name,
        shape=described.shape,
        dtype=described.dtype,
        placement=placement,
        is_on_device=is_on_device,
    )


@dataclass(slots=True)
class Accumulation:
    """Sums of gradients by parameter's name, and the number of micro-steps.

    They have the shapes and dtypes of the gradients; those of two bytes are added up in float32.
    """

    sums: dict[str, Any] = field(default_factory=dict)
    micro_steps: int = 0
    _dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict)
    """The dtypes of the gradients."""

    def add(self, parameters: Sequence[HasGradient]) -> None:
        """Add the gradients and zero them.  Raises ``UsageError``, with nothing added, for ones that do not fit."""
        if self.micro_steps:
            self.check(parameter.name for parameter in parameters)
        gradients = [gradient_of(parameter, writes=True) for parameter in parameters]
        for parameter, found in zip(parameters, gradients, strict=True):
            kept, gradient = self.sums.get(parameter.name), found
            if is_device_array(gradient):
                check_sum(kept, gradient, parameter.name)
                gradient = device_array(gradient, parameter.name)
            dtype = self._dtypes.get(parameter.name, gradient.dtype)
            if kept is not None and (kept.shape, dtype) != (gradient.shape, gradient.dtype):
                raise UsageError(
                    f"parameter {parameter.name}: expected a gradient as in earlier micro-steps, "
                    f"{dtype}{list(kept.shape)}, got {gradient.dtype}{list(gradient.shape)}"
                )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._dtypes[parameter.name] = gradient.dtype
            if is_device_array(gradient):
                self.sums[parameter.name] = added(self.sums.get(parameter.name), gradient, parameter.name)
                continue
            if parameter.name in self.sums:
                self.sums[parameter.name] += gradient
            else:
                self.sums[parameter.name] = gradient.astype(sum_dtype(gradient.dtype))
            gradient.fill(0.0)
        self.micro_steps += 1

    def check(self, names: Iterable[str]) -> None:
        """Raise ``UsageError`` unless ``names`` are the accumulated ones, or nothing is accumulated."""
        odd = sorted(set(names) ^ set(self.sums)) if self.micro_steps else []
        if odd:
            raise UsageError(f"parameters: expected those of earlier micro-steps, but {odd[0]!r} is in one set only")

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return sum(values.nbytes for values in self.sums.values())

    def clear(self) -> None:
        """Forget all sums."""
        self.sums, self.micro_steps, self._dtypes = {}, 0, {}
