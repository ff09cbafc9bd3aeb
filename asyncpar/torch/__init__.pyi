"""The public names; see ``__init__.py``."""

from .gradient_hook import GradientHook as GradientHook
from .gradient_hook import gradient_hook as gradient_hook
from .monitored_barrier import monitored_barrier as monitored_barrier
from .process_group import ProcessGroup as ProcessGroup
from .registration import register as register
from .work import Work as Work
