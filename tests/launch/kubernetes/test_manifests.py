"""Manifests, and what a pod's command does; `tests/launchers/test_manifest_schemas.py` has the published schemas."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncpar.errors import UsageError
from asyncpar.launch.cli import main
from asyncpar.launch.kubernetes.manifests import KubernetesJob, make_manifests
from asyncpar.launch.kubernetes.pod_settings import PodSettings
from asyncpar.launch.options import ProgramKind

JOB = KubernetesJob(
    image="site/train:1",
    program="train.py",
    arguments=("--data", "a b", "$(HOME)"),
    name="train",
    nodes=2,
    tasks_per_node=4,
    secret=b"s" * 32,
    max_restarts=3,
)


def items(job: KubernetesJob) -> dict[str, Any]:
    return {item["kind"]: item for item in make_manifests(job)["items"]}


def pod_of(job: KubernetesJob) -> dict[str, Any]:
    made = items(job)
    spec = made["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"] if job.is_jobset else made["Job"]["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    return pod


def test_a_jobset_has_one_pod_per_host_and_names_before_they_are_ready() -> None:
    made = items(JOB)
    assert set(made) == {"Secret", "JobSet"}
    spec = made["JobSet"]["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "train", "publishNotReadyAddresses": True}
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 0)
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert base64.b64decode(made["Secret"]["data"]["secret"]) == b"s" * 32


def test_preempted_pods_start_the_jobset_again_without_counting() -> None:
    spec = items(JOB)["JobSet"]["spec"]
    [rule] = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    [ours] = spec["failurePolicy"]["rules"]
    assert ours["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert ours["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_without_jobset_a_service_names_the_pods() -> None:
    job = replace(JOB, is_jobset=False)
    made = items(job)
    assert set(made) == {"Secret", "Job", "Service"}
    assert made["Service"]["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": "train"},
    }
    assert pod_of(job)["subdomain"] == "train"


@pytest.mark.parametrize(("is_jobset", "first"), [(True, "train-ranks-0-0.train"), (False, "train-0.train")])
def test_the_command_of_a_pod_starts_a_launcher_with_its_place(tmp_path: Path, is_jobset: bool, first: str) -> None:
    container = pod_of(replace(JOB, is_jobset=is_jobset, python="agent"))["containers"][0]
    words = [word.replace("$$(", "$(") for word in [*container["command"], *container["args"]]]  # as Kubernetes does
    words = [
        word.replace("/etc/asyncpar", f"{tmp_path}/etc").replace("/run/asyncpar", f"{tmp_path}/run") for word in words
    ]
    for folder in ("etc", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "etc" / "secret").write_text("s" * 32)
    (tmp_path / "agent").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "agent").chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    output = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    restarts = [] if is_jobset else ["--max-restarts", "3"]
    assert output.splitlines() == [
        *("-m", "asyncpar", "launch", "--node-rank", "1", "--nnodes", "2", "--nproc-per-node", "4"),
        *("--rdzv-id", "train", "--rdzv-endpoint", f"{first}:29400", "--secret-file", f"{tmp_path}/run/secret"),
        *("--grace-period", "30", *restarts, "train.py", "--data", "a b", "$(HOME)"),
    ]
    assert (tmp_path / "run" / "secret").stat().st_mode & 0o777 == 0o600


def test_kubernetes_waits_longer_than_the_ranks() -> None:
    assert pod_of(replace(JOB, grace=120))["terminationGracePeriodSeconds"] == 130


def test_the_secret_is_in_the_secret_only() -> None:
    made = make_manifests(replace(JOB, secret_name="mine"))
    assert [item["kind"] for item in made["items"]] == ["JobSet"]
    assert pod_of(replace(JOB, secret_name="mine"))["volumes"][0]["secret"]["secretName"] == "mine"
    assert "c3Nz" not in str(items(JOB)["JobSet"])


def test_resources_and_kinds_of_programs() -> None:
    container = pod_of(replace(JOB, resources=(("cpu", "4"), ("nvidia.com/gpu", "1"))))["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "4", "nvidia.com/gpu": "1"}
    assert "--module" in pod_of(replace(JOB, kind=ProgramKind.MODULE))["containers"][0]["command"]
    assert "--no-python" in pod_of(replace(JOB, kind=ProgramKind.PROGRAM))["containers"][0]["command"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"tasks_per_node": 0}, "--tasks-per-node"),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"grace": 0}, "--grace-period"),
        ({"ttl": -1}, "--ttl"),
        ({"port": 70000}, "--port: expected"),
        ({"metrics_port": 0}, "--metrics-port: expected"),
        ({"name": "Train_1"}, "--name: expected"),
        ({"name": "a" * 41}, "--name: expected"),
        ({"namespace": "a b"}, "--namespace: expected"),
        ({"secret_name": "-"}, "--secret: expected"),
        ({"image": ""}, "--image: expected"),
        ({"resources": (("cpu", "many"),)}, "--resource: expected"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(JOB, **change)


def parsed(**texts: Any) -> PodSettings:
    return PodSettings.parse(**texts)


def test_pods_get_the_environment_that_the_options_name_and_take_it_as_it_is() -> None:
    pods = parsed(env=["A=1", "WHERE=$(HOME)=x"], env_from=["secret/keys", "configmap/site.conf"])
    container = pod_of(replace(JOB, pods=pods))["containers"][0]
    assert container["env"] == [{"name": "A", "value": "1"}, {"name": "WHERE", "value": "$$(HOME)=x"}]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}, {"configMapRef": {"name": "site.conf"}}]
    assert not {"env", "envFrom"} & set(pod_of(JOB)["containers"][0])


def test_volumes_are_mounted_beside_the_secret() -> None:
    texts = ["claim/data:/data:ro", "secret/key:/k", "configmap/c:/c", "host/srv/x:/x", "scratch:/s"]
    texts += ["memory:/dev/shm/"]
    pod = pod_of(replace(JOB, pods=parsed(volume=texts)))
    places = {volume["name"]: volume for volume in pod["volumes"][2:]}
    found = [
        (mount["mountPath"], mount.get("readOnly", False), {**places[mount["name"]], "name": ""})
        for mount in pod["containers"][0]["volumeMounts"][2:]
    ]
    assert found == [
        ("/data", True, {"name": "", "persistentVolumeClaim": {"claimName": "data"}}),
        ("/k", False, {"name": "", "secret": {"secretName": "key"}}),
        ("/c", False, {"name": "", "configMap": {"name": "c"}}),
        ("/x", False, {"name": "", "hostPath": {"path": "/srv/x"}}),
        ("/s", False, {"name": "", "emptyDir": {}}),
        ("/dev/shm", False, {"name": "", "emptyDir": {"medium": "Memory"}}),
    ]


@pytest.mark.parametrize("is_jobset", [True, False])
def test_pods_run_where_and_as_whom_the_options_say(is_jobset: bool) -> None:
    pods = parsed(
        node_selector=["pool=gpu", "example.org/zone="],
        toleration=["gpu=yes:NoSchedule", "spot", "slow:NoExecute"],
        service_account="trainer",
        pull_secret=["registry", "mirror"],
    )
    pod = pod_of(replace(JOB, is_jobset=is_jobset, pods=pods))
    assert pod["nodeSelector"] == {"pool": "gpu", "example.org/zone": ""}
    assert pod["tolerations"] == [
        {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
        {"key": "slow", "operator": "Exists", "effect": "NoExecute"},
    ]
    assert pod["serviceAccountName"] == "trainer"
    assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]


@pytest.mark.parametrize("is_jobset", [True, False])
def test_the_job_and_its_pods_have_the_labels_and_annotations(is_jobset: bool) -> None:
    queue = "kueue.x-k8s.io/queue-name"
    job = replace(JOB, is_jobset=is_jobset, pods=parsed(label=[f"{queue}=long"], annotation=["why=a test, no more"]))
    owner = items(job)["JobSet" if is_jobset else "Job"]
    spec = owner["spec"]["replicatedJobs"][0]["template"]["spec"] if is_jobset else owner["spec"]
    for metadata in (owner["metadata"], spec["template"]["metadata"]):
        assert metadata["labels"] == {"app.kubernetes.io/managed-by": "asyncpar", queue: "long"}
        assert metadata["annotations"] == {"why": "a test, no more"}
    assert "annotations" not in items(job)["Secret"]["metadata"]


def test_probes_ask_the_launcher_by_its_metrics_or_by_the_command() -> None:
    pod = pod_of(replace(JOB, python="py"))["containers"][0]
    probes = ["startupProbe", "readinessProbe", "livenessProbe"]
    assert [pod[kind]["exec"]["command"] for kind in probes] == [["py", "-m", "asyncpar", "status"]] * 3
    served = replace(JOB, metrics_port=9464)
    container = pod_of(served)["containers"][0]
    assert [container[kind]["httpGet"] for kind in probes] == [{"path": "/metrics", "port": "metrics"}] * 3
    assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] >= 300
    assert container["ports"][1] == {"containerPort": 9464, "name": "metrics", "protocol": "TCP"}
    assert "--metrics=0.0.0.0:9464" in container["command"]
    template = items(served)["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": "9464"}


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("env", "A", "--env: expected NAME=VALUE, got 'A'"),
        ("env", "1A=x", "--env: expected NAME=VALUE with a name of"),
        ("env", "JOB_COMPLETION_INDEX=0", "--env: JOB_COMPLETION_INDEX is the place of each pod"),
        ("env_from", "keys", "--env-from: expected secret/NAME or configmap/NAME, got 'keys'"),
        ("env_from", "secret/A", "--env-from: expected the name of an object"),
        ("volume", "claim/data", "--volume: expected claim/NAME:PATH"),
        ("volume", "disk/data:/data", "--volume: expected claim/NAME:PATH"),
        ("volume", "claim/data:/data:rw", "--volume: expected claim/NAME:PATH"),
        ("volume", "claim/data:data", "--volume: expected an absolute path to mount claim/data at, got 'data'"),
        ("volume", "claim/a b:/data", "--volume: expected the name of an object"),
        ("volume", "scratch/x:/data", "--volume: scratch has no name"),
        ("volume", "scratch:/etc/asyncpar", "--volume: /etc/asyncpar is mounted already"),
        ("node_selector", "pool", "--node-selector: expected NAME=VALUE, got 'pool'"),
        ("node_selector", "pool=a b", "--node-selector: pool: expected a value of at most 63"),
        ("toleration", "gpu:Never", "--toleration: gpu:Never: expected an effect of NoSchedule"),
        ("toleration", "=x", "--toleration: expected a key as team"),
        ("label", "a/b/c=d", "--label: expected a key as team"),
        ("label", "app.kubernetes.io/managed-by=me", "--label: app.kubernetes.io/managed-by is 'asyncpar'"),
        ("annotation", "-=x", "--annotation: expected a key as team"),
        ("pull_secret", "", "--pull-secret: expected the name of an object"),
    ],
)
def test_wrong_settings_of_pods_are_refused_by_the_name_of_their_option(option: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(**{option: [text]})


def test_what_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="--env: A is given twice, as '1' and '2'"):
        parsed(env=["A=1", "A=2"])
    with pytest.raises(UsageError, match="--volume: /data is mounted already"):
        parsed(volume=["scratch:/data", "claim/data:/data/"])
    with pytest.raises(UsageError, match="--metrics-port: 29400 is the port of --port, too"):
        replace(JOB, metrics_port=29400)


def test_without_kubectl_the_command_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(main, ["k8s", "--image", "i", "train.py"])
    assert (result.exit_code, "kubectl: it is not in PATH" in result.output) == (2, True)
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'error: no cluster' >&2; exit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    result = CliRunner().invoke(main, ["k8s", "--image", "i", "train.py"])
    assert (result.exit_code, result.output) == (1, "asyncpar k8s: the job was refused: error: no cluster\n")


KUBECTL = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$1" in
create) cat > /dev/null; echo "jobset.jobset.x-k8s.io/train created" ;;
get) test -z "$REFUSES" || { echo "error: you may not look" >&2; exit 1; }; printf 4711-abcd ;;
esac
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have a ``kubectl`` that writes its arguments into this file."""
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("REFUSES", "")
    return tmp_path / "calls"


@pytest.mark.parametrize(
    ("options", "owner", "owned", "where"),
    [
        ("", ("jobset.x-k8s.io/v1alpha2", "JobSet", "jobset.jobset.x-k8s.io"), ["secret/train-secret"], ""),
        (
            "--indexed-job --namespace physics",
            ("batch/v1", "Job", "job.batch"),
            ["secret/train-secret", "service/train"],
            " --namespace physics",
        ),
        ("--indexed-job --secret mine", ("batch/v1", "Job", "job.batch"), ["service/train"], ""),
    ],
)
def test_what_belongs_to_a_job_is_deleted_with_it(
    calls: Path, options: str, owner: tuple[str, str, str], owned: list[str], where: str
) -> None:
    version, kind, resource = owner
    words = ["k8s", "--image", "i", "--name", "train", *options.split(), "train.py"]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.output) == (0, "jobset.jobset.x-k8s.io/train created\n")
    create, get, *patches = calls.read_text().splitlines()
    assert create == "create -f -"
    assert get == f"get {resource}/train{where} -o jsonpath={{.metadata.uid}}"
    reference = {"apiVersion": version, "kind": kind, "name": "train", "uid": "4711-abcd"}
    patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
    assert patches == [f"patch {one}{where} --type merge --patch {patch}" for one in owned]


def test_a_secret_of_the_users_own_has_no_other_owner(calls: Path) -> None:
    result = CliRunner().invoke(main, ["k8s", "--image", "i", "--secret", "mine", "train.py"])
    assert result.exit_code == 0
    assert calls.read_text().splitlines() == ["create -f -"]


def test_a_job_that_may_not_own_its_secret_runs_and_says_what_stays(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSES", "1")
    result = CliRunner().invoke(main, ["k8s", "--image", "i", "--name", "train", "train.py"])
    assert result.exit_code == 0
    assert result.output.splitlines()[1] == (
        "asyncpar k8s: secret/train-secret stays when the job is deleted (`kubectl delete` deletes it too): "
        "error: you may not look"
    )
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize("is_jobset", [True, False])
def test_a_job_is_deleted_some_time_after_its_end_if_that_is_wanted(is_jobset: bool) -> None:
    kind = "JobSet" if is_jobset else "Job"
    assert "ttlSecondsAfterFinished" not in items(replace(JOB, is_jobset=is_jobset))[kind]["spec"]
    assert items(replace(JOB, is_jobset=is_jobset, ttl=0))[kind]["spec"]["ttlSecondsAfterFinished"] == 0


def test_variables_of_torchrun_and_kubeflow_stand_for_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncpar.launch import cli

    seen: list[Any] = []

    def keep(options: Any) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(cli, "_run", keep)
    variables = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1"}
    variables |= {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29401", "PET_RDZV_ID": ""}
    CliRunner(env=variables).invoke(main, ["launch", "--nproc-per-node", "4", "train.py"])
    [options] = seen
    assert (options.nnodes, options.nproc, options.node_rank) == (3, 4, 1)
    assert (options.endpoint, options.job) == ("job-node-0-0.job:29401", None)
