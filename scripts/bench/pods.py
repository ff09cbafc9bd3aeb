"""Run the pods of a job of Kubernetes on this machine: each is a set of namespaces, whose names resolve late.

    asyncpar k8s --image none --nodes 2 --python "$(which python)" --dry-run train.py | scripts/bench/run pods

Takes the manifests that `kubectl create` would get (a JobSet, or an indexed Job, with its Secret), and runs the command
of each container with the environment, host name, files and volumes that a kubelet gives it.  A pod has a network, an
address, processes, shared memory, /etc and /run of its own; the rest of its image is this machine.  The names of pods
are known after ``--names-after`` seconds, as the DNS of a cluster knows them.  Nothing is restarted.  Needs root.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.namespaces import End, bridge

_BOX = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
"""``--kill-child``: the pod ends with the process that the caller has."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """One pod of a job: its number, names, and the only container that it has."""

    index: int
    host_name: str
    subdomain: str
    container: dict[str, Any]
    volumes: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        """The name by which other pods look it up."""
        return f"{self.host_name}.{self.subdomain}"


def read_pods(manifests: dict[str, Any]) -> list[PodSpec]:
    """Return the pods of the only JobSet or indexed Job in a ``List``, with the names that they get."""
    [made] = [item for item in manifests["items"] if item["kind"] in ("JobSet", "Job")]
    name, spec = made["metadata"]["name"], made["spec"]
    if made["kind"] == "Job":
        return _pods_of(spec, prefix=name, subdomain=spec["template"]["spec"]["subdomain"])
    return [
        pod
        for group in spec["replicatedJobs"]
        for job in range(group["replicas"])
        for pod in _pods_of(
            group["template"]["spec"],
            prefix=f"{name}-{group['name']}-{job}",
            subdomain=spec["network"]["subdomain"],
        )
    ]


def _pods_of(job: dict[str, Any], *, prefix: str, subdomain: str) -> list[PodSpec]:
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    [container], volumes = job["template"]["spec"]["containers"], tuple(job["template"]["spec"]["volumes"])
    return [PodSpec(index, f"{prefix}-{index}", subdomain, container, volumes) for index in range(job["completions"])]


class RunningPod:
    """A pod that has been started; ``process`` is its container's first."""

    def __init__(self, spec: PodSpec, end: End, folder: Path, secrets: dict[str, dict[str, str]]) -> None:
        self.spec = spec
        self.end = end
        self._folder = folder
        self._make_etc()
        commands = [f"mount --bind /etc {folder}/host-etc", f"mount --bind {folder}/etc /etc"]
        commands += ["mount -t tmpfs tmpfs /run", "mount -t tmpfs tmpfs /dev/shm", f"hostname {spec.host_name}"]
        for mount in spec.container["volumeMounts"]:
            [volume] = [one for one in spec.volumes if one["name"] == mount["name"]]
            commands += self._mount(volume, mount["mountPath"], secrets)
        command = [word.replace("$$(", "$(") for word in [*spec.container["command"], *spec.container["args"]]]
        script = " && ".join([*commands, f"exec {shlex.join(command)}"])
        self.process = subprocess.Popen(
            end.enter([*_BOX, "sh", "-c", script]),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _make_etc(self) -> None:
        """Make an /etc of links to this machine's, in which the files that a kubelet writes are the pod's own."""
        etc = self._folder / "etc"
        etc.mkdir(parents=True)
        (self._folder / "host-etc").mkdir()
        for path in Path("/etc").iterdir():
            if path.name not in ("hosts", "hostname", "resolv.conf", "nsswitch.conf"):
                (etc / path.name).symlink_to(self._folder / "host-etc" / path.name)
        (etc / "hostname").write_text(f"{self.spec.host_name}\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        self.know([])

    def know(self, others: Sequence[RunningPod]) -> None:
        """Let the names of ``others`` resolve in this pod."""
        own = f"127.0.0.1 localhost\n{self.end.address} {self.spec.host_name}\n"
        new = self._folder / "hosts.new"
        new.write_text(own + "".join(f"{other.end.address} {other.spec.name}\n" for other in others))
        new.rename(self._folder / "etc" / "hosts")

    def _mount(self, volume: dict[str, Any], where: str, secrets: dict[str, dict[str, str]]) -> list[str]:
        if "emptyDir" in volume:
            return [f"mkdir -p {where}", f"mount -t tmpfs tmpfs {where}"]
        folder = self._folder / volume["name"]
        folder.mkdir()
        for key, value in secrets[volume["secret"]["secretName"]].items():
            (folder / key).write_bytes(base64.b64decode(value))
            (folder / key).chmod(volume["secret"]["defaultMode"])
        return [f"mkdir -p {where}", f"mount --bind -o ro {folder} {where}"]

    def _environment(self) -> dict[str, str]:
        """Return what a kubelet sets, and what an image has."""
        kubelet = {"HOSTNAME": self.spec.host_name, "JOB_COMPLETION_INDEX": str(self.spec.index)}
        cluster = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        image = {"PATH": os.environ["PATH"], "HOME": str(self._folder), "PYTHONUNBUFFERED": "1"}
        image |= {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")}  # decides bits
        own = {one["name"]: one["value"] for one in self.spec.container.get("env", [])}
        return {**image, **cluster, **kubelet, **own}


@contextmanager
def running_pods(manifests: dict[str, Any], *, names_after: float | None) -> Iterator[list[RunningPod]]:
    """Start all pods of ``manifests`` at once; inside the block they run, and their names resolve ``names_after`` s.

    Where that is None, names resolve once the caller has each pod ``know`` the others.  Nothing is left of them
    afterwards.  Raises ``NoNamespacesError`` where namespaces cannot be made.
    """
    specs = read_pods(manifests)
    secrets = {item["metadata"]["name"]: item["data"] for item in manifests["items"] if item["kind"] == "Secret"}
    pods: list[RunningPod] = []

    def tell_names() -> None:
        for pod in pods:
            pod.know(pods)

    with tempfile.TemporaryDirectory(prefix="pods-") as made, bridge([None] * len(specs)) as ends:
        telling = threading.Timer(names_after or 0.0, tell_names)
        try:
            for spec, end in zip(specs, ends, strict=True):
                pods.append(RunningPod(spec, end, Path(made) / spec.host_name, secrets))
            if names_after is not None:
                telling.start()
            yield pods
        finally:
            telling.cancel()
            for pod in pods:
                pod.process.kill()
            for pod in pods:
                pod.process.communicate()
            if telling.ident is not None:
                telling.join()


def finish(pods: Sequence[RunningPod], *, timeout: float) -> list[tuple[int, str]]:
    """Wait for ``pods``; return the exit code and the output of each.  Raises ``subprocess.TimeoutExpired``."""
    outputs = [""] * len(pods)

    def read(place: int, pod: RunningPod) -> None:
        assert pod.process.stdout is not None
        outputs[place] = pod.process.stdout.read()

    readers = [threading.Thread(target=read, args=each, daemon=True) for each in enumerate(pods)]
    for reader in readers:
        reader.start()
    codes = [pod.process.wait(timeout) for pod in pods]
    for reader in readers:
        reader.join()
    return list(zip(codes, outputs, strict=True))


def main() -> int:
    """Run what is on standard input, and print what the pods print; the exit code is the worst of theirs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names-after", type=float, default=5.0, help="seconds until names of pods resolve")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the job may take")
    options = parser.parse_args()
    with running_pods(json.load(sys.stdin), names_after=options.names_after) as pods:
        ended = finish(pods, timeout=options.timeout)
    for pod, (code, output) in zip(pods, ended, strict=True):
        for line in output.splitlines():
            print(f"{pod.spec.host_name}: {line}")
        print(f"{pod.spec.host_name}: exit code {code}")
    return max(code for code, _ in ended)


if __name__ == "__main__":
    sys.exit(main())
