"""Without any extra every public name can be looked at; the use of what needs one names it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]

MODULES = {
    "aiohttp": "aiohttp",
    "cloudpickle": "cloudpickle",
    "cuda-bindings": "cuda",
    "distributed": "distributed",
    "fastapi": "fastapi",
    "httpx": "httpx",
    "jax": "jax",
    "matplotlib": "matplotlib",
    "grpcio-reflection": "grpc_reflection",
    "mpi4py": "mpi4py",
    "nccl4py": "nccl",
    "nvidia-nccl-cu12": "nvidia",
    "nvidia-nccl-cu13": "nvidia",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "prometheus_client": "prometheus_client",
    "ray": "ray",
    "safetensors": "safetensors",
    "torch": "torch",
    "uvicorn": "uvicorn",
}
"""The distributions of all extras, and what they bring."""

BLOCKED = sorted({*MODULES.values(), "dask", "hypothesis", "pytest", "tornado"})

BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{top!r}}", name=top)

sys.meta_path.insert(0, Blocked())
"""


def without_extras(program: str) -> list[str]:
    """Run ``program`` where no extra can be imported, and return the lines that it prints."""
    source = BLOCK + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_extra_is_forgotten_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ours = {name: needs for name, needs in extras.items() if name not in ("test", "docs", "dev")}
    named = {re.split(r"[^A-Za-z0-9_-]", need)[0] for needs in ours.values() for need in needs}
    assert named == set(MODULES)


def test_every_public_name_is_looked_at() -> None:
    program = """
        import importlib, inspect
        sys.path.insert(0, "docs")
        from public_names import PACKAGES, listed_names

        seen = 0
        for package in (package for packages in PACKAGES.values() for package in packages):
            if package == "asyncpar.torch":
                continue
            module = importlib.import_module(package)
            for name in listed_names(package):
                value, seen = getattr(module, name), seen + 1
                repr(value), inspect.getdoc(value), dir(value)
                try:
                    inspect.signature(value)
                except (TypeError, ValueError):
                    pass  # a constant, a module, or a class of the standard library's C code
        print(seen)
    """
    (seen,) = without_extras(program)
    assert int(seen) > 500


TOOLS = [
    "pydoc.render_doc(ap)",
    "exec('from asyncpar import *', {})",
    "inspect.getmembers(ap)",
    "mock.create_autospec(ap)",
    "[getattr(ap, name) for name in dir(ap)]",
    "[inspect.getmembers(getattr(ap, name)) for name in ('dask', 'mpi', 'ray', 'slurm')]",
    "[pydoc.render_doc(getattr(ap, name)) for name in ap.__all__]",
    "doctest.DocTestFinder().find(ap)",
]

USES = {
    "ap.dask.run(None, print, ranks=1)": "dask",
    "asyncio.run(ap.dask.launch(None, print, ranks=1))": "dask",
    "asyncio.run(ap.dask.world(None).__aenter__())": "dask",
    "ap.ray.run(print, ranks=1)": "ray",
    "ap.ray.register_collective_backend()": "ray",
    "ap.ray.AsyncparConfig": "ray",
    "ap.cluster.run(lambda: 1, ranks=1, pickle=True)": "engines",
    "load('asyncpar.torch')": "torch",
    "load('asyncpar.jax')": "jax",
    "load('asyncpar.checkpoint.format').load_safetensors()": "checkpoint",
    "asyncio.run(load('asyncpar.parallel').init_process_group('mpi'))": "mpi",
    "asyncio.run(load('asyncpar.parallel').init_process_group('gloo'))": "gloo",
    "load('asyncpar.device.nccl_library').load_library()": "nccl",
}
"""What needs an extra, and its name."""


def outcomes(programs: Iterable[str]) -> dict[str, str]:
    """Return what each of ``programs`` raised, "" where nothing."""
    program = f"""
        import asyncio, doctest, inspect, json, pydoc
        from importlib import import_module as load
        from unittest import mock
        import asyncpar as ap

        outcomes = {{}}
        for program in {list(programs)!r}:
            try:
                exec(program)
                outcomes[program] = ""
            except Exception as error:
                outcomes[program] = f"{{type(error).__name__}}: {{error}}"
        print(json.dumps(outcomes))
    """
    found: dict[str, str] = json.loads(without_extras(program)[-1])
    return found


def test_tools_look_at_the_package() -> None:
    assert outcomes(TOOLS) == dict.fromkeys(TOOLS, "")


def test_the_use_of_a_missing_extra_names_it() -> None:
    assert {program: said for program, said in outcomes(USES).items() if f"asyncpar[{USES[program]}]" not in said} == {}
