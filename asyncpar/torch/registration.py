"""Make torch know the backend.

torch runs ``register`` itself when it is imported, also while this package waits for that import: so nothing here
imports torch before it is needed, and registering is quick and cannot fail.
"""

from __future__ import annotations

from typing import Any

from asyncpar.torch.backend_name import NAME

LEAST_TORCH = (2, 13)


def register() -> None:
    """Register the backend ``asyncpar`` with ``torch.distributed``, once; without effect for a torch without that."""
    import torch.backends.cuda
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        dist.register_rendezvous_handler(NAME, _open_store)


def _create(options: Any, backend_options: Any) -> Any:
    import torch

    from asyncpar.errors import UsageError
    from asyncpar.torch.groups import create_group

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < LEAST_TORCH:
        raise UsageError(
            f"torch: the backend asyncpar needs version {'.'.join(map(str, LEAST_TORCH))} or later, "
            f"got {torch.__version__}"
        )
    return create_group(options, backend_options)


def _open_store(url: str, **settings: Any) -> Any:
    from asyncpar.torch.meeting.url import open_store

    return open_store(url, **settings)
