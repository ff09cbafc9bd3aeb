"""The distributions as users get them: built, installed without extras, and used from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from asyncpar import __version__
from tests.backends.extras import ROOT, need

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_MEGABYTES = 250
"""Of all that comes with asyncpar: numpy, gRPC and ml_dtypes are most of it."""

GROUP = "import asyncio; from asyncpar.parallel import init_process_group as f; asyncio.run(f({!r}))"


def run(*command: object, folder: Path, status: int = 0, **variables: str) -> str:
    """Run ``command`` in ``folder`` with nothing of this environment, and return what it printed."""
    words = [str(word) for word in command]
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HOME", "PATH"))}
    done = subprocess.run(words, cwd=folder, env=kept | variables, capture_output=True, text=True, check=False)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution, and the wheel that is built from it, by their suffixes."""
    need("build", "pip install build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    return {"".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffix): path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def python(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the wheel was installed, without extras."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", "env", folder=folder)
    python = folder / "env" / "bin" / "python"
    pip(python, "install", "--quiet", "--no-compile", distributions[".whl"])
    return python


def pip(python: Path, *words: object) -> str:
    """Run pip of this environment for that of ``python``, which needs none of its own, and return what it printed."""
    return run(sys.executable, "-m", "pip", "--python", python, *words, folder=python.parent)


def test_the_wheel_has_the_package_and_nothing_else(distributions: dict[str, Path]) -> None:
    names = zipfile.ZipFile(distributions[".whl"]).namelist()
    assert {name.split("/")[0] for name in names} == {"asyncpar", f"asyncpar-{__version__}.dist-info"}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "asyncpar").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("asyncpar/")} == {
        name for name in here if "__pycache__" not in name
    }


def test_the_source_distribution_has_what_its_tests_read(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions[".tar.gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.split("/")[0] for name in names if name}
    assert tops >= {"asyncpar", "docs", "proto", "scripts", "tests", "README.md", "CHANGELOG.md", "SECURITY.md"}
    assert {"scripts/test", "docs/start.md", "tests/conftest.py"} <= names


def test_package_indexes_would_take_both(distributions: dict[str, Path]) -> None:
    need("twine", "pip install twine")
    said = run(sys.executable, "-m", "twine", "check", "--strict", *distributions.values(), folder=ROOT)
    assert said.count("PASSED") == 2


def test_it_brings_what_it_declares_and_nothing_heavy(python: Path) -> None:
    listed = pip(python, "list", "--format=freeze", "--disable-pip-version-check")
    brought = {re.split("==| @ ", line)[0].lower().replace("_", "-") for line in listed.splitlines()}
    declared = {re.split("[^A-Za-z0-9_-]", line)[0].lower().replace("_", "-") for line in PROJECT["dependencies"]}
    assert declared <= brought
    assert not brought & {"torch", "pandas", "scipy", "matplotlib", "aiohttp", "distributed", "ray", "mpi4py"}
    packages = next((python.parent.parent / "lib").glob("python3*")) / "site-packages"
    assert sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) < MOST_MEGABYTES << 20


def test_it_is_used_from_another_folder(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import asyncpar; print(asyncpar.__version__, asyncpar.__file__)", folder=tmp_path)
    version, path = where.split()
    assert version == __version__
    assert Path(path).is_relative_to(python.parent.parent)
    program = tmp_path / "first_steps.py"
    program.write_text((ROOT / "scripts" / "examples" / "first_steps.py").read_text())
    assert run(python, program, folder=tmp_path) == "0 0.0 (1, 4) (1048576,) 3\n"
    command = python.parent / "asyncpar"
    said = run(command, "launch", "--nproc-per-node", 4, program, folder=tmp_path)
    assert sorted(line.split("] ")[-1] for line in said.splitlines()) == [
        f"{rank} 6.0 (4, 4) (262144,) 3" for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("checkpoint", ["python", "-c", "from asyncpar.checkpoint.format import load_safetensors as f; f()"]),
        ("plot", ["asyncpar", "bench", "all_reduce", "--plot", "x.png", "--sizes", "4"]),
        ("dashboard", ["asyncpar", "launch", "--dashboard", "x.py"]),
        ("metrics", ["asyncpar", "launch", "--metrics", "x.py"]),
        ("opentelemetry", ["asyncpar", "launch", "--sink", "opentelemetry", "x.py"]),
        ("engines", ["python", "-c", "import asyncpar as ap; ap.cluster.run(lambda: 1, ranks=1, pickle=True)"]),
        ("torch", ["python", "-c", "import asyncpar.torch"]),
        ("nccl", ["python", "-c", "from asyncpar.device.nccl_library import load_library as f; f()"]),
        ("ray", ["python", "-c", "import asyncpar as ap; ap.ray.run(print, ranks=1)"]),
        ("mpi", ["python", "-c", GROUP.format("mpi")]),
        ("gloo", ["python", "-c", GROUP.format("gloo")]),
    ],
)
def test_a_missing_extra_is_named_in_one_line(python: Path, tmp_path: Path, extra: str, command: list[str]) -> None:
    (tmp_path / "x.py").write_text("")
    done = subprocess.run(
        [python.parent / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False, env={}
    )
    assert done.returncode != 0
    assert f"asyncpar[{extra}]" in done.stderr.strip().splitlines()[-1], done.stderr


def test_the_doctor_names_the_extra_for_dask(python: Path, tmp_path: Path) -> None:
    said = run(python.parent / "asyncpar", "doctor", "--dask", "tcp://127.0.0.1:8786", folder=tmp_path, status=1)
    assert 'pip install "asyncpar[dask]"' in said


def test_type_checkers_find_no_error_in_the_examples_and_know_what_wanted_makes() -> None:
    need("pyright", 'pip install "pyright[nodejs]"')
    programs = [path for path in (ROOT / "scripts" / "examples").rglob("*.py") if "ray" not in path.name]
    programs.append(Path(__file__).parent / "typed_objects.py")
    said = run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *programs, folder=ROOT)
    assert "0 errors, 0 warnings" in said
