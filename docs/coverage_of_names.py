"""Count which public names are shown in a program that tests run, and which options are documented.

python docs/coverage_of_names.py [--missing]
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from public_names import PACKAGES, Use, public_names, use_of  # type: ignore[import-not-found]  # noqa: E402

from tests.options.exceptions import NOT_CONFIGURED  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
EXAMPLES = sorted((ROOT / "scripts" / "examples").rglob("*.py"))
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")


class Count(NamedTuple):
    """So many of ``names`` are shown; ``missing`` are the others."""

    what: str
    names: list[str]
    missing: list[str]

    def __str__(self) -> str:
        shown = len(self.names) - len(self.missing)
        return f"{self.what}: {shown} of {len(self.names)} ({100 * shown / max(1, len(self.names)):.0f} %)"


def words_of_programs() -> set[str]:
    """Return the words of all programs on the pages and in ``scripts/examples``, comments and texts left out."""
    texts = [block for page in PAGES for block in _BLOCK.findall(page.read_text())]
    texts += [example.read_text() for example in EXAMPLES]
    return {word for text in texts for word in _WORD.findall(re.sub(r'(?s:""".*?""")|#.*', "", text))}


def callables(package: str) -> Iterator[tuple[str, object]]:
    """Yield the public classes and functions of ``package``, by name."""
    module = importlib.import_module(package)
    for name in public_names(package):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            yield name, value


def shown(what: str, *uses: Use) -> Count:
    """Count the public names for ``uses`` that a program on the pages or an example has."""
    words = words_of_programs()
    names = [
        (f"{package}.{name}", name)
        for packages in PACKAGES.values()
        for package in packages
        for name in public_names(package)
        if use_of(package, name) in uses
    ]
    return Count(what, [path for path, _ in names], [path for path, name in names if name not in words])


def options() -> Count:
    """Count the options of public classes and functions whose meaning their documentation says."""
    names, missing = [], []
    for package in (package for packages in PACKAGES.values() for package in packages):
        for name, value in callables(package):
            documentation = _documentation(value)
            is_configured = f"{package}.{name}" not in NOT_CONFIGURED  # results, and what the library makes
            for option in _options(value) if is_configured else ():
                names.append(f"{package}.{name}: {option}")
                if not re.search(rf"\b{option}\b", documentation):
                    missing.append(names[-1])
            for method, function in _methods(value):
                for option in _options(function):
                    names.append(f"{package}.{name}.{method}: {option}")
                    if not (
                        re.search(rf"\b{option}\b", inspect.getdoc(function) or "")
                        or f"``{option}``" in (inspect.getdoc(value) or "")  # which says it for all methods
                    ):
                        missing.append(names[-1])
    return Count("options that their documentation names", names, missing)


def _methods(value: object) -> Iterator[tuple[str, object]]:
    """Yield the public methods of a class that are written in asyncpar."""
    if not inspect.isclass(value):
        return
    ours = [base for base in value.__mro__ if base.__module__.partition(".")[0] == "asyncpar"]
    for name in sorted({name for base in ours for name in vars(base) if not name.startswith(("_", "test_"))}):
        function = getattr(value, name, None)
        if inspect.isroutine(function):
            yield name, function


def _options(value: object) -> list[str]:
    if inspect.isclass(value) and (
        issubclass(value, BaseException | enum.Enum)
        or getattr(value, "_is_protocol", False)
        or (not dataclasses.is_dataclass(value) and all("__init__" not in vars(base) for base in value.__mro__[:-1]))
    ):
        return []
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin
        return []
    has_default = [one for one in parameters if one.default is not inspect.Parameter.empty]
    return [one.name for one in has_default if not one.name.startswith("_")]


def _documentation(value: object) -> str:
    """Return the docstring, and the texts behind fields, of a class and those that it is made of."""
    if not inspect.isclass(value):
        return inspect.getdoc(value) or ""
    texts = [inspect.getdoc(value) or "", inspect.getdoc(value.__init__) or ""]
    for base in value.__mro__[:-1]:
        if base.__module__.startswith("asyncpar"):
            texts.append(base.__doc__ or "")
            fields = re.findall(
                r'^    (\w+): [^\n]*\n    """(.*?)"""', inspect.getsource(base), re.DOTALL | re.MULTILINE
            )
            texts += [f"{field} {text}" for field, text in fields]
    return "\n".join(texts)


def counts() -> list[Count]:
    """Return what ``scripts/docs`` prints."""
    return [
        shown("names for programs that a tested program shows", Use.PROGRAM),
        shown("other public names (returned, raised, extension points) that one shows", *set(Use) - {Use.PROGRAM}),
        options(),
    ]


if __name__ == "__main__":
    for count in counts():
        print(count)  # noqa: T201
        if "--missing" in sys.argv[1:]:
            print("".join(f"  {name}\n" for name in count.missing), end="")  # noqa: T201
