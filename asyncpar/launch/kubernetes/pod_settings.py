"""Settings of pods that are the user's alone: environment, volumes, scheduling, labels.  Pure.

Each is parsed from the text of an option of ``asyncpar k8s``, and checked as Kubernetes checks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncpar.errors import UsageError

RESERVED_PATHS: Final = ("/etc/asyncpar", "/run/asyncpar")
"""The paths where the secret of the job is mounted, and copied to."""

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
PLACE_VARIABLE: Final = "JOB_COMPLETION_INDEX"
"""The variable with the place of a pod in its job, set by Kubernetes."""

_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_SOURCES = {"secret": "secretRef", "configmap": "configMapRef"}
_VOLUMES = ("claim", "secret", "configmap", "host", "scratch", "memory")

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodVolume:
    """A volume and its mount path; ``source`` is a name, a path of the node, or "" for an initially empty volume."""

    kind: str
    source: str
    path: str
    is_read_only: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the volume's source in the form of Kubernetes."""
        match self.kind:
            case "claim":
                return {"persistentVolumeClaim": {"claimName": self.source}}
            case "secret":
                return {"secret": {"secretName": self.source}}
            case "configmap":
                return {"configMap": {"name": self.source}}
            case "host":
                return {"hostPath": {"path": self.source}}
            case "memory":
                return {"emptyDir": {"medium": "Memory"}}
            case _:
                return {"emptyDir": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Settings of all pods of a job; ``parse`` reads them from options.

    ``environment_from`` are pairs of a kind (``secret``, ``configmap``) and a name.  ``labels`` and ``annotations`` are
    those of the job, too.
    """

    environment: Pairs = ()
    environment_from: Pairs = ()
    volumes: tuple[PodVolume, ...] = ()
    node_selector: Pairs = ()
    tolerations: tuple[dict[str, str], ...] = ()
    service_account: str | None = None
    labels: Pairs = ()
    annotations: Pairs = ()
    pull_secrets: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        *,
        env: Iterable[str] = (),
        env_from: Iterable[str] = (),
        volume: Iterable[str] = (),
        node_selector: Iterable[str] = (),
        toleration: Iterable[str] = (),
        service_account: str | None = None,
        label: Iterable[str] = (),
        annotation: Iterable[str] = (),
        pull_secret: Iterable[str] = (),
    ) -> PodSettings:
        """Parse the texts of the options.  Raises ``UsageError`` that names the option."""
        environment = _pairs("--env", env)
        for name, _ in environment:
            if not _VARIABLE.fullmatch(name):
                raise UsageError(f"--env: expected NAME=VALUE with a name of letters, digits, ., - and _, got {name!r}")
            if name == PLACE_VARIABLE:
                raise UsageError(f"--env: {PLACE_VARIABLE} is the place of each pod, which Kubernetes sets")
        labels = _pairs("--label", label)
        if MANAGED_BY in dict(labels):
            raise UsageError(f"--label: {MANAGED_BY} is 'asyncpar' on all objects of a job")
        return cls(
            environment=environment,
            environment_from=tuple(_source(text) for text in env_from),
            volumes=_volumes(volume),
            node_selector=_labels("--node-selector", _pairs("--node-selector", node_selector)),
            tolerations=tuple(_toleration(text) for text in toleration),
            service_account=None if service_account is None else _object("--service-account", service_account),
            labels=_labels("--label", labels),
            annotations=_keys("--annotation", _pairs("--annotation", annotation)),
            pull_secrets=tuple(_object("--pull-secret", name) for name in pull_secret),
        )

    def of_container(self) -> dict[str, Any]:
        """Return the fields that these settings add to a container."""
        found: dict[str, Any] = {}
        if self.environment:
            # Kubernetes would expand "$("
            found["env"] = [{"name": name, "value": value.replace("$(", "$$(")} for name, value in self.environment]
        if self.environment_from:
            found["envFrom"] = [{_SOURCES[kind]: {"name": name}} for kind, name in self.environment_from]
        return found

    def mounts(self) -> list[dict[str, Any]]:
        """Return the mounts that these settings add to a container."""
        return [
            {"name": f"volume-{place}", "mountPath": one.path, **({"readOnly": True} if one.is_read_only else {})}
            for place, one in enumerate(self.volumes)
        ]

    def describe_volumes(self) -> list[dict[str, Any]]:
        """Return the volumes that these settings add to a pod."""
        return [{"name": f"volume-{place}", **one.describe()} for place, one in enumerate(self.volumes)]

    def of_pod(self) -> dict[str, Any]:
        """Return the fields that these settings add to a pod."""
        found: dict[str, Any] = {}
        if self.node_selector:
            found["nodeSelector"] = dict(self.node_selector)
        if self.tolerations:
            found["tolerations"] = [dict(one) for one in self.tolerations]
        if self.service_account is not None:
            found["serviceAccountName"] = self.service_account
        if self.pull_secrets:
            found["imagePullSecrets"] = [{"name": name} for name in self.pull_secrets]
        return found


def _pairs(option: str, texts: Iterable[str]) -> Pairs:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"{option}: expected NAME=VALUE, got {text!r}")
        if name in found:
            raise UsageError(f"{option}: {name} is given twice, as {found[name]!r} and {value!r}")
        found[name] = value
    return tuple(found.items())


def _keys(option: str, pairs: Pairs) -> Pairs:
    """Check that keys have the form of label keys: a name, optionally with a domain and a slash before it."""
    for key, _ in pairs:
        domain, slash, name = key.rpartition("/")
        if not _WORD.fullmatch(name) or (slash and not _OBJECT.fullmatch(domain)):
            raise UsageError(
                f"{option}: expected a key as team or example.org/team, of at most 63 letters, digits, ., - and _, "
                f"got {key!r}"
            )
    return pairs


def _labels(option: str, pairs: Pairs) -> Pairs:
    for key, value in _keys(option, pairs):
        if value and not _WORD.fullmatch(value):
            raise UsageError(
                f"{option}: {key}: expected a value of at most 63 letters, digits, ., - and _, got {value!r}"
            )
    return pairs


def _object(option: str, name: str) -> str:
    if not _OBJECT.fullmatch(name):
        raise UsageError(f"{option}: expected the name of an object, of a-z, 0-9, . and -, got {name!r}")
    return name


def _source(text: str) -> tuple[str, str]:
    kind, _, name = text.partition("/")
    if kind not in _SOURCES:
        raise UsageError(f"--env-from: expected secret/NAME or configmap/NAME, got {text!r}")
    return kind, _object("--env-from", name)


def _volumes(texts: Iterable[str]) -> tuple[PodVolume, ...]:
    volumes = tuple(_volume(text) for text in texts)
    paths = [*RESERVED_PATHS, *(volume.path for volume in volumes)]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"--volume: {path} is mounted already; give each volume a path of its own")
    return volumes


def _volume(text: str) -> PodVolume:
    source, colon, place = text.partition(":")
    path, _, mode = place.partition(":")
    kind, _, name = source.partition("/")
    if kind not in _VOLUMES or not colon or mode not in ("", "ro"):
        raise UsageError(
            f"--volume: expected claim/NAME:PATH, secret/NAME:PATH, configmap/NAME:PATH, host/PATH:PATH, scratch:PATH "
            f"or memory:PATH, with :ro behind it for read-only, got {text!r}"
        )
    if not path.startswith("/") or path == "/":
        raise UsageError(f"--volume: expected an absolute path to mount {source} at, got {path!r}")
    if kind in ("scratch", "memory"):
        if name:
            raise UsageError(f"--volume: {kind} has no name, got {source!r}")
    elif kind == "host":
        name = f"/{name.lstrip('/')}"
    else:
        _object("--volume", name)
    return PodVolume(kind=kind, source=name, path=path.rstrip("/"), is_read_only=mode == "ro")


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if effect and effect not in _EFFECTS:
        raise UsageError(f"--toleration: {text}: expected an effect of {', '.join(_EFFECTS)}, got {effect!r}")
    _labels("--toleration", ((key, value),))
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})


def check_metrics_port(port: int | None, taken: Sequence[int]) -> None:
    """Raise ``UsageError`` unless ``port`` is usable for metrics, beside the ``taken`` ones."""
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"--metrics-port: expected 1..65535, got {port}")
    if port in taken:
        raise UsageError(f"--metrics-port: {port} is the port of --port, too; give another one")
