"""Deprecated alias of moved settings: import ``ThreeDParallelismConfig`` and its enums from ``asyncpar.hybrid``.

``asyncpar.config.parallel`` was public.  It keeps working until version 1.0, with a ``DeprecationWarning``.
"""

import sys
import warnings

from asyncpar.core.config import parallel

__all__ = ["parallel"]

warnings.warn(
    "asyncpar.config.parallel has moved: import its names from asyncpar.hybrid", DeprecationWarning, stacklevel=2
)
sys.modules[f"{__name__}.parallel"] = parallel
