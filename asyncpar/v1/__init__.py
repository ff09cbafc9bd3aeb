"""The place of stubs that a program generates from ``proto/`` with its folders: ``asyncpar/v1/actors_pb2.py``.

They import each other as ``asyncpar.v1``, so they are found here, beside this package, wherever ``sys.path`` has them.
asyncpar itself uses none of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

__path__ = [
    *__path__,
    *(
        str(folder)
        for entry in sys.path
        if (folder := Path(entry, "asyncpar", "v1")).is_dir() and str(folder) not in __path__
    ),
]
