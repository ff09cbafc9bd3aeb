"""``Communicator.all_reduce``, which is called, and has ``parts``; and what operations on arrays have in common."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np

from asyncpar.collectives import reductions
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.completion.policies import Late, Reduced, Until
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.parts import PartStream
from asyncpar.core.config.names import AllReduceAlgorithm, ReduceOp
from asyncpar.device.arrays import is_device_array
from asyncpar.errors import UsageError

OwnerT = TypeVar("OwnerT")
MadeT = TypeVar("MadeT")


class EngineOperations:
    """Operations of one group."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _on_device(self, name: str, *arguments: object, key: str | None, **options: object) -> Coroutine[Any, Any, Any]:
        """Start operation ``name`` on device arrays."""
        from asyncpar.collectives.device import operations  # needed by those who have devices only

        operation, engine = getattr(operations, name), self._engine

        def begin() -> Coroutine[Any, Any, Any]:
            try:
                found: Coroutine[Any, Any, Any] = operation(engine, *arguments, key=key, **options)
            except UsageError as error:
                raise type(error)(f"rank {engine.table.links.rank}: {error}") from error
            return found

        return engine.checked(name, key, begin)


def is_for_device(x: object, stream: object) -> bool:
    """Is this an operation on a device array?  One that names a stream must be."""
    return stream is not None or is_device_array(x)


class AllReduce(EngineOperations):
    """The operation ``all_reduce`` of a communicator: call it, or have its result in ``parts``."""

    @overload
    def all_reduce(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] = "all",
        late: Late = "drop",
    ) -> Coroutine[Any, Any, Array]: ...

    @overload
    def all_reduce(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Until,
        late: Late = "drop",
    ) -> Coroutine[Any, Any, Reduced]: ...

    @overload
    def all_reduce(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until,
        late: Late = "drop",
    ) -> Coroutine[Any, Any, Array | Reduced]: ...

    def all_reduce(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until = "all",
        late: Late = "drop",
    ) -> Coroutine[Any, Any, Array | Reduced]:
        """Combine ``x`` of all ranks, in place (or into ``out``), and return it.

        ``op`` is sum, mean, prod, min, max, band, bor or bxor.  The result has the same bits on every rank, and again
        whenever the same values are reduced by the same algorithm.  A mean is the sum, divided at the end; in float16,
        which may not hold the sum, each rank's part is divided first (values below 6e-5 lose digits by that).  Needs
        8 MiB of memory besides at most.  ``all_reduce.parts(x)`` gives finished parts while the rest travels.
        ``algorithm`` may say how many bytes of a chunk go in one message, 4k to 2m: ``ring/256k``; 1m without it.

        ``until`` says when the operation is complete: "all" waits for all ranks; with a ``Quorum`` or a ``Deadline`` it
        goes on without those that are late, and returns a ``Reduced``, the same on all ranks, which says who has
        contributed.  A mean is then that of the contributors, a sum theirs.  The part of a rank that is late is
        dropped, or, with ``late="next"`` (sums and means), added to its next part with the same ``key``.  Such calls
        match among themselves, by ``key``, in their order.  ``PeerLost`` where so many ranks are lost that the policy
        cannot be met, or no majority is left to decide; ``x`` is as before then.

        Without ``algorithm``, one of ``comm.algorithms("all_reduce")``, the cost model chooses.  Calls with the same
        ``key`` meet by it, in any order.  ``stream`` is for arrays on CUDA devices.

        Example::

            mean = await comm.all_reduce(np.full(3, comm.rank, "float32"), "mean")
            total = await comm.all_reduce(np.ones(3), out=np.empty(3))  # leaves x as it is
        """
        if until != "all":
            return self._until(x, op, out=out, algorithm=algorithm, key=key, stream=stream, until=until, late=late)
        if (type(x) is not np.ndarray or stream is not None) and is_for_device(x, stream):
            return self._on_device("all_reduce", x, op=op, out=out, algorithm=algorithm, key=key, stream=stream)
        try:
            return reductions.all_reduce(self._engine, x, op=op, out=out, algorithm=algorithm, key=key)
        except Exception as error:
            self._engine.refuse("all_reduce", error, key)
            raise

    __call__ = all_reduce

    def _until(self, x: Array, op: str, *, stream: object, **options: Any) -> Coroutine[Any, Any, Reduced]:
        from asyncpar.collectives.policy_calls import all_reduce_until  # most programs need none

        if stream is not None or is_device_array(x):
            raise UsageError("until: expected a numpy array and no stream; operations on devices wait for all ranks")
        return all_reduce_until(self._engine, x, op=op, **options)

    def parts(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
    ) -> PartStream:
        """Combine ``x`` of all ranks, in place (or into ``out``), and give parts of the result as they are finished.

        Iterate over them: ``where, values`` are a slice of the flat result, and its elements, a view of it; see
        ``asyncpar.Part`` and ``asyncpar.PartStream``.  The result has the bits of ``all_reduce(x)``, other ranks may
        call either, and the call takes its place in the order of operations at once.  Parts have 1 MiB per rank or so;
        a small result is one part.  An array on a device has no parts: ``UsageError``.
        """
        try:
            if type(x) is not np.ndarray and is_device_array(x):
                raise UsageError("x: expected a numpy array, got one on a device, whose result has no parts")
            return reductions.all_reduce_parts(self._engine, x, op=op, out=out, algorithm=algorithm, key=key)
        except Exception as error:
            self._engine.refuse("all_reduce", error, key)
            raise


class MethodWithParts(Generic[OwnerT, MadeT]):
    """A method that is an object with more than a call: ``make`` makes it of its owner, when it is first asked for.

    Of the class it is ``function``, which does what the object does when it is called.
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
