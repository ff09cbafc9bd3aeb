"""The public names, and the page of the reference that documents each."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

# Where names are documented.  A name that several packages offer is documented at the first.
PACKAGES = {
    "errors": ("asyncpar.errors",),
    "core": ("asyncpar",),
    "blocking": ("asyncpar.blocking",),
    "gradsync": ("asyncpar.gradsync", "asyncpar.gradsync.schemes"),
    "codecs": ("asyncpar.codecs",),
    "parallel": ("asyncpar.parallel", "asyncpar.parallel.local"),
    "pipeline": (
        "asyncpar.pipeline",
        "asyncpar.pipeline.orders",
        "asyncpar.pipeline.offload",
        "asyncpar.pipeline.device",
    ),
    "zero": ("asyncpar.zero",),
    "tensors": ("asyncpar.tensors", "asyncpar.shards"),
    "hybrid": ("asyncpar.hybrid", "asyncpar.multinode"),
    "estimate": ("asyncpar.estimate",),
    "nn": ("asyncpar.nn", "asyncpar.nn.optimizers", "asyncpar.nn.tensor"),
    "checkpoint": ("asyncpar.checkpoint", "asyncpar.checkpoint.blocking"),
    "backends": ("asyncpar.backends",),
    "slurm": ("asyncpar.launch.slurm",),
    "engines": (
        "asyncpar.engines.dask",
        "asyncpar.engines.ray",
        "asyncpar.engines.slurm",
        "asyncpar.engines.mpi",
        "asyncpar.engines.mesh",
        "asyncpar.engines.interface",
        "asyncpar.engines.job",
    ),
    "observe": ("asyncpar.observe", "asyncpar.observe.summary"),
    "testing": (
        "asyncpar.testing",
        "asyncpar.testing.simulation",
        "asyncpar.testing.collectives",
        "asyncpar.testing.lanes",
        "asyncpar.testing.codecs",
        "asyncpar.testing.engines",
        "asyncpar.testing.jobs",
    ),
    "train": ("asyncpar.train",),
    "torch": ("asyncpar.torch",),
}

# Modules that guides name, which have no ``__all__`` of their own, and what of them users need.
NAMED_IN_GUIDES = {
    "asyncpar.engines.dask": ("launch", "run", "world"),
    "asyncpar.engines.ray": ("launch", "run", "register_collective_backend"),
    "asyncpar.engines.mesh": ("ClusterMesh",),
    "asyncpar.engines.interface": (
        "PlacementEngine",
        "GrowingEngine",
        "Handle",
        "JobSpec",
        "Place",
        "PlaceOrder",
        "BeginRanks",
        "Interrupt",
        "Kill",
        "PlaceServes",
        "PlaceOutput",
        "PlaceProgress",
        "PlaceReport",
        "PlaceLost",
    ),
    "asyncpar.engines.job": ("JobOptions", "run_job"),
    "asyncpar.observe.summary": (
        "JobSummary",
        "HostSummary",
        "RankReport",
        "RankSummary",
        "OperationSummary",
        "AskSummary",
        "BlockedSummary",
        "MailboxSummary",
        "LetterSummary",
        "LinkSummary",
        "ProgressSummary",
        "RoundSummary",
        "FigureSummary",
    ),
    "asyncpar.pipeline.device": ("DeviceStage",),
    "asyncpar.testing.jobs": ("SyntheticJob", "Trouble"),
}


@cache
def listed_names(package: str) -> list[str]:
    """Return the public names of ``package``: those of ``NAMED_IN_GUIDES``, of its ``__all__``, or all it defines."""
    module = importlib.import_module(package)
    return list(NAMED_IN_GUIDES.get(package) or getattr(module, "__all__", ())) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == package
    ]


def public_names(package: str) -> list[str]:
    """Return the names of ``package`` that are documented with it, in its own order."""
    module = importlib.import_module(package)
    before = [other for others in PACKAGES.values() for other in others]
    earlier = [importlib.import_module(other) for other in before[: before.index(package)]]
    return [
        name
        for name in listed_names(package)
        if not isinstance(value := getattr(module, name), ModuleType)
        and not any(name in listed_names(other.__name__) and getattr(other, name) is value for other in earlier)
    ]
