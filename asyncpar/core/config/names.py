"""Types for arguments that are names, for type checkers.

A wrong name is a type error: ``comm.all_reduce(x, "summ")``.  ``Name`` marks one that is in no list here, because it is
registered, has an argument of its own or was read from somewhere: ``codec=ap.Name("topk:0.02")``,
``ap.init(transport=ap.Name("my_lanes.ring:KIND"))``.  All of them are plain strings, which are checked again when they
are used, so programs that are not type-checked need no ``Name``.
"""

from __future__ import annotations

from typing import Literal, NewType, TypeAlias

Name = NewType("Name", str)
"""A name unknown to type checkers: one that a program has registered or read."""

ReduceOp: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "band", "bor", "bxor"] | Name
"""The operation that combines the values of all ranks."""

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
"""Algorithms of ``all_reduce`` and ``all_reduce_many``; registered ones and other message lengths are a ``Name``."""

ReduceScatterAlgorithm: TypeAlias = Literal["pairwise", "ring", "halving", "arena", "nccl", "staged"] | Name
"""Algorithms of ``reduce_scatter``."""

AllGatherAlgorithm: TypeAlias = Literal["ring", "bruck", "halving", "pairwise", "arena", "nccl", "staged"] | Name
"""Algorithms of ``all_gather`` and ``all_gather_v``."""

BroadcastAlgorithm: TypeAlias = Literal["tree", "chain", "linear", "hierarchical", "arena", "nccl", "staged"] | Name
"""Algorithms of ``broadcast``."""

ReduceAlgorithm: TypeAlias = Literal["tree", "chain", "linear", "arena", "nccl", "staged"] | Name
"""Algorithms of ``reduce``."""

RootedAlgorithm: TypeAlias = Literal["tree", "linear", "arena", "nccl", "staged"] | Name
"""Algorithms of ``gather`` and ``scatter``."""

AllToAllAlgorithm: TypeAlias = Literal["pairwise", "bruck", "arena", "nccl", "staged"] | Name
"""Algorithms of ``all_to_all``."""

BarrierAlgorithm: TypeAlias = Literal["dissemination", "tree", "arena"] | Name
"""Algorithms of ``barrier``."""

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
"""Algorithms of any operation."""

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
"""Encodings of values for a link; other ratios and ranks, other chains and registered codecs are a ``Name``."""

CodecChoice: TypeAlias = CodecName | Literal["auto"]
"""A codec, or the choice of one by measurement."""
