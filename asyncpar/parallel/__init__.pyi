"""The public names; see ``__init__.py``."""

from .config import DDP_GROUP as DDP_GROUP
from .config import DDPConfig as DDPConfig
from .config import SynchronizationMode as SynchronizationMode
from .data_parallel import DataParallel as DataParallel
from .data_parallel import ParallelSaved as ParallelSaved
from .distributed import DistributedDataParallel as DistributedDataParallel
from .module import Model as Model
from .module import Module as Module
from .module import OnGradient as OnGradient
from .module import Trainable as Trainable
from .process_group import create_data_parallel as create_data_parallel
from .process_group import create_distributed_data_parallel as create_distributed_data_parallel
from .process_group import init_process_group as init_process_group
from .replica_training import Replica as Replica

__all__: list[str]
