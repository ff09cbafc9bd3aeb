"""The place of stubs that a program generates from ``proto/`` with its folders, whose package is ``asyncpar.v1``.

They import each other from it, so they are found here, beside this package, wherever ``sys.path`` has them.
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
