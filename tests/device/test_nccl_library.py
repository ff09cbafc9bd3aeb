"""A missing library is named; and the stand-ins have the signatures of the libraries, where these are installed."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncpar.device import nccl_library
from asyncpar.device.fabric import FabricUnavailable, NcclDtype, NcclOp, NcclResult
from asyncpar.device.nccl import open_nccl_fabric
from asyncpar.device.nccl_library import load_library
from tests.backends.extras import need
from tests.device import nccl_stand_in
from tests.device.nccl_stand_in import (
    MODULES,
    Bindings,
    Communicator,
    CudaStatus,
    Libraries,
    Runtime,
    given,
    versions,
)


def test_libraries_that_fit_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    library = load_library()
    assert (library.versions.nccl, library.versions.cuda_driver) == (23203, 13000)


@pytest.mark.parametrize(
    ("module", "package"), [(MODULES[0], "nccl4py"), (MODULES[1], "nccl4py"), (MODULES[2], "cuda-bindings")]
)
def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    given(monkeypatch)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FabricUnavailable, match=rf'needs {package}, .*pip install "asyncpar\[nccl\]"'):
        load_library()


@pytest.mark.parametrize("version", ["0.5.0", "0.7.1", "1.0.0"])
def test_another_version_of_the_bindings_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    given(monkeypatch, core={"__version__": version})
    with pytest.raises(FabricUnavailable, match=rf"expected nccl4py 0\.6, got {version}"):
        load_library()


def test_a_missing_library_of_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, core={"get_version": lambda: versions(None)})
    with pytest.raises(FabricUnavailable, match=r"finds no libnccl\.so\.2; .*nvidia-nccl-cu13"):
        load_library()


def test_a_library_of_nccl_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(major=2, minor=27, micro=5)
    given(monkeypatch, core={"get_version": lambda: versions(old)})
    with pytest.raises(FabricUnavailable, match=r"expected NCCL 2\.29\.0 or later, got .*/x/libnccl\.so"):
        load_library()


def test_a_host_without_a_driver_gets_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, driver=0)
    with pytest.raises(FabricUnavailable, match="this host has no NVIDIA driver"):
        load_library()


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = given(monkeypatch, driver=11080)
    cuda.statuses["cudaGetDeviceCount"] = CudaStatus.cudaErrorInsufficientDriver
    with pytest.raises(FabricUnavailable, match=r"the driver knows CUDA 11\.8"):
        load_library()


def test_hidden_devices_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = given(monkeypatch, devices=0)
    cuda.statuses["cudaGetDeviceCount"] = CudaStatus.cudaErrorNoDevice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(FabricUnavailable, match=r"sees no CUDA device .CUDA_VISIBLE_DEVICES is ''"):
        load_library()


# -- the libraries themselves ------------------------------------------------------------------------------------------


def real(module: str) -> Any:
    need("nccl", 'pip install "nccl4py~=0.6.0"')
    need("cuda.bindings", "pip install cuda-bindings")
    return importlib.import_module(module)


def names(call: Any) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name != "self"]


def public(stand_in: type[Any]) -> list[str]:
    return [name for name, value in vars(stand_in).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize(
    ("stand_in", "module", "owner"),
    [(Bindings, MODULES[1], None), (Runtime, MODULES[2], None), (Communicator, MODULES[0], "Communicator")],
)
def test_every_call_has_the_parameters_of_the_librarys(stand_in: type[Any], module: str, owner: str | None) -> None:
    library = real(module)
    actual = library if owner is None else getattr(library, owner)
    differing = {
        name: (names(getattr(stand_in, name)), names(getattr(actual, name)))
        for name in public(stand_in)
        if names(getattr(stand_in, name)) != names(getattr(actual, name))
    }
    assert public(stand_in)
    assert differing == {}


def test_init_unique_ids_and_properties_are_those_of_the_library() -> None:
    core = real("nccl.core")
    fake = nccl_stand_in.make_core(Libraries())
    assert names(core.Communicator.init) == names(fake.Communicator.init)
    assert names(core.get_unique_id) == names(nccl_stand_in.get_unique_id)
    assert names(core.UniqueId.from_bytes) == names(nccl_stand_in.UniqueId.from_bytes)
    assert core.NCCLConfig(blocking=False).blocking is False
    for name in ("is_valid", "ptr", "rank", "nranks"):
        assert isinstance(getattr(core.Communicator, name), property)


def test_numbers_are_those_of_the_library() -> None:
    core, bindings = real("nccl.core"), real("nccl.bindings.nccl")
    for dtype in NcclDtype:
        assert int(core.NcclDataType[dtype.name]) == nccl_stand_in.NcclDataType[dtype.name]
    for op in NcclOp:
        assert int(core.NcclRedOp[op.name]) == nccl_stand_in.NcclRedOp[op.name]
    assert {one.name: int(one) for one in bindings.Result} == {one.name: one.value for one in nccl_stand_in.Result}
    assert {f"nccl{one.name}" for one in bindings.Result} - {"ncclNumResults"} == {one.value for one in NcclResult}
    assert [int(one) for one in core.CommShrinkFlag] == [0, 1]
    assert issubclass(bindings.NCCLError, Exception)


def test_constants_of_cuda_are_those_of_the_library() -> None:
    runtime = real("cuda.bindings.runtime")
    for name in ("cudaStreamNonBlocking", "cudaEventDisableTiming", "cudaHostAllocPortable"):
        assert int(getattr(runtime, name)) == getattr(Runtime, name)
    assert int(runtime.cudaMemcpyKind.cudaMemcpyDefault) == Runtime.cudaMemcpyKind.cudaMemcpyDefault
    for status in CudaStatus:
        assert int(getattr(runtime.cudaError_t, status.name)) == status
    described = runtime.cudaDeviceProp()
    assert len(bytes(described.uuid.bytes)) == 16
    assert isinstance(described.name, bytes)


def test_a_host_as_it_is_opens_or_says_what_is_missing() -> None:
    """With the libraries and no driver, which is how CI is, the error is of this class and names what is missing."""
    real("nccl.core")
    try:
        fabric = open_nccl_fabric()
    except FabricUnavailable as error:
        assert any(word in str(error) for word in ("libnccl", "driver", "device"))  # noqa: PT017
    else:
        assert fabric.devices()


def test_the_versions_that_are_required_are_those_of_the_extra() -> None:
    import tomllib

    from tests.backends.extras import ROOT

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"nccl4py~={'.'.join(map(str, nccl_library.NCCL4PY))}.0" in extras["nccl"]
