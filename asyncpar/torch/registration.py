"""Registration of the backend with torch.

torch itself runs ``register`` when it is imported, also while this package waits for that import; so nothing here
imports torch before it is needed, and registering is fast and cannot fail.
"""

from __future__ import annotations

from typing import Any

from asyncpar.core.loading import without_collection

NAME = "asyncpar"
LEAST_TORCH = (2, 13)


def register() -> None:
    """Register the backend ``asyncpar`` with ``torch.distributed``, once; do nothing for a torch without that."""
    import torch.backends.cuda
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        dist.register_rendezvous_handler(NAME, _open_store)


def _create(options: Any, backend_options: Any) -> Any:
    import torch

    with without_collection():
        import asyncpar.torch.functional_operators  # noqa: F401  # torch takes its kernels from then on
        from asyncpar.errors import UsageError
        from asyncpar.torch.process_group import create_group

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < LEAST_TORCH:
        raise UsageError(
            f"torch: the backend asyncpar needs version {'.'.join(map(str, LEAST_TORCH))} or later, "
            f"got {torch.__version__}"
        )
    return create_group(options, backend_options)


def _open_store(url: str, **settings: Any) -> Any:
    with without_collection():
        from asyncpar.torch.rendezvous.url import open_store

    return open_store(url, **settings)
