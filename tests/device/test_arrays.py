"""Arrays on devices are read as what they are, and refused with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.device import dlpack
from asyncpar.device.arrays import check_writable, device_array, is_device_array, stream_handle
from asyncpar.errors import UsageError


class Interface:
    """An array of some library that speaks ``__cuda_array_interface__``."""

    def __init__(self, typestr: str = "<f4", dtype: str = "float32", device: int = 2, **changes: Any) -> None:
        self.dtype = dtype
        self.device = SimpleNamespace(index=device)
        fields = {"shape": (2, 3), "typestr": typestr, "data": (0x7000, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = fields | changes


class Capsule:
    """An array that speaks DLPack only: what numpy exports, said to be on a device."""

    def __init__(self, array: np.ndarray[Any, Any], kind: int = 2) -> None:
        self._array, self._kind = array, kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, 1

    def __dlpack__(self, *, stream: int) -> Any:
        return self._array.__dlpack__()


def test_an_array_is_described_by_its_interface() -> None:
    array = Interface()
    found = device_array(array)
    assert (found.pointer, found.shape, found.dtype, found.device) == (0x7000, (2, 3), np.dtype("f4"), 2)
    assert (found.is_writable, found.size, found.nbytes, found.owner) == (True, 6, 24, array)
    assert str(found) == "float32[2, 3] on cuda:2"


def test_an_array_is_described_by_its_capsule() -> None:
    memory = np.arange(12, dtype=np.int16).reshape(3, 4)
    array = Capsule(memory)
    found = device_array(array)
    assert (found.pointer, found.shape, found.dtype, found.device) == (memory.ctypes.data, (3, 4), memory.dtype, 1)
    assert found.lease is not None
    assert found.owner is array


def test_bfloat16_goes_by_the_name_of_the_dtype() -> None:
    assert device_array(Interface("|V2", "torch.bfloat16")).dtype == np.dtype(ml_dtypes.bfloat16)
    with pytest.raises(UsageError, match="numeric dtype"):
        device_array(Interface("|V2", "two bytes"))


def test_an_array_without_elements_has_no_pointer() -> None:
    assert device_array(Interface(shape=(0, 3), strides=(99, 7))).pointer == 0


def test_dimensions_of_one_element_may_have_any_stride() -> None:
    assert device_array(Interface(shape=(1, 3), strides=(999, 4))).shape == (1, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3), "x: expected an array on a CUDA device, got a numpy array"),
        ([1.0], r"got builtins\.list"),
        (Capsule(np.zeros(3), kind=1), "expected an array on a CUDA device"),
        (Interface(strides=(24, 8)), "expected a contiguous device array.*strides.*contiguous copy"),
        (Capsule(np.zeros((4, 4))[:, ::2]), "expected a contiguous device array"),
        (Interface(stream=0), "stream 0"),
        (Interface(mask=Interface()), "without a mask"),
        (Interface(">f4"), "native byte order"),
        (Interface("|S3", "bytes"), "numeric dtype"),
        (Interface(data=None), "is not one"),
    ],
)
def test_what_is_no_array_for_collectives_is_refused(value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        device_array(value)


def test_results_are_not_written_into_read_only_arrays() -> None:
    read_only = device_array(Interface(data=(0x7000, True)))
    with pytest.raises(UsageError, match="out: expected a device array that can be written"):
        check_writable(read_only, "out")


def test_arrays_of_the_host_are_no_device_arrays() -> None:
    assert not is_device_array(np.zeros(3))
    assert not is_device_array(Capsule(np.zeros(3), kind=1))
    assert not is_device_array("text")
    assert is_device_array(Capsule(np.zeros(3)))
    assert is_device_array(Interface())


def test_streams_of_libraries_are_handles() -> None:
    class OfCore:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    assert stream_handle(5) == 5
    assert stream_handle(0) == 1, "the legacy default stream"
    assert stream_handle(SimpleNamespace(cuda_stream=8)) == 8
    assert stream_handle(SimpleNamespace(ptr=9)) == 9
    assert stream_handle(OfCore()) == 77
    with pytest.raises(UsageError, match="stream: expected a CUDA stream"):
        stream_handle("default")


def test_capsules_of_later_versions_are_read_as_far_as_they_are_known() -> None:
    memory = np.arange(5.0)
    memory.flags.writeable = False
    found = dlpack.read(memory.__dlpack__(max_version=(1, 0)))
    assert (found.shape, found.dtype, found.is_read_only) == ((5,), memory.dtype, True)
    with pytest.raises(ValueError, match="capsule"):
        dlpack.read("none")


def test_a_tensor_with_a_gradient_is_refused_with_the_remedy() -> None:
    class WithGradient:
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")

    assert is_device_array(WithGradient())
    with pytest.raises(UsageError, match=r"requires grad.*pass x\.detach\(\)"):
        device_array(WithGradient())
