"""For tests, ours and yours: many ranks in one process, virtual time, simulations with faults, conformance suites."""

import lazy_loader

from asyncpar.core.config.transport import IN_PROCESS_TRANSPORTS as TRANSPORTS  # noqa: F401  # added to those below

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
"""Names are imported on first use: ranks of the suite of engines need none of them, and start sooner."""
__all__.append("TRANSPORTS")
