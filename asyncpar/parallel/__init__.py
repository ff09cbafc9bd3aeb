"""Data parallelism: replicas in one process or one per rank, synchronous or not; ``local`` communicates less often.

Read ``distributed.py`` first, then ``averaging.py`` and ``rounds.py`` for the synchronous mode, ``gossip.py``,
``exchange.py`` and ``clock.py`` for the others; ``replica_training.py`` has those of ``DataParallel``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
"""Names are imported on first use: a rank of an elastic job needs few of them, and starts sooner."""
