"""Memory, traffic and time of a model on a number of ranks, by published formulas and simulation.  Pure.

Read ``job.py`` (model, machine and batch), ``memory.py`` and ``activations.py`` (one formula each, with its source),
then ``layout.py`` (traffic and time of one layout of a job) and ``search.py`` (all layouts).  ``asyncpar plan`` prints
the findings.
"""

from asyncpar.estimate.activations import ActivationModel, kept_layers
from asyncpar.estimate.buffers import BufferBytes
from asyncpar.estimate.job import Job, Machine, ModelShape, Precision
from asyncpar.estimate.layout import (
    Layout,
    RankTraffic,
    all_reduce_bytes,
    boundary_bytes,
    data_parallel_bytes,
    estimate_layouts,
    part_bytes,
    rank_traffics,
    tensor_parallel_bytes,
)
from asyncpar.estimate.memory import RankMemory, StateBytes, bytes_per_parameter, memory_requirements
from asyncpar.estimate.search import Findings, Misfit, Search, find_layouts

__all__ = [
    "ActivationModel",
    "BufferBytes",
    "Findings",
    "Job",
    "Layout",
    "Machine",
    "Misfit",
    "ModelShape",
    "Precision",
    "RankMemory",
    "RankTraffic",
    "Search",
    "StateBytes",
    "all_reduce_bytes",
    "boundary_bytes",
    "bytes_per_parameter",
    "data_parallel_bytes",
    "estimate_layouts",
    "find_layouts",
    "kept_layers",
    "memory_requirements",
    "part_bytes",
    "rank_traffics",
    "tensor_parallel_bytes",
]
