"""Manifests of a job in Kubernetes: a JobSet, or an indexed Job where there is no JobSet.  Pure.

Each pod runs `asyncpar launch` as one host, whose place is the pod's index; the first pod serves the others under its
name.  The secret comes as a Secret, of which a container makes a copy in memory that only its user can read.  When a
pod is asked to end (a node is drained, the pod is preempted), its ranks get SIGTERM and have the grace period.  A
JobSet then starts all pods again, and does not count it; failures of ranks count.
"""

from __future__ import annotations

import base64
import re
import shlex
from dataclasses import dataclass
from typing import Any

from asyncpar.core.config.checks import check_count
from asyncpar.errors import UsageError
from asyncpar.launch.options import ProgramKind

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGTP]i?)?", re.ASCII)
_RESOURCE = re.compile(r"[a-z0-9.-]+(/[A-Za-z0-9._-]+)?", re.ASCII)
_LONGEST_NAME = 40
"""Of a job: pods add their numbers, and names of hosts end after 63 letters."""
_RANKS = "ranks"
_GIVEN = "/etc/asyncpar"
_OWN = "/run/asyncpar"
_MARGIN = 10
"""Seconds from the end of the ranks' grace period until Kubernetes kills the pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """One job of ``asyncpar k8s``: ``program`` in ``tasks_per_node`` ranks in each of ``nodes`` pods of ``image``.

    ``secret_name`` is a Secret in the namespace with the key ``secret``; None: one is made from ``secret``.
    ``resources`` are those of a pod (``cpu``, ``memory``, ``nvidia.com/gpu``); ``grace`` is in seconds, as is ``ttl``,
    after which Kubernetes deletes a job that has ended (None: never).
    ``is_jobset`` False makes an indexed Job and a headless Service.
    """

    image: str
    program: str
    arguments: tuple[str, ...] = ()
    kind: ProgramKind = ProgramKind.SCRIPT
    name: str = "asyncpar"
    namespace: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    port: int = 29400
    secret_name: str | None = None
    secret: bytes = b""
    resources: tuple[tuple[str, str], ...] = ()
    max_restarts: int = 0
    grace: int = 30
    ttl: int | None = None
    python: str = "python"
    is_jobset: bool = True

    def __post_init__(self) -> None:
        for setting, value in (("--nodes", self.nodes), ("--tasks-per-node", self.tasks_per_node)):
            check_count(setting, value)
        check_count("--max-restarts", self.max_restarts, least=0)
        check_count("--grace-period", self.grace)
        if self.ttl is not None:
            check_count("--ttl", self.ttl, least=0)
        if not 1 <= self.port <= 65535:
            raise UsageError(f"--port: expected 1..65535, got {self.port}")
        for setting, name in (("--name", self.name), ("--namespace", self.namespace), ("--secret", self.secret_name)):
            if name is not None and not (_NAME.fullmatch(name) and len(name) <= _LONGEST_NAME):
                raise UsageError(
                    f"{setting}: expected at most {_LONGEST_NAME} of a-z, 0-9 and -, from a letter on, got {name!r}"
                )
        if not self.image or re.search(r"\s", self.image):
            raise UsageError(f"--image: expected the name of an image, got {self.image!r}")
        for resource, amount in self.resources:
            if not (_RESOURCE.fullmatch(resource) and _QUANTITY.fullmatch(amount)):
                raise UsageError(
                    f"--resource: expected NAME=AMOUNT such as cpu=4, memory=8Gi, nvidia.com/gpu=1, got "
                    f"{resource}={amount}"
                )

    @property
    def first_pod(self) -> str:
        """The name of the first pod in the cluster's DNS."""
        return f"{self.name}-{_RANKS}-0-0.{self.name}" if self.is_jobset else f"{self.name}-0.{self.name}"


def make_manifests(job: KubernetesJob) -> dict[str, Any]:
    """Return the ``List`` of all objects of the job; as JSON it is what ``kubectl create -f`` takes."""
    items: list[dict[str, Any]] = []
    if job.secret_name is None:
        data = {"secret": base64.b64encode(job.secret).decode()}
        made = {**_head("v1", "Secret", job, name=_secret_name(job)), "type": "Opaque", "immutable": True, "data": data}
        items.append(made)
    items += [_jobset(job)] if job.is_jobset else [_service(job), _indexed_job(job)]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def split_owner(manifests: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the JobSet or Job, and what is to be deleted with it."""
    *others, owner = manifests["items"]
    return owner, others


def make_ownership(owner: dict[str, Any], uid: str) -> dict[str, Any]:
    """Return the merge patch by which Kubernetes deletes an object together with ``owner``, created as ``uid``."""
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
    return {"metadata": {"ownerReferences": [{**reference, "uid": uid}]}}


def _secret_name(job: KubernetesJob) -> str:
    return job.secret_name or f"{job.name}-secret"


def _head(version: str, kind: str, job: KubernetesJob, *, name: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name or job.name, "labels": {"app.kubernetes.io/managed-by": "asyncpar"}}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _jobset(job: KubernetesJob) -> dict[str, Any]:
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": _RANKS, "jobIndex": 0, "podIndex": 0},
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [preempted]},
        "replicatedJobs": [{"name": _RANKS, "replicas": 1, "template": {"spec": _job_spec(job)}}],
    }
    return {**_head("jobset.x-k8s.io/v1alpha2", "JobSet", job), "spec": {**spec, **_ttl(job)}}


def _indexed_job(job: KubernetesJob) -> dict[str, Any]:
    return {**_head("batch/v1", "Job", job), "spec": {**_job_spec(job), **_ttl(job)}}


def _ttl(job: KubernetesJob) -> dict[str, int]:
    return {} if job.ttl is None else {"ttlSecondsAfterFinished": job.ttl}


def _service(job: KubernetesJob) -> dict[str, Any]:
    """Return the headless service that names the pods; JobSet makes its own."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}}
    return {**_head("v1", "Service", job), "spec": spec}


def _job_spec(job: KubernetesJob) -> dict[str, Any]:
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [disrupted]}]},
        "template": {"spec": _pod(job)},
    }


def _pod(job: KubernetesJob) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": _RANKS,
        "image": job.image,
        "command": _command(job),
        "ports": [{"containerPort": job.port, "name": "rendezvous", "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "secret", "mountPath": _GIVEN, "readOnly": True},
            {"name": "own", "mountPath": _OWN},
        ],
    }
    if job.resources:
        container["resources"] = {"requests": dict(job.resources), "limits": dict(job.resources)}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace + _MARGIN,
        "containers": [container],
        "volumes": [
            {"name": "secret", "secret": {"secretName": _secret_name(job), "defaultMode": 0o444}},
            {"name": "own", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return pod if job.is_jobset else {**pod, "subdomain": job.name}


def _command(job: KubernetesJob) -> list[str]:
    """Return the command of a pod; ``$(`` would be replaced by Kubernetes."""
    own = f"{_OWN}/secret"
    launch = f'exec {shlex.quote(job.python)} -m asyncpar launch --node-rank "$JOB_COMPLETION_INDEX" "$@"'
    script = f"umask 077 && cat {_GIVEN}/secret > {own} && {launch}"
    options = ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.tasks_per_node), "--rdzv-id", job.name]
    options += ["--rdzv-endpoint", f"{job.first_pod}:{job.port}", "--secret-file", own]
    options += ["--grace-period", str(job.grace)]
    if not job.is_jobset:  # a Job starts nothing again
        options += ["--max-restarts", str(job.max_restarts)]
    options += {ProgramKind.MODULE: ["--module"], ProgramKind.PROGRAM: ["--no-python"]}.get(job.kind, [])
    words = ["sh", "-c", script, "sh", *options, job.program, *job.arguments]
    return [word.replace("$(", "$$(") for word in words]
