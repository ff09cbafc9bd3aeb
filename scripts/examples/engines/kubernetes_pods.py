"""Train the language model in pods: ``python scripts/examples/engines/kubernetes_pods.py --steps 20`` (needs root).

Makes the manifests of ``ranks.py`` as ``asyncpar k8s`` does, and runs its two pods as network namespaces of this
machine, whose names resolve after a second.  With a cluster and an image, see ``ranks.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from language_model import check_options  # type: ignore[import-not-found]  # noqa: E402  # beside this script

from scripts.bench.pods import finish, running_pods  # noqa: E402

NAMES_AFTER = 1.0
LIMIT = 600.0


def main() -> None:
    """Make the manifests, run the pods, and show what the first rank shows."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        sys.exit("kubernetes_pods: network namespaces need root and the command ip (apt-get install iproute2)")
    check_options()
    ranks = str(Path(__file__).with_name("ranks.py").resolve())
    options = ["--image", "none", "--name", "lm", "--nodes", "2", "--tasks-per-node", "2", "--python", sys.executable]
    command = [sys.executable, "-m", "asyncpar", "k8s", *options, "--dry-run", ranks, *sys.argv[1:]]
    manifests = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    with running_pods(manifests, names_after=NAMES_AFTER) as pods:
        ended = finish(pods, timeout=LIMIT)
    if any(code for code, _ in ended):
        sys.exit("\n".join(output for _, output in ended))
    print(next(line for line in ended[0][1].splitlines() if line.startswith("{")))


if __name__ == "__main__":
    main()
