"""Forged, stolen, old and misplaced credentials are refused by the controller, whatever the gateway forwards."""

from __future__ import annotations

import base64
import hmac
import json
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("jwt")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gateway_server import certificate

from hpcsched.auth.tokens import ownership_of
from hpcsched.loopback.cluster import LocalCluster
from tests.attacks.gateway_client import Reply, ask, forwarded, part, parts_of

GATEWAY_UID = 1 if os.geteuid() == 0 else os.geteuid()
USER = pwd.getpwuid(65534 if os.geteuid() == 0 else os.geteuid()).pw_name


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    base = Path(tempfile.mkdtemp(prefix="tokens-"))
    base.chmod(0o755)
    gateway = {"user": pwd.getpwuid(GATEWAY_UID).pw_name} if os.geteuid() == 0 else {}
    made = LocalCluster(base, ["n1"], settings={"gateway": gateway, "controller": {"run_dir": str(base / "run")}})
    try:
        with made:
            yield made
    finally:
        shutil.rmtree(base, ignore_errors=True)


def create(cluster: LocalCluster, *options: str, user: str = USER) -> str:
    """Return a new token."""
    whose = [f"--user={user}"] if os.geteuid() == 0 else []
    return cluster.run("hctl", "token", "create", "--scope=read", *whose, *options).stdout.strip()


def by_gateway(cluster: LocalCluster, token: str, route: str = "/v1/me", **headers: str) -> Reply:
    return ask(cluster.api_socket, "GET", route, headers=forwarded(token, **headers), uid=GATEWAY_UID)


def signed(cluster: LocalCluster, header: object, claims: object, key: str = "a") -> str:
    """Return a token of our own, signed with the cluster's stolen key."""
    state = json.loads((cluster.config_dir / "state" / "token-keys.json").read_text())
    private = Ed25519PrivateKey.from_private_bytes(base64.b64decode(state["private"][key]))
    text = f"{part(header)}.{part(claims)}"
    return f"{text}.{part(private.sign(text.encode()))}"


def test_a2_a_token_acts_for_its_user_and_is_stored_as_a_hash_only(cluster: LocalCluster) -> None:
    token = create(cluster)
    answer = by_gateway(cluster, token)
    assert (answer.status, answer.body["user"], answer.body["role"]) == (200, USER, "user")
    for path in (cluster.config_dir / "state").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert token.encode() not in data, path
            assert token.rpartition(".")[2].encode() not in data, path
    assert os.stat(cluster.config_dir / "state" / "token-keys.json").st_mode & 0o777 == 0o600


# fmt: off
FORGERIES: dict[str, Callable[[LocalCluster, dict, dict, str], str]] = {
    "alg=none": lambda c, h, p, s: f"{part(h | {'alg': 'none'})}.{part(p)}.",
    "alg=none with its signature": lambda c, h, p, s: f"{part(h | {'alg': 'none'})}.{part(p)}.{s}",
    "HS256 with the public key": lambda c, h, p, s: hs256(c, h, p),
    "kid is a path": lambda c, h, p, s: signed(c, h | {"kid": "../../../dev/null"}, p),
    "kid of a file of ours": lambda c, h, p, s: signed(c, h | {"kid": "/tmp/key"}, p),
    "kid is a list": lambda c, h, p, s: signed(c, h | {"kid": ["a"]}, p),
    "a key in the header": lambda c, h, p, s: signed(c, h | {"jwk": {"kty": "OKP", "crv": "Ed25519", "x": "AA"}}, p),
    "jku": lambda c, h, p, s: signed(c, h | {"jku": "http://127.0.0.1/keys"}, p),
    "crit": lambda c, h, p, s: signed(c, h | {"crit": ["b64"], "b64": False}, p),
    "no aud": lambda c, h, p, s: signed(c, h, {k: v for k, v in p.items() if k != "aud"}),
    "no sub": lambda c, h, p, s: signed(c, h, {k: v for k, v in p.items() if k != "sub"}),
    "no exp": lambda c, h, p, s: signed(c, h, {k: v for k, v in p.items() if k != "exp"}),
    "aud of another cluster": lambda c, h, p, s: signed(c, h, p | {"aud": "hpcsched-api:other"}),
    "aud is a list": lambda c, h, p, s: signed(c, h, p | {"aud": [p["aud"], "x"]}),
    "expired": lambda c, h, p, s: signed(c, h, p | {"exp": int(time.time()) - 1}),
    "nbf in the future": lambda c, h, p, s: signed(c, h, p | {"nbf": int(time.time()) + 3600}),
    "sub is root": lambda c, h, p, s: signed(c, h, p | {"sub": "root"}),
    "another id": lambda c, h, p, s: signed(c, h, p | {"jti": "0" * 16}),
    "longer life": lambda c, h, p, s: signed(c, h, p | {"exp": p["exp"] + 86400}),
    "exp is text": lambda c, h, p, s: signed(c, h, p | {"exp": "9999999999"}),
    "exp is infinite": lambda c, h, p, s: signed(c, h, p | {"exp": float("inf")}),
    "two tokens": lambda c, h, p, s: ".".join([part(h), part(p), s]) + ", Bearer " + ".".join([part(h), part(p), s]),
    "no signature": lambda c, h, p, s: f"{part(h)}.{part(p)}.",
    "another signature": lambda c, h, p, s: f"{part(h)}.{part(p)}.{part(b'x' * 64)}",
    "deep header": lambda c, h, p, s: f"{part(b'[' * 1000)}.{part(p)}.{s}",
    "not a token": lambda c, h, p, s: "hello",
    "long": lambda c, h, p, s: "a" * 30_000,
}
# fmt: on


def hs256(cluster: LocalCluster, header: dict, claims: dict) -> str:
    state = json.loads((cluster.config_dir / "state" / "token-keys.json").read_text())
    private = Ed25519PrivateKey.from_private_bytes(base64.b64decode(state["private"]["a"]))
    text = f"{part(header | {'alg': 'HS256'})}.{part(claims)}"
    return f"{text}.{part(hmac.digest(private.public_key().public_bytes_raw(), text.encode(), sha256))}"


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a2_a_forged_token_is_refused(cluster: LocalCluster, forgery: str) -> None:
    made = FORGERIES[forgery](cluster, *parts_of(create(cluster)))
    answer = by_gateway(cluster, made)
    assert (answer.status, answer.body["kind"]) == (401, "UnauthenticatedError"), answer


def test_a2_no_credential_two_credentials_and_another_method_are_refused(cluster: LocalCluster) -> None:
    token = create(cluster)
    assert by_gateway(cluster, "").status == 401
    assert by_gateway(cluster, token, **{"X-Hpcsched-Session": "a.b"}).status == 401
    assert by_gateway(cluster, "", **{"X-Hpcsched-Session": token}).status == 401
    assert by_gateway(cluster, "", **{"X-Hpcsched-Certificate": "00" * 32}).status == 401
    assert by_gateway(cluster, "", Authorization="Basic cm9vdDpyb290").status == 401


def test_a2_the_gateway_cannot_name_a_user(cluster: LocalCluster) -> None:
    for name in ("X-User", "X-Remote-User", "X-Hpcsched-User", "X-Forwarded-User", "X-Hpcsched-Uid"):
        assert by_gateway(cluster, "", **{name: "root"}).status == 401
    answer = by_gateway(cluster, create(cluster), **{"X-Hpcsched-User": "root", "X-Hpcsched-Uid": "0"})
    assert answer.body["user"] == USER


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs several accounts")
def test_a2_only_the_gateways_account_forwards_credentials(cluster: LocalCluster) -> None:
    token = create(cluster)
    for uid in (2, 65534, 0):
        answer = ask(cluster.api_socket, "GET", "/v1/me", headers=forwarded(token), uid=uid)
        assert (answer.status, answer.body["kind"]) == (403, "PermissionDeniedError"), uid
    # The gateway's own account is nobody without a credential.
    assert ask(cluster.api_socket, "GET", "/v1/me", uid=GATEWAY_UID).status == 401


def test_a2_a_scope_limits_a_token_and_the_head_keeps_its_own_verbs(cluster: LocalCluster) -> None:
    tokens = {
        scope: create(cluster, f"--scope={scope}")
        for scope in ("read", "submit", "manage", "metrics", "serve", "admin")
    }
    for page in ("/metrics", "/metrics/jobs", "/v1/jobs"):
        for scope in tokens.keys() - {"read" if page == "/v1/jobs" else "metrics"}:
            answer = ask(cluster.api_socket, "GET", page, headers=forwarded(tokens[scope]), uid=GATEWAY_UID)
            assert answer.status == 403, (page, scope)
    assert by_gateway(cluster, tokens["read"]).status == 200
    routes = {
        "/v1/submit": "submit",
        "/v1/test": "submit",
        "/v1/cancel": "manage",
        "/v1/update": "manage",
        "/v1/services/use": "serve",
        "/v1/services/start": "submit",
        "/v1/services/stop": "manage",
        "/v1/nodes/drain": "admin",
        "/v1/reconfigure": "admin",
        **dict.fromkeys(("/v1/backup", "/v1/triggers/set", "/v1/tokens/create", "/v1/sessions/link"), ""),
    }
    for route, needed in routes.items():
        for scope, token in tokens.items():
            headers = forwarded(token)
            answer = ask(cluster.api_socket, "POST", route, {}, headers=headers, uid=GATEWAY_UID)
            if scope == needed:
                assert "scope" not in str(answer.body), (route, scope, answer)
            else:
                assert answer.status == 403, (route, scope, answer)


def test_f5_a_revoked_token_ends_at_once_and_a_rotated_key_after_the_next_rotation(cluster: LocalCluster) -> None:
    first, second = create(cluster), create(cluster)
    assert by_gateway(cluster, first).status == by_gateway(cluster, second).status == 200
    cluster.run("hctl", "token", "revoke", parts_of(first)[1]["jti"])
    assert by_gateway(cluster, first).status == 401
    cluster.run("hctl", "token", "rotate-key")
    third = create(cluster)
    assert parts_of(second)[0]["kid"] != parts_of(third)[0]["kid"]
    assert by_gateway(cluster, second).status == by_gateway(cluster, third).status == 200
    cluster.run("hctl", "token", "rotate-key")
    ended = by_gateway(cluster, second)
    assert (ended.status, "replaced by two rotations" in ended.body["error"]) == (401, True)
    assert by_gateway(cluster, third).status == 200
    cluster.down()
    cluster.up()
    assert [by_gateway(cluster, token).status for token in (first, second, third)] == [401, 401, 200]


def test_f5_a_session_link_works_once(cluster: LocalCluster) -> None:
    link = ask(cluster.api_socket, "POST", "/v1/sessions/link", {}).body["code"]
    headers = forwarded()
    opened = ask(cluster.api_socket, "POST", "/v1/sessions/open", {"code": link}, headers=headers, uid=GATEWAY_UID)
    assert opened.status == 200
    again = ask(cluster.api_socket, "POST", "/v1/sessions/open", {"code": link}, headers=headers, uid=GATEWAY_UID)
    assert again.status == 401
    secret = {"X-Hpcsched-Session": opened.body["session"]}
    assert by_gateway(cluster, "", **secret).body["user"] == pwd.getpwuid(os.geteuid()).pw_name
    closed = ask(cluster.api_socket, "POST", "/v1/sessions/close", {}, headers=forwarded(**secret), uid=GATEWAY_UID)
    assert closed.status == 200
    assert by_gateway(cluster, "", **secret).status == 401


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users who are not admins")
def test_a2_a_public_certificate_is_registered_by_the_holder_of_its_key_only(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    path = certificate(tmp_path, "victim")
    public, key = path.read_bytes(), path.with_suffix(".key").read_bytes()

    def register(ownership: str) -> Reply:
        body = {"certificate": public.decode(), "ownership": ownership}
        return ask(cluster.api_socket, "POST", "/v1/tokens/create", body, uid=pwd.getpwnam(USER).pw_uid)

    other = certificate(tmp_path, "other").with_suffix(".key").read_bytes()
    for ownership in ("", "00", "no hex", ownership_of(public, key, "root"), ownership_of(public, other, USER)):
        refused = register(ownership)
        assert (refused.status, "--key=FILE" in refused.body["error"]) == (403, True)
    assert register(ownership_of(public, key, USER)).status == 200
