"""Arrays compared at a tenth of what ``np.testing.assert_allclose`` takes for small ones that are close."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def assert_close(got: NDArray[Any], expected: NDArray[Any], *, rtol: float, atol: float = 0.0, message: str) -> None:
    """Assert what ``np.testing.assert_allclose`` does, which judges and describes those that are not close."""
    if got.shape == expected.shape:
        with np.errstate(invalid="ignore"):  # of two infinities
            if (np.abs(got - expected) <= atol + rtol * np.abs(expected)).all():
                return
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, err_msg=message)
