"""The public names: the page of the reference that documents each, and what each is for.

A name is public when the reference has it.  Most are for programs; some only for those who extend asyncpar
(``EXTENSION_POINTS``), some name what calls return (``RETURNED``).  ``INTERNAL`` names are shared between packages of
asyncpar: they are in ``__all__``, and not public.
"""

from __future__ import annotations

import importlib
import inspect
import re
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_DIRECTIVE = re.compile(r"^\.\. public-names:: (\S+)\n((?:\n|   .*\n)*)", re.MULTILINE)
REFERENCE = Path(__file__).resolve().parent / "reference"

# Where names are documented: the page of each package, whose parts are in a folder of its name where it has several.
# A name that several packages offer is documented at the first.
PACKAGES = {
    "errors": ("asyncpar.errors",),
    "core": ("asyncpar",),
    "blocking": ("asyncpar.blocking",),
    "gradsync": ("asyncpar.gradsync",),
    "codecs": ("asyncpar.codecs",),
    "parallel": ("asyncpar.parallel", "asyncpar.parallel.local"),
    "pipeline": ("asyncpar.pipeline", "asyncpar.pipeline.device"),
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

# Packages whose ``__all__`` is for other packages of asyncpar.
INTERNAL_PACKAGES = {
    "asyncpar.gradsync.schemes": "how a bucket is reduced; `GradientSynchronizer` chooses by codec and layout",
    "asyncpar.pipeline.orders": "what the schedules are built of",
    "asyncpar.pipeline.offload": "where `MemoryOptimizationStrategy.EXTREME` keeps activations",
}

# Names of other ``__all__`` that only packages of asyncpar use.
INTERNAL = {
    "asyncpar.gradsync": "Bucket BucketPlan EarlyUpdate GradientSpec HostGroups Slot plan_buckets",
    "asyncpar.codecs": "Cast Identity Int4 Int8 PowerSgd RandomK Sign TopK CODECS automatic_codecs chain codec_forms "
    "codec_of_bits value_bits",
    "asyncpar.parallel": "OnGradient ParallelSaved Replica",
    "asyncpar.parallel.local": "HasValue HostSynchronizer OuterOptimizer Synchronizer",
    "asyncpar.pipeline": "Content Message Recomputed StepAlarm",
    "asyncpar.zero": "StatePiece",
    "asyncpar.tensors": "MeshCommunicators ProcessGroups",
    "asyncpar.shards": "ShardParameter",
    "asyncpar.hybrid": "DEFAULT_ORDER LossScaler StepTaken",
    "asyncpar.estimate": "ActivationModel kept_layers part_bytes",
    "asyncpar.nn": "OnGradient",
    "asyncpar.nn.optimizers": "MASTER EarlyStep FlatRange all_finite clip_factor combined distinct restore_skipped "
    "skipped_steps squared_norm",
    "asyncpar.nn.tensor": "ColumnParallel",
    "asyncpar.launch.slurm": "SlurmOptions",
    "asyncpar.testing": "TRANSPORTS",
    "asyncpar.train": "Checkpoints DataParallelTrainer FreeTrainer LocalTrainer ModeKind ParallelLayout Recompute "
    "Setup TrainingMode encoded_ratio",
    "asyncpar.torch": "CudaModuleStage ProcessGroup ThreadRanks Work register",
}

# Names for those who extend asyncpar: a codec, a schedule, a lane, a backend, an engine, a model of one's own.
EXTENSION_POINTS = {
    "asyncpar.codecs": "AnyCodec Bytes Codec CodecKind RoundCodec RoundEncoder Values register_codec unregister_codec",
    "asyncpar.parallel": "Model Module Trainable",
    "asyncpar.pipeline": "BoundaryTraffic CostModel CustomSchedule MemoryManager OperationKind PipelineExecutor "
    "PipelineOp Schedule ScheduleKind StageLayout UNIT_COSTS apply_memory_strategy check_blocking register_schedule "
    "unregister_schedule",
    "asyncpar.pipeline.device": "DeviceStage",
    "asyncpar.zero": "ZeroEngine",
    "asyncpar.tensors": "TensorCommunicator create_communicator",
    "asyncpar.hybrid": "Loss ParallelModel Performance3DMonitor Placement Replication StageLayers StagePlace",
    "asyncpar.nn": "Array Deferred Stage",
    "asyncpar.nn.optimizers": "Rule",
    "asyncpar.nn.tensor": "*",
    "asyncpar.checkpoint": "FileSystem LocalFiles NewFile",
    "asyncpar.backends": "OpenBackend ThreadBackend existing",
    "asyncpar.engines.interface": "*",
    "asyncpar.engines.job": "*",
    "asyncpar.testing.simulation": "SAFEGUARDS without",
    "asyncpar.testing.collectives": "*",
    "asyncpar.testing.lanes": "*",
    "asyncpar.testing.codecs": "*",
    "asyncpar.testing.engines": "*",
    "asyncpar.testing.jobs": "*",
}

# What calls return and attributes hold: programs read it, and need its name for annotations at most.
RETURNED = {
    "asyncpar.blocking": "Pending Ref",
    "asyncpar.gradsync": "StepOutcome SyncMemory SyncStatistics SyncStep TuningOutcome",
    "asyncpar.parallel.local": "OuterState",
    "asyncpar.pipeline": "MemoryUsageStats OperationSpan PipelineResult Simulation",
    "asyncpar.zero": "ZeROMemoryStats",
    "asyncpar.shards": "LayerTensorParallelPlan TensorParallelShardingPlan",
    "asyncpar.hybrid": "LossScaling MemoryRequirements PerformanceAnalysis StepMeasure StepResult",
    "asyncpar.multinode": "CompressionInfo GradientSyncBuffer MemorySavings MemoryUsage MultiNodeStats",
    "asyncpar.estimate": "BufferBytes Findings Layout Misfit RankMemory RankTraffic StateBytes",
    "asyncpar.backends": "CollectiveResult CommunicationMetrics OperationMetrics",
    "asyncpar.launch.slurm": "JobEnding QueuedJob",
    "asyncpar.engines.mesh": "ClusterMesh",
    "asyncpar.observe": "EventStream NodeObserver RankSummary",
    "asyncpar.observe.summary": "*",
    "asyncpar.testing": "GuardedWorld",
    "asyncpar.testing.simulation": "SimulationNote",
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


class Use(StrEnum):
    """What a public name is for."""

    PROGRAM = "programs"
    RETURNED = "returned"
    RAISED = "raised"
    EXTENSION = "extension point"


@cache
def listed_names(package: str) -> list[str]:
    """Return the names that ``package`` offers: those of ``NAMED_IN_GUIDES``, of its ``__all__``, or all it defines."""
    module = importlib.import_module(package)
    return list(NAMED_IN_GUIDES.get(package) or getattr(module, "__all__", ())) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == package
    ]


@cache
def public_names(package: str) -> list[str]:
    """Return the names of ``package`` that are documented with it, in its own order."""
    module = importlib.import_module(package)
    before = [other for others in PACKAGES.values() for other in others]
    earlier = [importlib.import_module(other) for other in before[: before.index(package)]]
    internal = INTERNAL.get(package, "").split()
    return [
        name
        for name in listed_names(package)
        if name not in internal
        and not isinstance(value := getattr(module, name), ModuleType)
        and not any(name in listed_names(other.__name__) and getattr(other, name) is value for other in earlier)
    ]


def use_of(package: str, name: str) -> Use:
    """Return what the public ``name`` of ``package`` is for."""
    value = getattr(importlib.import_module(package), name)
    if inspect.isclass(value) and issubclass(value, BaseException):
        return Use.RAISED
    for use, names in ((Use.EXTENSION, EXTENSION_POINTS), (Use.RETURNED, RETURNED)):
        if names.get(package) == "*" or name in names.get(package, "").split():
            return use
    return Use.PROGRAM


class Entry(NamedTuple):
    """A name on a page of the reference, or methods of a class whose other methods are on another page."""

    page: str
    package: str
    name: str
    methods: tuple[str, ...] = ()


@cache
def entries() -> tuple[Entry, ...]:
    """Return what the pages below ``docs/reference`` document, in their order.

    On a page ``.. public-names:: PACKAGE`` documents all names of the package, or those of its content: a line has
    names, or a class and some of its methods (``Communicator: send recv``), which then are on this page only.
    """
    found = []
    for path in sorted(REFERENCE.rglob("*.md")):
        page = path.relative_to(REFERENCE).with_suffix("").as_posix()
        for package, content in _DIRECTIVE.findall(path.read_text()):
            found += list(parse(page, package, content.splitlines()))
    return tuple(found)


def parse(page: str, package: str, lines: list[str]) -> list[Entry]:
    """Return the entries of a directive on ``page`` with these lines of content."""
    found = []
    for line in filter(None, map(str.strip, lines)):
        owner, colon, names = line.partition(":")
        if colon:
            found.append(Entry(page, package, owner, tuple(names.split())))
        else:
            found += [Entry(page, package, name) for name in line.split()]
    return found or [Entry(page, package, name) for name in public_names(package)]


def page_of(package: str, name: str) -> str:
    """Return the page that documents ``name``, as a path below ``docs/reference`` without its suffix."""
    (page,) = {each.page for each in entries() if (each.package, each.name) == (package, name) and not each.methods}
    return page
