"""The public names; see ``__init__.py``."""

from .elastic_job import elastic as elastic
from .hook.gradient_hook import GradientHook as GradientHook
from .hook.gradient_hook import gradient_hook as gradient_hook
from .process_group import ProcessGroup as ProcessGroup
from .registration import register as register
from .replicas.data_parallel import DistributedDataParallel as DistributedDataParallel
from .stage.cuda_module import CudaModuleStage as CudaModuleStage
from .stage.stage import ModuleStage as ModuleStage
from .stage.stage import module_stages as module_stages
from .stage.stage import torch_loss as torch_loss
from .thread_ranks import ThreadRanks as ThreadRanks
from .thread_ranks import run_threads as run_threads
from .work import Work as Work

__all__: list[str]
