"""The public names; see ``__init__.py``."""

from .hosts import HostSynchronizer as HostSynchronizer
from .outer import HasValue as HasValue
from .outer import OuterConfig as OuterConfig
from .outer import OuterOptimizer as OuterOptimizer
from .outer import OuterState as OuterState
from .rounds import DiLoCo as DiLoCo
from .rounds import LocalSGD as LocalSGD
from .rounds import LocalState as LocalState
from .rounds import Synchronizer as Synchronizer

__all__: list[str]
