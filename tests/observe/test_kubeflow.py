"""The sink of Kubeflow Trainer, against a status server as its controller has one: HTTPS, a token, and its answers."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from asyncpar.errors import LaunchError, UsageError
from asyncpar.observe.kubeflow import KubeflowSink
from asyncpar.observe.sinks import KUBEFLOW_URL, load_sink, names_of_sinks
from asyncpar.observe.summary import HostSummary, JobSummary, ProgressSummary, RankReport, RankSummary

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/physics/trainjobs/lm/status"
PREFIX = "KUBEFLOW_TRAINER_SERVER"
TIME = 1_800_000_000.0


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "status server")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "ca.crt").write_bytes(made.public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    return folder / "ca.crt", folder / "key"


class StatusServer:
    """Takes posts as Kubeflow Trainer does; ``answers`` are those of the next posts, then all are well."""

    def __init__(self, folder: Path) -> None:
        self.posts: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: list[int] = []
        certificate, key = make_certificate(folder)
        (folder / "token").write_text("first\n")
        self.token = folder / "token"
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.posts.append((self.path, self.headers["Authorization"], content))
                code = server.answers.pop(0) if server.answers else 200
                reported = {"kind": "Status", "message": f"the server says {code}"} if code >= 400 else content
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", server.environment[KUBEFLOW_URL] + "/elsewhere")
                self.end_headers()
                self.wfile.write(json.dumps(reported).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.environment = {
            KUBEFLOW_URL: f"https://127.0.0.1:{self._http.server_port}{PATH}",
            f"{PREFIX}_CA_CERT": str(certificate),
            f"{PREFIX}_TOKEN": str(self.token),
        }
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture(name="server")
def serve(tmp_path: Path) -> Iterator[StatusServer]:
    with StatusServer(tmp_path) as made:
        yield made


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def job(completed: float, seconds: float, *, total: float | None = 10.0, **values: float) -> JobSummary:
    """Return a job whose second rank is at ``completed`` after ``seconds``."""
    progress = ProgressSummary(description="train", completed=completed, total=total, fields={"bytes/s": "1,024"})
    reported = RankSummary(rank=1, pid=2, time=TIME, progress=progress, values=values)
    ranks = (RankReport(rank=0, host="a", pid=1), RankReport(rank=1, host="a", pid=2, summary=reported))
    return JobSummary(job="lm", pid=1, time=TIME + seconds, hosts=(HostSummary(host="a", ranks=ranks),))


def test_progress_and_figures_are_posted_with_the_token(server: StatusServer) -> None:
    clock = Clock()
    sink = KubeflowSink(server.environment, clock)
    sink.take(job(0, 0))
    clock.time = 8.0
    server.token.write_text("renewed\n")
    sink.take(job(4, 8, loss=0.234567891))
    (path, first, begun), (_, second, later) = server.posts
    assert (path, first, second) == (PATH, "Bearer first", "Bearer renewed")
    figures = [{"name": "bytes/s", "value": "1,024"}]
    assert begun == {
        "trainerStatus": {"lastUpdatedTime": "2027-01-15T08:00:00Z", "progressPercentage": 0, "metrics": figures}
    }
    assert later == {
        "trainerStatus": {
            "lastUpdatedTime": "2027-01-15T08:00:08Z",
            "progressPercentage": 40,
            "estimatedRemainingSeconds": 12,
            "metrics": [*figures, {"name": "loss", "value": "0.234568"}],
        }
    }


def test_posts_are_five_seconds_apart_but_for_the_last(server: StatusServer) -> None:
    clock = Clock()
    sink = KubeflowSink(server.environment, clock)
    for second in range(10):
        clock.time = float(second)
        sink.take(job(second, second))
    sink.close("well")
    reported = [content["trainerStatus"]["progressPercentage"] for _, _, content in server.posts]
    assert reported == [0, 50, 90]


def test_a_job_without_progress_posts_nothing_and_one_without_an_end_no_percentage(server: StatusServer) -> None:
    sink = KubeflowSink(server.environment, Clock())
    sink.take(JobSummary(job="lm", pid=1, time=TIME))
    sink.close("well")
    assert server.posts == []
    sink.take(job(3, 1, total=None))
    assert server.posts[0][2]["trainerStatus"].keys() == {"lastUpdatedTime", "metrics"}


@pytest.mark.parametrize("code", [403, 429, 500, 503])
def test_what_passes_is_tried_again_later(code: int, server: StatusServer, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    server.answers += [code, code]
    sink = KubeflowSink(server.environment, clock)
    for second in range(41):
        clock.time = float(second)
        sink.take(job(second / 5, second))
    reported = [content["trainerStatus"]["progressPercentage"] for _, _, content in server.posts]
    assert reported == [0, 20, 60, 70, 80]  # after 0, 10, 30, 35, 40 s
    assert [record.getMessage() for record in caplog.records] == [
        f"kubeflow: the status of the job was not taken, and is tried again: the status server answers {code}: the "
        f"server says {code}"
    ]
    sink.close("well")


@pytest.mark.parametrize("code", [302, 404, 422])
def test_what_will_not_pass_ends_the_sink_with_the_servers_words(code: int, server: StatusServer) -> None:
    server.answers.append(code)
    with pytest.raises(LaunchError, match=f"^the status server answers {code}: "):
        KubeflowSink(server.environment, Clock()).take(job(1, 1))
    assert len(server.posts) == 1


def test_a_server_with_another_certificate_gets_no_token(server: StatusServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = {**server.environment, f"{PREFIX}_CA_CERT": str(make_certificate(tmp_path / "other")[0])}
    sink = KubeflowSink(other, Clock())
    sink.take(job(1, 1))
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        sink.close("well")
    assert server.posts == []


def test_it_is_there_where_kubeflow_asks_for_it_or_the_user_does() -> None:
    assert load_sink("kubeflow") is KubeflowSink
    asked = {KUBEFLOW_URL: "https://x"}
    assert names_of_sinks(("opentelemetry",), asked) == ("opentelemetry", "kubeflow")
    assert names_of_sinks(("kubeflow",), asked) == ("kubeflow",)
    assert names_of_sinks((), {}) == ()
    with pytest.raises(UsageError, match=f"^{KUBEFLOW_URL}: expected to be set by Kubeflow Trainer"):
        KubeflowSink({})
    with pytest.raises(UsageError, match="expected an https address"):
        KubeflowSink({KUBEFLOW_URL: "http://x", f"{PREFIX}_CA_CERT": "file", f"{PREFIX}_TOKEN": "file"})


PROGRAM = """
import asyncio
import asyncpar as ap

async def main():
    async with ap.init() as node:
        with ap.progress("train", total=4) as bar:
            for step in range(4):
                await node.world.barrier()
                bar.advance(loss=1 / (step + 1))
                ap.observe.report(rate=0.5)
                await asyncio.sleep(0.4)

ap.run(main)
"""


@pytest.mark.process
def test_a_launcher_in_a_pod_of_trainer_posts_by_itself(server: StatusServer, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "asyncpar", "launch", str(tmp_path / "program.py")]
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, env=kept | server.environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kubeflow" not in done.stderr
    path, token, content = server.posts[-1]
    assert (path, token) == (PATH, "Bearer first")
    assert content["trainerStatus"]["progressPercentage"] >= 50
    assert {one["name"] for one in content["trainerStatus"]["metrics"]} == {"loss", "rate"}
