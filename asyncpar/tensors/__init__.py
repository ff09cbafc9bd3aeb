"""Tensors in parts over ranks, and devices in meshes.

Start with ``context``: a rank's view of a model that is distributed over devices according to ``config``.
``distributed`` is a tensor in parts, ``partition`` describes a part, ``communicator`` has collectives along any
dimension, ``mesh`` devices along named axes and the communicators along them, ``process_groups`` the groups of 3D
parallelism.  ``agreement`` turns wrong arguments on one rank into errors on all, ``settings`` does so for different
configurations.
"""

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.tensors.communicator import TensorCommunicator, create_communicator
from asyncpar.tensors.config import ModelParallelConfig
from asyncpar.tensors.context import ModelParallelContext
from asyncpar.tensors.distributed import DistributedTensor
from asyncpar.tensors.mesh import DeviceMesh, ModelParallelStrategy
from asyncpar.tensors.partition import TensorPartition
from asyncpar.tensors.process_groups import MeshCommunicators, ProcessGroups

__all__ = [
    "DeviceMesh",
    "DistributedTensor",
    "MeshCommunicators",
    "ModelParallelConfig",
    "ModelParallelContext",
    "ModelParallelStrategy",
    "ProcessGroups",
    "SettingsDiffer",
    "TensorCommunicator",
    "TensorPartition",
    "create_communicator",
]
