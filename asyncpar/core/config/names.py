"""Names that are arguments, as type checkers know them.

A wrong name is a type error: ``comm.all_reduce(x, "summ")``.  ``Name`` is the way to write one that is in no list here,
as it is registered, has an argument of its own or was read from somewhere: ``codec=ap.Name("topk:0.02")``,
``ap.init(transport=ap.Name("my_lanes.ring:KIND"))``.  All of them are plain texts, which are checked again when they
are used, so programs that no type checker reads need no ``Name``.
"""

from __future__ import annotations

from typing import Literal, NewType, TypeAlias

Name = NewType("Name", str)
"""A name that type checkers do not know: one that a program has registered, or has read."""

ReduceOp: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "band", "bor", "bxor"] | Name
"""What values of all ranks are combined by."""

LaneName: TypeAlias = Literal["shm", "tcp", "grpc"] | Name
"""A kind of lane between two processes."""

AllReduceAlgorithm: TypeAlias = (
    Literal[
        "ring",
        "halving",
        "doubling",
        "tree",
        "hierarchical",
        "hierarchical-tree",
        "arena",
        "nccl",
        "staged",
        "ring/64k",
        "ring/256k",
        "ring/1m",
        "hierarchical/64k",
        "hierarchical/256k",
        "hierarchical/1m",
    ]
    | Name
)
"""How ``all_reduce`` and ``all_reduce_many`` go; registered ones and other lengths of messages are a ``Name``."""

ReduceScatterAlgorithm: TypeAlias = Literal["pairwise", "ring", "halving", "arena", "nccl", "staged"] | Name
"""How ``reduce_scatter`` goes."""

AllGatherAlgorithm: TypeAlias = Literal["ring", "bruck", "halving", "pairwise", "arena", "nccl", "staged"] | Name
"""How ``all_gather`` and ``all_gather_v`` go."""

BroadcastAlgorithm: TypeAlias = Literal["tree", "chain", "linear", "hierarchical", "arena", "nccl", "staged"] | Name
"""How ``broadcast`` goes."""

ReduceAlgorithm: TypeAlias = Literal["tree", "chain", "linear", "arena", "nccl", "staged"] | Name
"""How ``reduce`` goes."""

RootedAlgorithm: TypeAlias = Literal["tree", "linear", "arena", "nccl", "staged"] | Name
"""How ``gather`` and ``scatter`` go."""

AllToAllAlgorithm: TypeAlias = Literal["pairwise", "bruck", "arena", "nccl", "staged"] | Name
"""How ``all_to_all`` goes."""

BarrierAlgorithm: TypeAlias = Literal["dissemination", "tree", "arena"] | Name
"""How ``barrier`` goes."""

AnyAlgorithm: TypeAlias = (
    AllReduceAlgorithm
    | ReduceScatterAlgorithm
    | AllGatherAlgorithm
    | BroadcastAlgorithm
    | ReduceAlgorithm
    | RootedAlgorithm
    | AllToAllAlgorithm
    | BarrierAlgorithm
)
"""How some operation goes."""

CodecName: TypeAlias = (
    Literal[
        "none",
        "bf16",
        "fp16",
        "int8",
        "int4",
        "sign",
        "topk:0.1",
        "topk:0.01",
        "topk:0.001",
        "topk:0.1+int8",
        "topk:0.01+int8",
        "topk:0.001+int8",
        "randomk:0.1",
        "randomk:0.01",
        "randomk:0.001",
        "powersgd:1",
        "powersgd:2",
        "powersgd:4",
        "powersgd:8",
    ]
    | Name
)
"""How values are encoded for a link; other ratios and ranks, other chains and registered codecs are a ``Name``."""

CodecChoice: TypeAlias = CodecName | Literal["auto"]
"""The same, where it can be chosen by measurement."""
