"""Compare what determines the bits of results besides the program: processors, and the library of matrix products.

The order of additions in a matrix product is that of a kernel, which OpenBLAS and MKL choose by the processor and the
number of threads; numpy's own loops use instructions by processor, too.  Ranks that differ in these compute different
last bits.  They are not refused, since every step is still the same on all ranks; but then a run depends on which rank
computes what, so one warning on each host names the ranks that differ, the difference, and the remedy.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncpar.node import Node

_log = logging.getLogger(__name__)

PROCESSOR: Final = "processor"
NUMPY: Final = "numpy"
INSTRUCTIONS: Final = "instructions of numpy"
LIBRARY: Final = "BLAS"
KERNEL: Final = "BLAS kernel"
THREADS: Final = "BLAS threads"
TORCH_KERNEL: Final = "kernels of torch"

BASELINE: Final = "baseline"
"""The instructions of a processor that has none beyond those which numpy was built for."""
UNKNOWN: Final = "unknown"

_ADVICE: Final[Mapping[str, str]] = {
    PROCESSOR: "use hosts of one kind where bits matter",
    INSTRUCTIONS: 'set NPY_DISABLE_CPU_FEATURES="{differing}" on the hosts that have them',
    KERNEL: "set OPENBLAS_CORETYPE on all hosts to one that all have",
    THREADS: "set OPENBLAS_NUM_THREADS={usual}, or MKL_NUM_THREADS, on all hosts",
    TORCH_KERNEL: "set ATEN_CPU_CAPABILITY on all hosts to one that all have, in lower case",
}

_OTHERWISE: Final = "install the same on all hosts"

_OPENBLAS: Final = ("scipy_openblas_get_{}64_", "openblas_get_{}", "openblas_get_{}64_", "scipy_openblas_get_{}")
_MKL_THREADS: Final = "MKL_Get_Max_Threads"


def describe_arithmetic() -> dict[str, str]:
    """Return, by name, the settings that the numbers of this process depend on; unknown ones are left out."""
    config = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    found = {
        PROCESSOR: _processor(),
        NUMPY: np.__version__,
        INSTRUCTIONS: _instructions(config),
        LIBRARY: f"{blas.get('name', '')} {blas.get('version', '')}".strip(),
        **(_openblas() or _mkl()),
    }
    return {name: value for name, value in found.items() if value}


def _instructions(config: Mapping[str, Any]) -> str:
    """Return the instructions that numpy uses beyond those it was built for, by its own configuration."""
    extensions = config.get("SIMD Extensions")
    return "" if extensions is None else " ".join(extensions.get("found", ())) or BASELINE


def _processor() -> str:
    """Return the model of this host's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Processor", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _openblas() -> dict[str, str]:
    """Return kernel and threads of the OpenBLAS that numpy has loaded; {} if there is none."""
    path = _loaded("openblas")
    if path is None:
        return {}
    library = ctypes.CDLL(path)
    for form in _OPENBLAS:
        try:
            kernel, threads = getattr(library, form.format("corename")), getattr(library, form.format("num_threads"))
        except AttributeError:
            continue
        kernel.restype = ctypes.c_char_p
        return {KERNEL: (kernel() or b"").decode("utf-8", "replace"), THREADS: str(threads())}
    return {}


def _mkl() -> dict[str, str]:
    """Return the threads of the MKL that numpy has loaded; {} if there is none."""
    path = _loaded("mkl_rt")
    with suppress(AttributeError):
        if path is not None:
            return {THREADS: str(getattr(ctypes.CDLL(path), _MKL_THREADS)())}
    return {}


def _loaded(name: str) -> str | None:
    """Return the path of a library of this process, numpy's own if there is one; None if it is not known."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "replace")
    except OSError:
        return None
    paths = {line[line.index("/") :] for line in maps.splitlines() if "/" in line}
    found = sorted(path for path in paths if name in path.rpartition("/")[2] and ".so" in path)
    return min(found, key=lambda path: "numpy" not in path, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticDifference:
    """``ranks``, and those alone, have ``value`` of ``name``; most have ``usual``."""

    name: str
    value: str
    usual: str
    ranks: tuple[int, ...]

    def describe(self, hosts: Sequence[str]) -> str:
        """Return which ranks differ, in what, and the remedy; ``hosts`` are the names by rank."""
        names = ", ".join(dict.fromkeys(hosts[rank] for rank in self.ranks))
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} on {names}"
        verb = "have" if len(self.ranks) > 1 else "has"
        mine, usual = (set(value.split()) - {BASELINE} for value in (self.value, self.usual))
        what = f"{self.value}, not {self.usual}"
        advice = _ADVICE.get(self.name, _OTHERWISE)
        if UNKNOWN in (self.value, self.usual):
            advice = _OTHERWISE
        elif self.name == INSTRUCTIONS:
            parts = {"with": mine - usual, "without": usual - mine}
            what = ", ".join(f"{word} {' '.join(sorted(some))}" for word, some in parts.items() if some)
        advice = advice.format(usual=self.usual, differing=" ".join(sorted(mine ^ usual)))
        return f"{who} {verb} {self.name} {what} ({advice})"


def find_differences(described: Sequence[Mapping[str, str]]) -> list[ArithmeticDifference]:
    """Return the differences between ranks; ``described`` has the result of ``describe_arithmetic`` on each.

    The most frequent value is the usual one; of equally frequent ones, that of the lowest rank.
    """
    found = []
    for name in dict.fromkeys(name for one in described for name in one):
        values = [one.get(name, UNKNOWN) for one in described]
        counts = Counter(values)  # in the order of ranks: ``max`` takes the first
        usual = max(counts, key=counts.__getitem__)
        for value in counts:
            if value != usual:
                ranks = tuple(rank for rank, other in enumerate(values) if other == value)
                found.append(ArithmeticDifference(name=name, value=value, usual=usual, ranks=ranks))
    return found


class ArithmeticComparison:
    """Compares the arithmetic of ranks in each world, and warns once of each host and value that differs."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str, str]] = set()

    async def compare(self, node: Node, mine: Mapping[str, str]) -> None:
        """Compare ``mine`` with those of all ranks; the first rank of each host warns.  Collective.

        Eight bytes are exchanged if all are the same.
        """
        world = node.world
        if world.size == 1:
            return
        digest = hashlib.blake2b(json.dumps(mine, sort_keys=True).encode(), digest_size=8).digest()
        digests = await world.all_gather(np.frombuffer(digest, np.uint64).copy())
        if (digests == digests[0]).all():
            return
        described = await world.all_gather_object(dict(mine), wanted=dict[str, str])
        hosts = [member.host for member in node.links.world.members]
        differences = find_differences(described)
        places = {(each.name, hosts[rank], each.value) for each in differences for rank in each.ranks}
        is_new, self._reported = not places <= self._reported, self._reported | places
        if is_new and world.local_rank == 0:
            shown = "; ".join(each.describe(hosts) for each in differences)
            _log.warning(
                "the ranks of this job do not compute alike, so the last bits of results depend on which rank computes "
                "what: %s",
                shown,
            )
