"""Training that communicates every H steps: local SGD, DiLoCo, and both between hosts.

Read ``outer.py``, which computes, then ``rounds.py``, which communicates; ``hosts.py`` uses hosts in place of ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
"""Names are imported on first use: elastic jobs need ``outer.py`` alone."""
