"""Arrays of other libraries than numpy in the memory of the host: numpy's view of them, and results of their kind.

A view shares the memory of its array: torch tensors, everything with DLPack (https://dmlc.github.io/dlpack), JAX
arrays, columns of pandas, polars and Arrow, and what has Python's buffer protocol.  It is read-only where a library's
arrays never change.  No library is imported for it: the type of an array names its library, which is loaded then.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from asyncpar.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

Array: TypeAlias = npt.NDArray[Any]
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class _HasDLPack(Protocol):
    def __dlpack__(self) -> Any: ...


class _HasArray(Protocol):
    def __array__(self) -> Any: ...


if TYPE_CHECKING:
    HostArray: TypeAlias = Array | _HasDLPack | _HasArray | Buffer
    """What operations take as an array in the memory of the host."""
else:
    HostArray: TypeAlias = object

ArrayT = TypeVar("ArrayT", bound="HostArray")
"""The kind of array that a caller passes and gets."""


def library_of(value: object) -> str:
    """Return the top module of the type of ``value``."""
    return _top(type(value))


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """``owner``, an array of another library or a buffer, and numpy's ``view`` of its memory."""

    owner: Any
    view: Array
    _make: Callable[[Array, Any, bool], Any] = field(repr=False)

    def like(self, result: Array, *, is_elementwise: bool = False) -> Any:
        """Return ``result`` as an array of the owner's kind.

        ``is_elementwise`` means that each element belongs to that of the owner in its place, so that labels stay.
        """
        return self._make(result, self.owner, is_elementwise)


def is_foreign(value: object) -> bool:
    """Return whether ``value`` is an array of another library than numpy, or a buffer.  Never raises.

    ``foreign_array`` has its view, unless it is on a device.
    """
    if isinstance(value, np.ndarray | np.generic):
        return isinstance(value, np.memmap)
    if _has_dlpack(value):
        return True
    bases = type(value).__mro__
    return any(base.__name__ in _COLUMNS.get(_top(base), ()) for base in bases) or _is_buffer(value)


def _top(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _has_dlpack(value: object) -> bool:
    return hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__")


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True


def foreign_array(value: Any, name: str) -> ForeignArray:
    """Return the view of ``value``, for which ``is_foreign`` holds.

    Raises ``UsageError``, which names the argument and what to do, where its memory is no plain array.
    """
    if isinstance(value, np.memmap):
        return ForeignArray(value, np.asarray(value), _make_array)
    library = next((name for name in map(_top, type(value).__mro__) if name in _LIBRARIES), library_of(value))
    others = (_view_by_dlpack, _make_by_dlpack) if _has_dlpack(value) else (_view_of_buffer, _make_buffer)
    view, make = _LIBRARIES.get(library, others)
    try:
        found = view(value, name)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{name}: {library} {type(value).__name__} does not hand out its memory: {reason}") from error
    return ForeignArray(value, found, make)


def _make_array(result: Array, owner: Any, is_elementwise: bool) -> Array:  # noqa: ARG001
    return result


# -- torch -------------------------------------------------------------------------------------------------------------


def _view_of_torch(tensor: Any, name: str) -> Array:
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{name}: expected a tensor outside of autograd, got one that requires grad; "
            f"pass {name}.detach(), which shares its memory, or call this under torch.no_grad()"
        )
    if tensor.dtype is torch.bfloat16:
        bits: Array = tensor.detach().view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    view: Array = tensor.detach().numpy()
    return view


def _make_torch(result: Array, owner: Any, is_elementwise: bool) -> Any:  # noqa: ARG001
    torch = sys.modules["torch"]
    if result.dtype == _BFLOAT16:
        return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(result)


# -- JAX, and others that have DLPack ----------------------------------------------------------------------------------


def _view_of_jax(value: Any, name: str) -> Array:  # noqa: ARG001
    return np.asarray(value)  # read-only, and on a CPU without a copy


def _make_jax(result: Array, owner: Any, is_elementwise: bool) -> Any:  # noqa: ARG001
    return sys.modules["jax"].numpy.asarray(result)


def _view_by_dlpack(value: Any, name: str) -> Array:  # noqa: ARG001
    return np.from_dlpack(value)


def _make_by_dlpack(result: Array, owner: Any, is_elementwise: bool) -> Any:  # noqa: ARG001
    take = getattr(sys.modules[library_of(owner)], "from_dlpack", None)
    return result if take is None else take(result)


# -- columns of tables -------------------------------------------------------------------------------------------------


def _read_only(view: Array) -> Array:
    view = view.view()
    view.flags.writeable = False
    return view


def _complete(missing: int, name: str, remedy: str) -> None:
    if missing:
        raise UsageError(f"{name}: expected a column without missing values, got one with {missing}; pass {remedy}")


def _view_of_pandas(series: Any, name: str) -> Array:
    if not isinstance(series.dtype, np.dtype):  # where numpy has no values for what is missing
        _complete(int(series.isna().sum()), name, f"{name}.fillna(...)")
        return _read_only(series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", None)))
    return _read_only(series.to_numpy(copy=False))


def _make_pandas(result: Array, owner: Any, is_elementwise: bool) -> Any:
    pandas = sys.modules["pandas"]
    if result.ndim == 1:
        made = pandas.Series(result, index=owner.index if is_elementwise else None, name=owner.name)
        return made if isinstance(owner.dtype, np.dtype) else made.astype(owner.dtype)
    return pandas.DataFrame(result) if result.ndim == 2 else result


def _view_of_polars(series: Any, name: str) -> Array:
    _complete(series.null_count(), name, f"{name}.fill_null(...)")
    return _read_only(series.to_numpy())


def _make_polars(result: Array, owner: Any, is_elementwise: bool) -> Any:  # noqa: ARG001
    return sys.modules["polars"].Series(owner.name, result)


def _view_of_arrow(column: Any, name: str) -> Array:
    _complete(column.null_count, name, f"{name}.fill_null(...)")
    return _read_only(column.to_numpy(**({} if hasattr(column, "chunks") else {"zero_copy_only": False})))


def _make_arrow(result: Array, owner: Any, is_elementwise: bool) -> Any:  # noqa: ARG001
    pyarrow = sys.modules["pyarrow"]
    made = pyarrow.array(result.reshape(-1))
    for length in reversed(result.shape[1:]):
        made = pyarrow.FixedSizeListArray.from_arrays(made, length)
    return pyarrow.chunked_array([made]) if hasattr(owner, "chunks") else made


# -- buffers -----------------------------------------------------------------------------------------------------------


def _view_of_buffer(value: Any, name: str) -> Array:  # noqa: ARG001
    return np.asarray(memoryview(value))


def _make_buffer(result: Array, owner: Any, is_elementwise: bool) -> Any:  # noqa: ARG001
    if result.ndim == 1 and isinstance(owner, array.array):
        return array.array(owner.typecode, result.tobytes())
    if result.ndim == 1 and isinstance(owner, bytes | bytearray):
        return type(owner)(result.tobytes())
    return result.data


_COLUMNS = {"pandas": {"Series"}, "polars": {"Series"}, "pyarrow": {"ChunkedArray"}}
"""Types without DLPack; the other columns of Arrow have it."""

_LIBRARIES: dict[str, tuple[Callable[[Any, str], Array], Callable[[Array, Any, bool], Any]]] = {
    "torch": (_view_of_torch, _make_torch),
    "jax": (_view_of_jax, _make_jax),
    "jaxlib": (_view_of_jax, _make_jax),
    "pandas": (_view_of_pandas, _make_pandas),
    "polars": (_view_of_polars, _make_polars),
    "pyarrow": (_view_of_arrow, _make_arrow),
}
