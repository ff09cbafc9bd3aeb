"""`asyncpar k8s`: Kubernetes manifests of a job, printed or passed to kubectl."""

from __future__ import annotations

import json
import secrets
import shutil
from typing import Any

import click

from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_line, print_result
from asyncpar.launch.options import parse_count, parse_kind
from asyncpar.launch.scheduler_programs import ask_scheduler

_OF_PODS = (
    *("env", "env_from", "volume", "node_selector", "toleration", "service_account", "label", "annotation"),
    "pull_secret",
)
"""Options that ``PodSettings.parse`` takes."""


@click.command(cls=OneLineCommand, context_settings={"allow_interspersed_args": False})
@option("--image", metavar="IMAGE", required=True, help="With Python, asyncpar and PROGRAM in it.")
@option("--name", metavar="NAME", default="asyncpar", help="What the job is called.  [asyncpar]")
@option("--namespace", metavar="NAME", default=None, help="Where it runs.  [kubectl's]")
@option("--nodes", "-N", metavar="N", default="1", help="Number of pods.  [1]")
@option("--tasks-per-node", metavar="N", default="1", help="Ranks in each pod.  [1]")
@option("--resource", metavar="NAME=AMOUNT", multiple=True, help="Of a pod: cpu=4, memory=8Gi, nvidia.com/gpu=1.")
@option("--max-restarts", metavar="N", default="0", help="Start all again after a failure, N times.  [0]")
@option("--grace-period", metavar="SECONDS", default="30", help="What ranks have to end in after SIGTERM.  [30]")
@option("--ttl", metavar="SECONDS", default=None, help="Delete the job this long after its end.  [never]")
@option("--port", metavar="PORT", default="29400", help="Where the first pod serves the others.  [29400]")
@option("--secret", metavar="NAME", default=None, help="A Secret with the key 'secret'.  [a new one is made]")
@option("--env", metavar="NAME=VALUE", multiple=True, help="A variable of the ranks.")
@option("--env-from", metavar="SOURCE", multiple=True, help="Variables: secret/NAME or configmap/NAME.")
@option(
    "--volume",
    metavar="WHAT:PATH[:ro]",
    multiple=True,
    help="WHAT: claim/NAME, secret/NAME, configmap/NAME, host/DIR, scratch, memory.",
)
@option("--node-selector", metavar="KEY=VALUE", multiple=True, help="Nodes that pods may run on.")
@option("--toleration", metavar="TAINT", multiple=True, help="KEY[=VALUE][:EFFECT] that pods tolerate.")
@option("--service-account", metavar="NAME", default=None, help="Whom pods act for.  [the namespace's]")
@option("--label", metavar="KEY=VALUE", multiple=True, help="Of the job and its pods.")
@option("--annotation", metavar="KEY=VALUE", multiple=True, help="Of the job and its pods.")
@option("--pull-secret", metavar="NAME", multiple=True, help="Of the registry that IMAGE is in.")
@option("--metrics-port", metavar="PORT", default=None, help="Serve Prometheus there (asyncpar[metrics]).  [no]")
@option("--indexed-job", is_flag=True, help="A Job and a Service, for clusters without JobSet.")
@option("--python", metavar="FILE", default="python", help="Python in the image.  [python]")
@option("--dry-run", is_flag=True, help="Print the manifests (with the secret); create nothing.")
@option("--module", "-m", is_flag=True, help="PROGRAM is a Python module.")
@option("--no-python", is_flag=True, help="PROGRAM is executed as it is.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def k8s(program: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Run PROGRAM, a Python script in an image, as a JobSet of Kubernetes.

    Each pod is a host of `asyncpar launch`.  Pods that are preempted let their
    ranks end, and the job starts again.
    """
    exit_with("k8s", lambda: _k8s(program, arguments, given))


def _k8s(program: str, arguments: tuple[str, ...], given: dict[str, Any]) -> int:
    from asyncpar.core.config.secret import SECRET_BYTES
    from asyncpar.launch.kubernetes.manifests import KubernetesJob, make_manifests
    from asyncpar.launch.kubernetes.pod_settings import PodSettings

    metrics_port = given["metrics_port"]
    kind = parse_kind(is_module=given["module"], is_executed=given["no_python"])
    job = KubernetesJob(
        image=given["image"],
        program=program,
        arguments=arguments,
        kind=kind,
        name=given["name"],
        namespace=given["namespace"],
        nodes=parse_count("--nodes", given["nodes"]),
        tasks_per_node=parse_count("--tasks-per-node", given["tasks_per_node"]),
        port=parse_count("--port", given["port"]),
        secret_name=given["secret"],
        secret=secrets.token_bytes(SECRET_BYTES),
        resources=tuple(_resource(text) for text in given["resource"]),
        max_restarts=parse_count("--max-restarts", given["max_restarts"]),
        grace=parse_count("--grace-period", given["grace_period"]),
        ttl=None if given["ttl"] is None else parse_count("--ttl", given["ttl"]),
        python=given["python"],
        is_jobset=not given["indexed_job"],
        metrics_port=None if metrics_port is None else parse_count("--metrics-port", metrics_port),
        pods=PodSettings.parse(**{name: given[name] for name in _OF_PODS}),
    )
    manifests = make_manifests(job)
    if given["dry_run"]:
        print_result("the manifests", _as_json(manifests))
        return 0
    print_result("what was created", _create(manifests))
    try:
        _give_owner(manifests)
    except LaunchError as error:  # the job runs nevertheless
        print_line(f"asyncpar k8s: {error}", err=True)
    return 0


def _resource(text: str) -> tuple[str, str]:
    name, equals, amount = text.partition("=")
    if not equals:
        raise UsageError(f"--resource: expected NAME=AMOUNT such as cpu=4, got {text!r}")
    return name, amount


def _as_json(manifests: dict[str, Any]) -> str:
    return json.dumps(manifests, indent=2) + "\n"


def _create(manifests: dict[str, Any]) -> str:
    """Pipe ``manifests`` to ``kubectl``, and return its output.  Raises ``LaunchError`` if it refuses."""
    if shutil.which("kubectl") is None:
        raise UsageError("kubectl: it is not in PATH; see the manifests with --dry-run")
    return _kubectl("create", "-f", "-", given=_as_json(manifests), refused="the job was refused")


def _give_owner(manifests: dict[str, Any]) -> None:
    """Have the cluster delete the Secret and the Service of a job with the job, whose identity is known only now.

    Raises ``LaunchError`` that names what is left behind.
    """
    from asyncpar.launch.kubernetes.manifests import make_ownership, split_owner

    owner, others = split_owner(manifests)
    namespace = owner["metadata"].get("namespace")
    where = [] if namespace is None else ["--namespace", namespace]
    names = [f"{one['kind'].lower()}/{one['metadata']['name']}" for one in others]
    if not names:
        return
    stays, them = ("stay", "them") if len(names) > 1 else ("stays", "it")
    refused = f"{' and '.join(names)} {stays} when the job is deleted (`kubectl delete` deletes {them} too)"
    kind = f"{owner['kind'].lower()}.{owner['apiVersion'].partition('/')[0]}"
    query = ["get", f"{kind}/{owner['metadata']['name']}", *where, "-o", "jsonpath={.metadata.uid}"]
    patch = json.dumps(make_ownership(owner, _kubectl(*query, refused=refused).strip()))
    for name in names:
        _kubectl("patch", name, *where, "--type", "merge", "--patch", patch, refused=refused)


def _kubectl(*arguments: str, given: str = "", refused: str) -> str:
    return ask_scheduler(["kubectl", *arguments], given, refused=refused, probe="kubectl cluster-info")
