"""Loss curves become pictures, or a message that says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.train import plot_losses


def test_a_png_is_written(tmp_path: Path) -> None:
    plot_losses({"4 ranks": [3.0, 2.0, 1.0], "one process": [3.0, 2.0, 1.1]}, tmp_path / "loss.png", title="test")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r'pip install "asyncpar\[plot\]"'):
        plot_losses({"a": [1.0]}, tmp_path / "loss.png", title="test")
