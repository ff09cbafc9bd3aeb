"""Manifests of a job in Kubernetes: a JobSet, or an indexed Job where JobSet is not available.  Pure.

Each pod runs `asyncpar launch` as one host, whose place is the pod's index; the first pod serves the others under its
name.  The secret comes as a Secret, which a container copies into memory that only its user can read.  When a pod is
asked to end (a node is drained, the pod is preempted), its ranks get SIGTERM and have the grace period.  A JobSet then
starts all pods again, and does not count it; failures of ranks count.

Probes query the launcher of a pod: its metrics where it serves them, otherwise `asyncpar status`.  A launcher that has
not answered for minutes is ended; hung ranks are the launcher's business, and end no pod.
"""

from __future__ import annotations

import base64
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from asyncpar.core.config.checks import check_count
from asyncpar.errors import UsageError
from asyncpar.launch.kubernetes.pod_settings import (
    MANAGED_BY,
    PLACE_VARIABLE,
    RESERVED_PATHS,
    PodSettings,
    check_metrics_port,
)
from asyncpar.launch.options import ProgramKind

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGTP]i?)?", re.ASCII)
_RESOURCE = re.compile(r"[a-z0-9.-]+(/[A-Za-z0-9._-]+)?", re.ASCII)
_LONGEST_NAME = 40
"""The longest name of a job: pods append their numbers, and host names end after 63 characters."""
_RANKS = "ranks"
_GIVEN, _OWN = RESERVED_PATHS
_MARGIN = 10
"""Seconds from the end of the ranks' grace period until Kubernetes kills the pod."""

_STARTUP = {"periodSeconds": 5, "timeoutSeconds": 10, "failureThreshold": 60}
_READINESS = {"periodSeconds": 30, "timeoutSeconds": 10}
_LIVENESS = {"periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """One job of ``asyncpar k8s``: ``program`` in ``tasks_per_node`` ranks in each of ``nodes`` pods of ``image``.

    ``secret_name`` is a Secret in the namespace with the key ``secret``; None: one is made from ``secret``.
    ``resources`` are those of a pod (``cpu``, ``memory``, ``nvidia.com/gpu``); ``grace`` is in seconds, as is ``ttl``,
    after which Kubernetes deletes a job that has ended (None: never).  With ``is_jobset`` False it is an indexed Job
    and a headless Service.  ``metrics_port`` is the port at which each pod serves metrics of its ranks (None: it serves
    none).
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
    metrics_port: int | None = None
    pods: PodSettings = field(default_factory=PodSettings)

    def __post_init__(self) -> None:
        for setting, value in (("--nodes", self.nodes), ("--tasks-per-node", self.tasks_per_node)):
            check_count(setting, value)
        check_count("--max-restarts", self.max_restarts, least=0)
        check_count("--grace-period", self.grace)
        if self.ttl is not None:
            check_count("--ttl", self.ttl, least=0)
        if not 1 <= self.port <= 65535:
            raise UsageError(f"--port: expected 1..65535, got {self.port}")
        check_metrics_port(self.metrics_port, [self.port])
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
    """Return the ``List`` of all objects of the job; ``kubectl create -f`` takes it as JSON."""
    items: list[dict[str, Any]] = []
    if job.secret_name is None:
        data = {"secret": base64.b64encode(job.secret).decode()}
        made = {**_head("v1", "Secret", job, name=_secret_name(job)), "type": "Opaque", "immutable": True, "data": data}
        items.append(made)
    items += [_jobset(job)] if job.is_jobset else [_service(job), _indexed_job(job)]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def split_owner(manifests: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the JobSet or Job, and the objects to be deleted with it."""
    *others, owner = manifests["items"]
    return owner, others


def make_ownership(owner: dict[str, Any], uid: str) -> dict[str, Any]:
    """Return the merge patch that makes Kubernetes delete an object together with ``owner``, created as ``uid``."""
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
    return {"metadata": {"ownerReferences": [{**reference, "uid": uid}]}}


def _secret_name(job: KubernetesJob) -> str:
    return job.secret_name or f"{job.name}-secret"


def _head(version: str, kind: str, job: KubernetesJob, *, name: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name or job.name, "labels": {MANAGED_BY: "asyncpar"}}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _owner_head(version: str, kind: str, job: KubernetesJob) -> dict[str, Any]:
    """Return the head of the object that pods belong to, with the user's labels and annotations."""
    head = _head(version, kind, job)
    head["metadata"]["labels"] |= dict(job.pods.labels)
    if job.pods.annotations:
        head["metadata"]["annotations"] = dict(job.pods.annotations)
    return head


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
    return {**_owner_head("jobset.x-k8s.io/v1alpha2", "JobSet", job), "spec": {**spec, **_ttl(job)}}


def _indexed_job(job: KubernetesJob) -> dict[str, Any]:
    return {**_owner_head("batch/v1", "Job", job), "spec": {**_job_spec(job), **_ttl(job)}}


def _ttl(job: KubernetesJob) -> dict[str, int]:
    return {} if job.ttl is None else {"ttlSecondsAfterFinished": job.ttl}


def _service(job: KubernetesJob) -> dict[str, Any]:
    """Return the headless Service that names the pods; a JobSet makes its own."""
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
        "template": {"metadata": _pod_metadata(job), "spec": _pod(job)},
    }


def _pod_metadata(job: KubernetesJob) -> dict[str, Any]:
    """Return labels and annotations of pods; by the annotations Prometheus finds those that serve metrics."""
    annotations = {}
    if job.metrics_port is not None:
        annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(job.metrics_port)}
    annotations |= dict(job.pods.annotations)
    metadata: dict[str, Any] = {"labels": {MANAGED_BY: "asyncpar", **dict(job.pods.labels)}}
    return metadata | ({"annotations": annotations} if annotations else {})


def _pod(job: KubernetesJob) -> dict[str, Any]:
    ports = [{"containerPort": job.port, "name": "rendezvous", "protocol": "TCP"}]
    if job.metrics_port is not None:
        ports.append({"containerPort": job.metrics_port, "name": "metrics", "protocol": "TCP"})
    container: dict[str, Any] = {
        "name": _RANKS,
        "image": job.image,
        "command": _command(job),
        "args": _literal([job.program, *job.arguments]),
        **job.pods.of_container(),
        "ports": ports,
        **_probes(job),
        "volumeMounts": [
            {"name": "secret", "mountPath": _GIVEN, "readOnly": True},
            {"name": "own", "mountPath": _OWN},
            *job.pods.mounts(),
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
            *job.pods.describe_volumes(),
        ],
        **job.pods.of_pod(),
    }
    return pod if job.is_jobset else {**pod, "subdomain": job.name}


def _probes(job: KubernetesJob) -> dict[str, Any]:
    ask: dict[str, Any] = {"exec": {"command": [job.python, "-m", "asyncpar", "status"]}}
    if job.metrics_port is not None:
        ask = {"httpGet": {"path": "/metrics", "port": "metrics"}}
    kinds = {"startupProbe": _STARTUP, "readinessProbe": _READINESS, "livenessProbe": _LIVENESS}
    return {kind: {**ask, **pace} for kind, pace in kinds.items()}


def _literal(words: list[str]) -> list[str]:
    """Escape ``words`` so that Kubernetes does not expand ``$(...)`` in them."""
    return [word.replace("$(", "$$(") for word in words]


def _command(job: KubernetesJob) -> list[str]:
    """Return the command of a pod, up to the options of the launcher."""
    own = f"{_OWN}/secret"
    launch = f'exec {shlex.quote(job.python)} -m asyncpar launch --node-rank "${PLACE_VARIABLE}" "$@"'
    script = f"umask 077 && cat {_GIVEN}/secret > {own} && {launch}"
    options = ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.tasks_per_node), "--rdzv-id", job.name]
    options += ["--rdzv-endpoint", f"{job.first_pod}:{job.port}", "--secret-file", own]
    options += ["--grace-period", str(job.grace)]
    if not job.is_jobset:  # a Job restarts nothing
        options += ["--max-restarts", str(job.max_restarts)]
    options += {ProgramKind.MODULE: ["--module"], ProgramKind.PROGRAM: ["--no-python"]}.get(job.kind, [])
    if job.metrics_port is not None:
        options += [f"--metrics=0.0.0.0:{job.metrics_port}"]
    return _literal(["sh", "-c", script, "sh", *options])
