"""Manifests are valid by the schemas that Kubernetes and Kubeflow publish; `scripts/test-backends` installs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncpar.launch.kubernetes.manifests import KubernetesJob, make_manifests
from asyncpar.launch.kubernetes.pod_settings import PodSettings
from asyncpar.observe.kubeflow import StatusMaker
from asyncpar.testing.jobs import SyntheticJob
from tests.backends.extras import need
from tests.launch.kubernetes.deployed import BASES, built

JOB = KubernetesJob(
    image="site/train:1",
    program="train.py",
    name="train",
    namespace="physics",
    nodes=2,
    tasks_per_node=4,
    secret=b"s" * 32,
    max_restarts=3,
    ttl=600,
    resources=(("cpu", "4"), ("memory", "8Gi"), ("nvidia.com/gpu", "1")),
    metrics_port=9464,
    pods=PodSettings.parse(
        env=["A=1"],
        env_from=["secret/keys", "configmap/site"],
        volume=["claim/d:/d:ro", "secret/s:/s", "configmap/c:/c", "host/x:/x", "scratch:/t", "memory:/m"],
        node_selector=["pool=gpu"],
        toleration=["gpu=yes:NoSchedule", "spot"],
        service_account="trainer",
        label=["kueue.x-k8s.io/queue-name=long"],
        annotation=["why=a test"],
        pull_secret=["registry"],
    ),
)
MINORS = range(25, 38)


def objects(*, is_jobset: bool, **change: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = make_manifests(replace(JOB, is_jobset=is_jobset, **change))["items"]
    return found


def check_in_kubernetes(made: list[dict[str, Any]], minor: int) -> None:
    """Fail unless Kubernetes 1.``minor`` knows all fields of ``made``; a JobSet's are those of the job in it."""
    need("kubernetes_validate", "pip install kubernetes-validate")
    import kubernetes_validate

    for one in made:
        if one["kind"] == "JobSet":
            template = one["spec"]["replicatedJobs"][0]["template"]["spec"]
            one = {"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"], "spec": template}
        kubernetes_validate.validate(one, f"1.{minor}", strict=True)


def check_jobset(made: dict[str, Any]) -> None:
    """Fail unless ``made`` is a JobSet of Kubeflow's model to the last field."""
    need("kubeflow_trainer_api", "pip install kubeflow-trainer-api")
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    assert JobsetV1alpha2JobSet.from_dict(made).to_dict() == made


@pytest.mark.parametrize("minor", MINORS)
def test_objects_are_valid_in_kubernetes(minor: int) -> None:
    plain = {"metrics_port": None, "pods": PodSettings()}
    for is_jobset in (False, True):
        check_in_kubernetes(objects(is_jobset=is_jobset), minor)
        check_in_kubernetes(objects(is_jobset=is_jobset, **plain), minor)


def test_the_jobset_is_one_of_kubeflows_model_to_the_last_field() -> None:
    check_jobset(objects(is_jobset=True)[-1])


@pytest.mark.parametrize("folder", [*BASES, "example"])
def test_what_kustomize_makes_is_valid(folder: str) -> None:
    made = built(folder)
    assert made
    for minor in MINORS:
        check_in_kubernetes(made, minor)
    for one in made:
        if one["kind"] == "JobSet":
            check_jobset(one)


def test_the_status_for_kubeflow_is_one_of_its_model_to_the_last_field() -> None:
    need("kubeflow_trainer_api", "pip install kubeflow-trainer-api")
    from kubeflow_trainer_api.models.trainer_v1alpha1_update_train_job_status_request import (
        TrainerV1alpha1UpdateTrainJobStatusRequest as Request,
    )

    made: dict[str, Any] = {}
    pace = StatusMaker()
    for second, job in enumerate(SyntheticJob(2).summaries(5)):
        made = {"trainerStatus": pace.status_of(job)}
        assert second == 0 or made["trainerStatus"]["estimatedRemainingSeconds"] > 0
    read = Request.from_dict(made).to_dict()
    time = read["trainerStatus"].pop("lastUpdatedTime")
    assert time.strftime("%Y-%m-%dT%H:%M:%SZ") == made["trainerStatus"].pop("lastUpdatedTime")
    assert read == made
