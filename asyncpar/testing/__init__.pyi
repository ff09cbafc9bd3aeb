"""The public names; see ``__init__.py``."""

from .blocking_world import blocking_world as blocking_world
from .blocking_world import run_ranks as run_ranks
from .guarded_world import GuardedWorld as GuardedWorld
from .guarded_world import WorldHung as WorldHung
from .loop import VirtualTimeLoop as VirtualTimeLoop
from .loop import run_virtual as run_virtual
from .simulation import simulate as simulate
from .world import local_world as local_world

TRANSPORTS: tuple[str, ...]
__all__: list[str]
