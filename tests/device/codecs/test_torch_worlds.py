"""Arrays go to tensors and back as they are, in every dtype of the suite that real GPUs run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.testing.collective_worlds import DTYPES, values
from tests.backends.extras import need
from tests.device.torch_worlds import to_device, to_host


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_arrays_come_back_from_tensors_as_they_were(dtype: Any, shape: tuple[int, ...]) -> None:
    need("torch", 'pip install "asyncpar[torch]"')
    array = values(1, shape, dtype)
    back = to_host(to_device(array, "cpu"))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
