"""A class name stands for one class: a reader of a traceback or an import knows which one it is."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIRRORED = {"AllReduce", "Communicator", "Endpoint", "Node", "Told"}
"""``asyncpar.blocking`` mirrors these under their names, so that a blocking program reads as an asynchronous one."""
PUBLIC = {"Deadline", "DistributedDataParallel", "Precision"}
"""Public names: of ``asyncpar.parallel`` and ``asyncpar.torch``, whose modules are those of numpy and of torch; of
``asyncpar.estimate`` and ``asyncpar.hybrid``, which mean different sets of formats; of an all-reduce that does not
wait for all, and of a message."""


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict(list)
    for path in (ROOT / "asyncpar").rglob("*.py"):
        if "_proto" not in path.parts:
            for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
                places[name].append(str(path.relative_to(ROOT)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice.keys() == MIRRORED | PUBLIC, twice
    assert all(any("/blocking/" in file for file in twice[name]) for name in MIRRORED)
