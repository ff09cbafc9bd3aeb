"""The folders under ``deploy/kustomize``, and what kustomize makes of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

FOLDER: Final = Path(__file__).parents[3] / "deploy" / "kustomize"
BASES: Final = ("indexed-job", "jobset")


def built(folder: str) -> list[dict[str, Any]]:
    """Return what ``kubectl kustomize`` makes of ``folder``; skip the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    words = ["kubectl", "kustomize", str(FOLDER / folder)]
    made = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))
