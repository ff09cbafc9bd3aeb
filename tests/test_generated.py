"""Generated code is what its sources say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_protobuf_code_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools (extra dev) is not installed")
    subprocess.run([sys.executable, ROOT / "scripts" / "generate-protos", tmp_path], check=True)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    target = ROOT / "asyncpar" / "_proto"
    committed = {
        path.relative_to(target): path.read_text() for path in target.rglob("*.py*") if "__pycache__" not in path.parts
    }
    assert fresh
    assert committed == fresh


def test_blocking_operations_are_current(tmp_path: Path) -> None:
    pytest.importorskip("ruff", reason="ruff (extra dev) is not installed")
    fresh = tmp_path / "operations.py"
    subprocess.run([sys.executable, ROOT / "scripts" / "generate-blocking", fresh], check=True)
    assert (ROOT / "asyncpar" / "blocking" / "operations.py").read_text() == fresh.read_text()
