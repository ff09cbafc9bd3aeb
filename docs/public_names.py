"""The public names, and the page of the reference that documents each."""

from __future__ import annotations

import importlib
from types import ModuleType

# Where names are documented.  A name that several packages offer is documented at the first.
PACKAGES = {
    "errors": ("asyncpar.errors",),
    "core": ("asyncpar",),
    "blocking": ("asyncpar.blocking",),
    "gradsync": ("asyncpar.gradsync", "asyncpar.gradsync.schemes"),
    "codecs": ("asyncpar.codecs",),
    "parallel": ("asyncpar.parallel", "asyncpar.parallel.local"),
    "pipeline": ("asyncpar.pipeline", "asyncpar.pipeline.orders", "asyncpar.pipeline.offload"),
    "zero": ("asyncpar.zero",),
    "tensors": ("asyncpar.tensors", "asyncpar.shards"),
    "hybrid": ("asyncpar.hybrid", "asyncpar.multinode"),
    "estimate": ("asyncpar.estimate",),
    "nn": ("asyncpar.nn", "asyncpar.nn.optimizers", "asyncpar.nn.tensor"),
    "checkpoint": ("asyncpar.checkpoint",),
    "backends": ("asyncpar.backends",),
    "slurm": ("asyncpar.launch.slurm",),
    "observe": ("asyncpar.observe",),
    "testing": ("asyncpar.testing", "asyncpar.testing.simulation"),
    "train": ("asyncpar.train",),
    "torch": ("asyncpar.torch",),
}


def public_names(package: str) -> list[str]:
    """Return the names of ``package`` that are documented with it, in its own order."""
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == package
    ]
    before = [other for others in PACKAGES.values() for other in others]
    earlier = [importlib.import_module(other) for other in before[: before.index(package)]]
    return [
        name
        for name in listed
        if not isinstance(value := getattr(module, name), ModuleType)
        and not any(getattr(other, name, None) is value for other in earlier)
    ]
