"""Run a program of scripts/bench by its name, or list all of them.

    scripts/bench/run --list                                        # every program with a line
    scripts/bench/run NAME --help                                   # what NAME measures, and its options
    scripts/bench/run compare --ops all_reduce --rounds 3
    scripts/bench/run --dashboard observe_cost --steps 200 --dp 2   # options before NAME: of `asyncpar launch`

A program is a file here or in a folder beside this one that runs as a script; its line is the first sentence of its
docstring.  Programs of ranks (``*_rank.py``) and of other libraries (``peers``) are started by others.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
RUN = "scripts/bench/run"

LAUNCHED = {"elastic_cost": 2, "observe_cost": 2, "recorder": 2}
"""Programs that are ranks of one job, and how many `asyncpar launch` starts unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment that the script ``maker`` makes, for programs that use ``module``.

    It is in ``folder`` of the checkout, or where ``variable`` says.  A program that needs it does not run without it.
    """

    module: str
    maker: str
    folder: str
    variable: str
    is_needed: bool = True

    @property
    def python(self) -> Path:
        """The interpreter, whether it is there or not."""
        return Path(os.environ.get(self.variable) or ROOT / self.folder) / "bin" / "python"


_BACKENDS = Environment(
    module="torch", maker="scripts/test-backends", folder=".venv-backends", variable="ASYNCPAR_BACKENDS_VENV"
)
_RAY = Environment(module="ray", maker="scripts/test-ray", folder=".venv-ray", variable="ASYNCPAR_RAY_VENV")
_GPU = Environment(
    module="nccl", maker="scripts/test-gpu", folder=".venv-gpu", variable="ASYNCPAR_GPU_VENV", is_needed=False
)
ENVIRONMENTS = {"device": _GPU, "ray_collective": _RAY, "torch_ddp": _BACKENDS, "torch_groups": _BACKENDS}
"""Programs that need more than the others, and where that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program: its file, and the first sentence of its docstring."""

    path: Path
    summary: str


def find_programs() -> dict[str, Program]:
    """Return the programs by name, in the order of folders and names."""
    paths = sorted(BENCH.glob("*.py")) + sorted(BENCH.glob("*/*.py"))
    wanted = (path for path in paths if path.parent.name != "peers" and not path.stem.endswith("_rank"))
    programs: dict[str, Program] = {}
    for path in wanted:
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__).resolve() and 'if __name__ == "__main__":' in text:
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
            programs[path.stem] = Program(path=path, summary=" ".join(first.split()))
    return programs


def list_programs() -> str:
    """Return a line for each program, below the name of its folder."""
    programs = find_programs()
    width = max(map(len, programs)) + 2
    lines: list[str] = []
    for folder in dict.fromkeys(program.path.parent for program in programs.values()):
        lines += ["", f"{folder.relative_to(ROOT)}:"]
        lines += [f"  {name:{width}}{one.summary}" for name, one in programs.items() if one.path.parent == folder]
    return "\n".join(lines[1:])


def command_of(name: str, options: Sequence[str], launch_options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs the program ``name``; a wrong name, or options before it, end the process with 2."""
    programs = find_programs()
    if name not in programs:
        _refuse(f"expected the name of a program, got {name!r}; {RUN} --list shows all of them")
    if launch_options and name not in LAUNCHED:
        _refuse(f"options of {name} come after its name, got {' '.join(launch_options)} before it")
    python, program = _python_for(name), str(programs[name].path)
    if name not in LAUNCHED or {"-h", "--help"} & set(options):
        return [python, program, *options]
    launch = [*launch_options]
    if not any(option.startswith("--nproc-per-node") for option in launch):
        launch.append(f"--nproc-per-node={LAUNCHED[name]}")
    return [python, "-m", "asyncpar", "launch", *launch, program, *options]


def _python_for(name: str) -> str:
    environment = ENVIRONMENTS.get(name)
    if environment is None or importlib.util.find_spec(environment.module) is not None:
        return sys.executable
    if environment.python.exists():
        return str(environment.python)
    if environment.is_needed:
        _refuse(f"{name} needs {environment.module}; `{environment.maker} --version` makes an environment for it")
    return sys.executable


def _refuse(message: str) -> NoReturn:
    print(f"{RUN}: {message}", file=sys.stderr)
    raise SystemExit(2)


def own_command(command: str) -> list[str]:
    """Return the words of ``command``; what is written for the checkout's Python runs with this interpreter."""
    first, *others = shlex.split(command)
    own = {
        RUN: [sys.executable, str(Path(__file__).resolve())],
        "asyncpar": [sys.executable, "-m", "asyncpar"],
        "python": [sys.executable],
    }
    return [*own.get(first, [first]), *others]


def main(arguments: Sequence[str]) -> None:
    """Become the program that is named, or list all of them."""
    place = next((place for place, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    before, named = arguments[:place], arguments[place:]
    if {"-h", "--help"} & set(before) or not arguments:
        print(f"{__doc__.rstrip()}\n\n{list_programs()}")
    elif before == ["--list"]:
        print(list_programs())
    elif not named:
        _refuse(f"expected the name of a program; {RUN} --list shows all of them")
    else:
        command = command_of(named[0], named[1:], before)
        os.execv(command[0], command)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head` ends without a traceback
    main(sys.argv[1:])
