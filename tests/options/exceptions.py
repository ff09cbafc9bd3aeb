"""Options that are not shown to have an effect, and why; a sentence each."""

from __future__ import annotations

from tests.options.discovery import Option

_FIGURES = "It reports what was measured; users read it, and what they put in it comes out again."
_MADE = "It is made by the library; users get it ready."

NOT_CONFIGURED: dict[str, str] = {
    **{
        f"asyncpar.{owner}": _FIGURES
        for owner in (
            "Down",
            "backends.CollectiveResult",
            "backends.CommunicationMetrics",
            "backends.OperationMetrics",
            "checkpoint.Saved",
            "estimate.BufferBytes",
            "estimate.RankMemory",
            "estimate.RankTraffic",
            "gradsync.StepOutcome",
            "gradsync.SyncMemory",
            "gradsync.SyncStatistics",
            "hybrid.MemoryRequirements",
            "hybrid.StepMeasure",
            "hybrid.StepResult",
            "multinode.CompressionInfo",
            "multinode.MemoryUsage",
            "multinode.MultiNodeStats",
            "pipeline.offload.Volume",
            "train.Summary",
            "zero.ZeROMemoryStats",
            "testing.engines.EngineOutput",
            "testing.lanes.RecordingEvents",
            "testing.simulation.SimulationNote",
            "testing.simulation.SimulationResult",
        )
    },
    **{
        f"asyncpar.{owner}": _MADE
        for owner in (
            "ActorRef",
            "Node",
            "blocking.Pending",
            "gradsync.Bucket",
            "gradsync.GradientSpec",
            "gradsync.schemes.Alone",
            "gradsync.schemes.SchemeMemory",
            "gradsync.schemes.Scheme",
            "nn.tensor.TransformerStage",
            "pipeline.PipelineOp",
        )
    },
    "asyncpar.codecs.CodecKind": "It is the record by which a codec is registered, whose tests use all of it.",
    "asyncpar.Member": "It describes a rank of a world that the launcher or a test has made, and configures nothing.",
    "asyncpar.World": "It describes a world that the launcher or a test has made, and configures nothing.",
    "asyncpar.hybrid.StageLayers": "Models of the user's own fill it in with their layers; all of them are run.",
    "asyncpar.hybrid.StagePlace": "The coordinator orders by it what models build.",
    "asyncpar.nn.optimizers.Rule": "It is abstract; the options of rules are those of the rules themselves.",
    "asyncpar.testing.simulation.Fault": "It says what goes wrong; the tests of simulations let each kind happen.",
    "asyncpar.train.Expectation": "The training script compares a run with it; None in it means that nothing is asked.",
    "asyncpar.train.TrainingMode": "parse_mode makes it of one word, and refuses what the kind does not have.",
    "asyncpar.train.LocalTrainer": "The training script makes it for the modes of parse_mode.",
    "asyncpar.train.Checkpoints": "The training script makes it, and its example's tests look for the folders.",
}
"""Classes whose constructor is not a place to configure anything."""

EXCEPTIONS: dict[Option, str] = {
    Option("asyncpar.cluster", "console"): "It needs ranks in processes; the tests of engines look at what it gets.",
    Option("asyncpar.cluster", "pickle"): "It needs ranks in processes; the tests of engines send classes as code.",
    Option("asyncpar.zero.ZeROOptimizer", "bridge"): "It says through what a compute thread waits, not what for.",
    Option("asyncpar.zero.ZeroEngine", "bridge"): "It says through what a compute thread waits, not what for.",
    Option("asyncpar.zero.ZeroEngine", "row_sums"): "Multi-node training hands its own sums in; its tests count them.",
}
"""Single options."""
