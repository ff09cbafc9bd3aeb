"""Two hosts in one: two network namespaces with a wire between them, and a launcher in each.  As root.

python scripts/examples/two_hosts.py [PROGRAM]
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = [f"ap{side}{os.getpid()}" for side in "ab"]
PROGRAM = Path(__file__).with_name("first_steps.py")


def ip(*words: str, is_needed: bool = True) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if is_needed and done.returncode != 0:  # not permitted, or a name that is taken
        sys.exit(f"two_hosts: ip {' '.join(words)}: {done.stderr.strip() or 'failed'}")


def wire() -> None:
    """Make the hosts 10.213.8.1 and 10.213.8.2."""
    for name in NAMES:
        ip("netns", "add", name)
    ip("link", "add", "wire", "netns", NAMES[0], "type", "veth", "peer", "name", "wire", "netns", NAMES[1])
    for place, name in enumerate(NAMES, 1):
        ip("-n", name, "addr", "add", f"10.213.8.{place}/24", "dev", "wire")
        ip("-n", name, "link", "set", "wire", "up")
        ip("-n", name, "link", "set", "lo", "up")


def main() -> int:
    program = Path(sys.argv[1]) if len(sys.argv) > 1 else PROGRAM
    if os.geteuid() != 0 or shutil.which("ip") is None:
        sys.exit("two_hosts: network namespaces need root and the command ip (apt-get install iproute2)")
    if not program.is_file():
        sys.exit(f"two_hosts: there is no program {program}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        secret = Path(folder) / "job.secret"
        secret.touch(0o600)
        secret.write_bytes(secrets.token_bytes(32))
        for name in NAMES:
            stack.callback(ip, "netns", "del", name, is_needed=False)
        wire()
        launch = ["-m", "asyncpar", "launch", "--nnodes", "2", "--nproc-per-node", "2", "--secret-file", str(secret)]
        launch += ["--rdzv-endpoint", "10.213.8.1:29400"]
        commands = [[*launch, "--node-rank", str(place), str(program)] for place in range(2)]
        inside = [["ip", "netns", "exec", name, sys.executable] for name in NAMES]
        hosts = [subprocess.Popen(before + after) for before, after in zip(inside, commands, strict=True)]
        return max(host.wait() for host in hosts)


if __name__ == "__main__":
    sys.exit(main())
