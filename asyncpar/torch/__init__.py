"""``torch.distributed`` on asyncpar: importing this registers the backend ``asyncpar``.

import torch.distributed as dist
import asyncpar.torch                    # not needed where torch loads the backends of installed packages itself

dist.init_process_group("asyncpar")      # under torchrun or `asyncpar launch`
"""

import lazy_loader

from asyncpar.torch.registration import register

try:
    register()
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError('asyncpar.torch needs torch: pip install "asyncpar[torch]"', name="torch") from error

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
"""Names are imported when they are first used: torch itself imports this package, in every program that uses torch."""
