"""Plant faults in namespaces of their own, and see whether `asyncpar doctor` names each (goal A9).  Needs root.

    scripts/bench/run doctor_faults                      # all of them
    scripts/bench/run doctor_faults "few ports" MTU      # those whose names have these words

Prints a line per fault, and ends with code 1 if one was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable
DOCTOR = f"exec {PYTHON} -m asyncpar doctor --json"
PEER = f"{PYTHON} -m asyncpar doctor --listen :29399"
LIMIT = 10.0

LINK = """
ip link set lo up
ip link add here type veth peer name far netns $THERE
ip address add 10.9.0.1/24 dev here
ip link set here up
nsenter --net=/proc/$THERE/ns/net sh -c 'ip link set lo up; ip address add 10.9.0.2/24 dev far; ip link set far up'
sleep 0.2
"""
"""A second host: the network namespace of the process $THERE, linked by a pair of interfaces."""


@dataclass(frozen=True)
class Fault:
    """A fault: ``plant`` is a shell script that runs before the doctor; ``check`` must be found wrong."""

    name: str
    check: str
    plant: str
    options: str = ""
    peer: str | None = None
    """How the other host's doctor is started; None: there is no other host."""


SHIFTED = "import time\nreal = time.time\ntime.time = lambda: real() + 5.0\n"
OLDER = (
    "import importlib.metadata as m\nreal = m.version\n"
    "m.version = lambda name: '0.0.1' if name == 'asyncpar' else real(name)\n"
)
HOSTS = "--hosts 10.9.0.2 --secret-file $WORK/secret"
FAULTS = (
    Fault("lo is down", "loopback", ""),
    Fault(
        "MTU of 900",
        "links",
        "ip link set lo up; ip link add d0 mtu 900 type veth peer name d1; ip link set d0 up; ip link set d1 up",
    ),
    Fault("few ports", "port range", "ip link set lo up; echo '60000 60100' > /proc/sys/net/ipv4/ip_local_port_range"),
    Fault(
        "own name unknown",
        "name",
        "ip link set lo up; hostname ghost; : > $WORK/empty; echo 'hosts: files' > $WORK/nss; "
        "mount --bind $WORK/empty /etc/hosts; mount --bind $WORK/nss /etc/nsswitch.conf",
        "--hosts 127.0.0.1",
    ),
    Fault(
        "name server is silent",
        "name",
        LINK + "ip neigh replace 10.9.0.53 lladdr 02:00:00:00:00:01 nud permanent dev here; "
        "echo 'nameserver 10.9.0.53' > $WORK/names; echo 'hosts: files dns' > $WORK/nss; "
        "mount --bind $WORK/names /etc/resolv.conf; mount --bind $WORK/nss /etc/nsswitch.conf",
        "--hosts far.example",
        PEER,
    ),
    Fault("small /dev/shm", "/dev/shm", "ip link set lo up; mount -t tmpfs -o size=1m tmpfs /dev/shm"),
    Fault("256 open files", "open files", "ip link set lo up; ulimit -n 256"),
    Fault(
        "quota of half a processor",
        "processors",
        "ip link set lo up; mount -t tmpfs tmpfs /sys/fs/cgroup; cd /sys/fs/cgroup; mkdir cpu cpu,cpuacct; "
        "echo '50000 100000' > cpu.max; for d in cpu cpu,cpuacct; do "
        "echo 50000 > $d/cpu.cfs_quota_us; echo 100000 > $d/cpu.cfs_period_us; done; cd - > /dev/null",
    ),
    Fault(
        "secret for all to read", "secret", "ip link set lo up; chmod 644 $WORK/secret", "--secret-file $WORK/secret"
    ),
    Fault("no way to the host", "way", LINK + "ip route add blackhole 10.9.0.2/32", HOSTS, PEER),
    Fault("link of the other host down", "way", LINK + "ip link set here down", HOSTS, PEER),
    Fault(
        "firewall that passes the doctor alone",
        "rank ports",
        LINK
        + "nsenter --net=/proc/$THERE/ns/net sh -c 'ip rule add pref 100 lookup local; ip rule add pref 10 iif far "
        "ipproto tcp sport 32768-60999 dport 32768-60999 blackhole; ip rule del pref 0'",
        HOSTS,
        f"{PEER} --secret-file $WORK/secret",
    ),
    Fault("clock 5 s ahead", "clock", LINK, HOSTS, f"env PYTHONPATH=$WORK/shifted {PEER} --secret-file $WORK/secret"),
    Fault("other secret", "secret", LINK, HOSTS, f"{PEER} --secret-file $WORK/other"),
    Fault("other version", "versions", LINK, HOSTS, f"env PYTHONPATH=$WORK/older {PEER} --secret-file $WORK/secret"),
    Fault(
        "large packets are lost",
        "MTU",
        LINK + "ip link set here gso_max_segs 1; nsenter --net=/proc/$THERE/ns/net sh -c "
        "'ip link set far mtu 900; ip route change 10.9.0.0/24 dev far advmss 1460'",
        HOSTS,
        f"{PEER} --secret-file $WORK/secret",
    ),
)
HEALTHY = Fault("(nothing: all is well)", "", LINK, HOSTS, f"{PEER} --secret-file $WORK/secret")


def try_fault(fault: Fault, work: Path) -> tuple[bool, float, str]:
    """Return whether the doctor has found the fault, in how many seconds, and what it says."""
    (work / "secret").write_bytes(b"s" * 32)
    (work / "other").write_bytes(b"o" * 32)
    for name in ("secret", "other"):
        (work / name).chmod(0o600)
    for name, text in (("shifted", SHIFTED), ("older", OLDER)):
        (work / name).mkdir(exist_ok=True)
        (work / name / "sitecustomize.py").write_text(text)
    environment = os.environ | {"WORK": str(work), "GRPC_VERBOSITY": "NONE"}
    peer = None
    if fault.peer is not None:
        command = ["unshare", "--net", "sh", "-c", f"ip link set lo up; exec {fault.peer}"]
        peer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert peer.stdout is not None
        assert "answers at" in peer.stdout.readline(), peer.communicate()
        environment["THERE"] = str(peer.pid)
    try:
        script = f"{fault.plant}\n{DOCTOR} {fault.options}"
        began = time.monotonic()
        done = subprocess.run(
            ["unshare", "--net", "--mount", "--uts", "bash", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        seconds = time.monotonic() - began
    finally:
        if peer is not None:
            peer.kill()
            peer.wait()
    try:
        findings = json.loads(done.stdout)["findings"]
    except ValueError:
        return False, seconds, done.stdout + done.stderr
    wrong = {finding["check"]: finding for finding in findings if finding["verdict"] == "fail"}
    if not fault.check:
        return done.returncode == 0, seconds, str(wrong or done.stderr)
    found = wrong.get(fault.check)
    text = f"{found['found']} -> {found['advice']}" if found else f"found instead: {sorted(wrong)} {done.stderr}"
    return bool(found and found["advice"]) and done.returncode == 1 and seconds <= LIMIT, seconds, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="parts of the names of faults (default: all)")
    names = parser.parse_args().faults
    chosen = [fault for fault in (*FAULTS, HEALTHY) if not names or any(name in fault.name for name in names)]
    missed, slowest = 0, 0.0
    for fault in chosen:
        with tempfile.TemporaryDirectory() as work:
            is_found, seconds, text = try_fault(fault, Path(work))
        missed += not is_found
        slowest = max(slowest, seconds)
        print(f"{'found ' if is_found else 'MISSED'}  {seconds:5.1f} s  {fault.name}: {text}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)}, the slowest in {slowest:.1f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
