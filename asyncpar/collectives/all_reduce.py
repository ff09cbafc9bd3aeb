"""``Communicator.all_reduce``, which is callable and has ``parts``, and the common base of operations on arrays."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np

from asyncpar.collectives import reductions
from asyncpar.collectives.call import ConvertedCall
from asyncpar.collectives.completion.policies import Late, Reduced, Until
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.parts import PartStream
from asyncpar.core.config.names import AllReduceAlgorithm, ReduceOp
from asyncpar.core.foreign_arrays import ArrayT, HostArray, is_foreign
from asyncpar.device.arrays import is_device_array
from asyncpar.errors import UsageError

OwnerT = TypeVar("OwnerT")
MadeT = TypeVar("MadeT")


class EngineOperations:
    """Operations of one group."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _elsewhere(
        self, name: str, x: Any, *arguments: object, key: str | None, stream: object, **options: object
    ) -> Coroutine[Any, Any, Any]:
        """Start operation ``name`` on device arrays, or on arrays of other libraries than numpy."""
        prototype = options.get("out") if x is None else x[0] if isinstance(x, list) else x
        if stream is None and not is_device_array(prototype):
            from asyncpar.collectives import foreign  # most programs need none

            if isinstance(x, list):
                return foreign.start_many(self._engine, self, x, key=key, **options)
            return foreign.start(self._engine, self, name, x, *arguments, key=key, **options)
        return self._on_device(name, x, *arguments, key=key, stream=stream, **options)

    def _on_device(self, name: str, *arguments: object, key: str | None, **options: object) -> Coroutine[Any, Any, Any]:
        from asyncpar.collectives.device import operations  # needed only with devices

        operation, engine = getattr(operations, name), self._engine

        def begin() -> Coroutine[Any, Any, Any]:
            try:
                found: Coroutine[Any, Any, Any] = operation(engine, *arguments, key=key, **options)
            except UsageError as error:
                raise type(error)(f"rank {engine.table.links.rank}: {error}") from error
            return found

        return engine.checked(name, key, begin)


def is_elsewhere(x: object, stream: object) -> bool:
    """Return whether this operation is not on numpy's memory: on a device, or on an array of another library."""
    return stream is not None or is_foreign(x) or is_device_array(x)


class AllReduce(EngineOperations):
    """The operation ``all_reduce`` of a communicator: call it, or get its result in ``parts``."""

    @overload
    def all_reduce(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] = "all",
        late: Late = "drop",
    ) -> Coroutine[Any, Any, ArrayT]: ...

    @overload
    def all_reduce(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Until,
        late: Late = "drop",
    ) -> Coroutine[Any, Any, Reduced]: ...

    @overload
    def all_reduce(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until,
        late: Late = "drop",
    ) -> Coroutine[Any, Any, ArrayT | Reduced]: ...

    def all_reduce(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until = "all",
        late: Late = "drop",
    ) -> Coroutine[Any, Any, ArrayT | Reduced]:
        """Combine ``x`` of all ranks, in place (or into ``out``), and return it.

        ``op`` is sum, mean, prod, min, max, band, bor or bxor.  The result has the same bits on every rank, and again
        whenever the same values are reduced by the same algorithm.  A mean is the sum, divided at the end; in float16,
        which may not hold the sum, each rank's part is divided first (values below 6e-5 lose digits by that).  It needs
        at most 8 MiB of additional memory.  ``all_reduce.parts(x)`` yields finished parts while the rest is in flight.
        ``algorithm`` may set the number of bytes of a chunk in one message, 4k to 2m: ``ring/256k``; the default is 1m.

        ``until`` defines when the operation is complete: "all" waits for all ranks; with a ``Quorum`` or a ``Deadline``
        it continues without late ranks, and returns a ``Reduced``, the same on all ranks, which lists the
        contributors.  Means and sums are then those of the contributors.  The part of a late rank is dropped, or, with
        ``late="next"`` (sums and means), added to its next part with the same ``key``.  Such calls match among
        themselves, by ``key``, in their order.  It raises ``PeerLost`` if so many ranks are lost that the policy cannot
        be met, or no majority is left to decide; ``x`` is then unchanged.

        Without ``algorithm``, one of ``comm.algorithms("all_reduce")``, the cost model chooses.  Calls with equal
        ``key`` match each other, in any order.  ``stream`` is for arrays on CUDA devices.

        Example::

            mean = await comm.all_reduce(np.full(3, comm.rank, "float32"), "mean")
            total = await comm.all_reduce(np.ones(3), out=np.empty(3))  # leaves x as it is
        """
        if until != "all":
            return self._until(x, op, out=out, algorithm=algorithm, key=key, stream=stream, until=until, late=late)
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("all_reduce", x, op=op, out=out, algorithm=algorithm, key=key, stream=stream)
        try:
            return reductions.all_reduce(self._engine, x, op=op, out=out, algorithm=algorithm, key=key)
        except Exception as error:
            self._engine.refuse("all_reduce", error, key)
            raise

    __call__ = all_reduce

    def _until(self, x: ArrayT, op: str, *, stream: object, **options: Any) -> Coroutine[Any, Any, Reduced]:
        from asyncpar.collectives.policy_calls import all_reduce_until  # most programs need none

        if stream is not None or is_device_array(x):
            raise UsageError("until: expected a numpy array and no stream; operations on devices wait for all ranks")
        call = all_reduce_until(self._engine, x, op=op, **options)
        if type(x) is np.ndarray or not is_foreign(x):
            return call
        out = options["out"]
        return ConvertedCall(call, lambda reduced: replace(reduced, values=x if out is None else out))

    def parts(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
    ) -> PartStream:
        """Combine ``x`` of all ranks, in place (or into ``out``), and yield parts of the result as they are finished.

        Each part is a pair ``where, values``: a slice of the flat result, and a view of its elements; see
        ``asyncpar.Part`` and ``asyncpar.PartStream``.  The result has the bits of ``all_reduce(x)``, other ranks may
        call either, and the call takes its place in the order of operations at once.  Parts have about 1 MiB per rank;
        a small result is one part.  Device arrays have no parts: ``UsageError``.
        """
        try:
            if type(x) is not np.ndarray and is_device_array(x):
                raise UsageError("x: expected a numpy array, got one on a device, whose result has no parts")
            return reductions.all_reduce_parts(self._engine, x, op=op, out=out, algorithm=algorithm, key=key)
        except Exception as error:
            self._engine.refuse("all_reduce", error, key)
            raise


class MethodWithParts(Generic[OwnerT, MadeT]):
    """A method that is a callable object: ``make`` builds it from its owner on first access.

    On the class it is ``function``, which does the same as calling the object.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[[OwnerT], MadeT]) -> None:
        self._function = function
        self._make = make
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, operations: None, owner: type) -> Any: ...

    @overload
    def __get__(self, operations: OwnerT, owner: type) -> MadeT: ...

    def __get__(self, operations: OwnerT | None, owner: type) -> Any:
        if operations is None:
            return self._function
        made = vars(operations)[self._name] = self._make(operations)
        return made
