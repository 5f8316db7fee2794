"""A cluster with a real gateway over TLS on the loopback address, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

AS_ROOT = os.geteuid() == 0
GATEWAY = pwd.getpwuid(1 if AS_ROOT else os.geteuid()).pw_name
USER = pwd.getpwuid(65534 if AS_ROOT else os.geteuid()).pw_name


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def certificate(base: Path, name: str, *, ca: str = "", eku: str = "", days: str = "3") -> Path:
    """Make NAME.crt and NAME.key, signed by the CA or by itself."""
    key, made = base / f"{name}.key", base / f"{name}.crt"
    more = ["-addext", f"extendedKeyUsage={eku}"] if eku else []
    if ca:
        more += ["-CA", str(base / f"{ca}.crt"), "-CAkey", str(base / f"{ca}.key")]
        more += ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", "authorityKeyIdentifier=keyid"]
    elif name.startswith("ca"):
        more += ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    else:
        more += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    for_browsers = name == "gateway"  # they accept no Ed25519
    curve = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256") if for_browsers else ("ed25519",)
    files = ("-keyout", key, "-out", made)
    openssl("req", "-x509", "-newkey", *curve, "-nodes", "-subj", f"/CN={name}", *files, "-days", days, *more)
    key.chmod(0o600)
    return made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@dataclass
class Served:
    """A cluster with a gateway."""

    cluster: LocalCluster
    base: Path
    port: int
    token: str
    pid: int

    def context(self, certificate: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.base / "gateway.crt")
        if certificate:
            context.load_cert_chain(self.base / f"{certificate}.crt", self.base / f"{certificate}.key")
        return context

    def connect(self, **how: Any) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self.context(**how), timeout=30)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        certificate: str = "",
        **headers: str,
    ) -> tuple[int, Any, dict[str, str]]:
        """Return status, JSON and headers of an answer on a connection of its own."""
        token = self.token if token is None else token
        sent = {"Authorization": f"Bearer {token}"} if token else {}
        sent |= {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        connection = self.connect(certificate=certificate)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
            data = answer.read()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(data) if data[:1] == b"{" else data, names
        finally:
            connection.close()


@contextmanager
def serving(**settings: object) -> Iterator[Served]:
    """Start a cluster and its gateway in a directory of their own."""
    base = Path(tempfile.mkdtemp(prefix="gateway-"))
    base.chmod(0o755)
    try:
        with _serving(base, settings) as served:
            yield served
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextmanager
def _serving(base: Path, settings: Mapping[str, object]) -> Iterator[Served]:
    certificate(base, "gateway")
    certificate(base, "ca")
    port = free_port()
    gateway: dict[str, object] = {
        "port": port,
        "url": f"https://localhost:{port}",
        "certificate": str(base / "gateway.crt"),
        "key": str(base / "gateway.key"),
    }
    gateway |= {"user": GATEWAY} if AS_ROOT else {}
    of_controller = {name: value for name, value in settings.items() if name.startswith(("request_", "submit_"))}
    oidc = settings.get("oidc", {})
    own = {name: value for name, value in settings.items() if name not in ("oidc", "alerts", *of_controller)}
    gateway |= {"client_ca": str(base / "ca.crt"), "rate": 0, **own}
    controller = {"run_dir": str(base / "run"), "request_rate": 0, **of_controller}
    sections = {"gateway": gateway, "controller": controller} | ({"gateway.oidc": oidc} if oidc else {})
    sections |= {"alerts": settings["alerts"]} if "alerts" in settings else {}
    with LocalCluster(base, ["n1"], settings=sections) as cluster:
        whose = [f"--user={USER}"] if AS_ROOT else []
        token = cluster.run("hctl", "token", "create", "--scope=read,submit,manage", *whose).stdout.strip()
        log = base / "gateway.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(["hpcsched", "gateway"], env=cluster.env, stderr=stream, stdout=stream, cwd="/")
        try:
            wait_until(lambda: b"ready at" in log.read_bytes() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield Served(cluster, base, port, token, process.pid)
            assert process.poll() is None, log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
        finally:
            process.terminate()
            process.wait()
