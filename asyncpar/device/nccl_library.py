"""Lookup of NVIDIA's libraries nccl4py, cuda-bindings, libnccl and the driver, with advice if one is missing."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from asyncpar.device.fabric import FabricUnavailable, FabricVersions

NCCL4PY = (0, 6)
"""The version whose bindings are called by address here; those of others may differ."""

LEAST_NCCL = 22900
"""The first version with ``ncclCommRevoke``."""

LEAST_SHARED = 23000
"""The first version in which several ranks can use one device."""

SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"

_INSTALL = 'install it with: pip install "asyncpar[nccl]"'
_NO_DEVICE, _DRIVER_TOO_OLD = "cudaErrorNoDevice", "cudaErrorInsufficientDriver"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLibrary:
    """The modules: ``core`` (``nccl.core``), ``bindings`` (``nccl.bindings.nccl``), ``runtime`` (CUDA's)."""

    core: Any
    bindings: Any
    runtime: Any
    versions: FabricVersions


def load_library() -> NcclLibrary:
    """Import the libraries and check their versions, the driver and that there is a device.

    Raises ``FabricUnavailable`` naming what is missing and what to install.
    """
    core, bindings = _load("nccl.core", "nccl4py"), _load("nccl.bindings.nccl", "nccl4py")
    runtime = _load("cuda.bindings.runtime", "cuda-bindings")
    found = tuple(int(part) for part in str(core.__version__).split(".")[:2])
    if found != NCCL4PY:
        expected = ".".join(map(str, NCCL4PY))
        raise FabricUnavailable(f"nccl: expected nccl4py {expected}, got {core.__version__}; {_INSTALL}")
    nccl = _nccl_version(core)
    driver = _check_driver(runtime)
    return NcclLibrary(
        core=core, bindings=bindings, runtime=runtime, versions=FabricVersions(nccl=nccl, cuda_driver=driver)
    )


def allows_shared_devices(versions: FabricVersions) -> bool:
    """Return whether several ranks may use one device, by the version of NCCL and this process's environment."""
    return versions.nccl >= LEAST_SHARED and os.environ.get(SHARED) == "1"


def version_text(version: int) -> str:
    """Return NCCL's version number in the usual form: 23203 is 2.32.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        raise FabricUnavailable(f"nccl: needs {package}, which cannot be imported ({error}); {_INSTALL}") from error


def _nccl_version(core: Any) -> int:
    """Return the version of libnccl, loading it."""
    library = core.get_version().libnccl
    if library is None:
        raise FabricUnavailable(
            "nccl: finds no libnccl.so.2; install it with: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 where the "
            "driver or torch is one of CUDA 12"
        )
    release = library.version
    number = int(release.major) * 10000 + int(release.minor) * 100 + int(release.micro)
    if number < LEAST_NCCL:
        raise FabricUnavailable(
            f"nccl: expected NCCL {version_text(LEAST_NCCL)} or later, got {release} from {library.path}; "
            "install a later nvidia-nccl-cu13, or -cu12"
        )
    return number


def _check_driver(runtime: Any) -> int:
    """Return the version of the driver, if it works and has a device."""
    _, driver = runtime.cudaDriverGetVersion()
    if not driver:
        raise FabricUnavailable(
            "nccl: this host has no NVIDIA driver; collectives of numpy arrays work without, of device arrays they "
            "do not"
        )
    status, count = runtime.cudaGetDeviceCount()
    if status.name == _DRIVER_TOO_OLD:
        raise FabricUnavailable(
            f"nccl: the driver knows CUDA {_cuda_text(driver)}, cuda-bindings here needs a later one; update the "
            "driver, or install cuda-bindings and nvidia-nccl for its CUDA"
        )
    if status.name == _NO_DEVICE or not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise FabricUnavailable(f"nccl: this process sees no CUDA device{setting}")
    if status.value:
        raise FabricUnavailable(f"nccl: CUDA does not start: cudaGetDeviceCount: {status.name}")
    return int(driver)


def _cuda_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
