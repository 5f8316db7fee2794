"""Login at an OpenID provider: a real one on the loopback address, and forged, replayed and misplaced answers of it."""

from __future__ import annotations

import base64
import hmac
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

pytest.importorskip("jwt")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("authlib")

import jwt
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from gateway_server import AS_ROOT, GATEWAY, USER, Served, certificate, free_port, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from waiting import wait_until

from tests.attacks.gateway_client import part
from tests.attacks.test_secrets import places_of

SECRET = "a secret of the gateway"
CLIENT = "hpcsched-at-lab"
KEYS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
STRANGER = rsa.generate_private_key(65537, 2048)
Forge = Callable[[dict[str, Any]], str]


def signed(claims: dict[str, Any], algorithm: str = "RS256", key: Any = None, **header: Any) -> str:
    return str(jwt.encode(claims, key or KEYS[algorithm], algorithm=algorithm, headers={"kid": algorithm, **header}))


def unsigned(claims: dict[str, Any], signature: str = "") -> str:
    return f"{part({'alg': 'none', 'kid': 'RS256'})}.{part(claims)}.{signature}"


def hs256(claims: dict[str, Any]) -> str:
    """Return a token whose MAC has the public key as its secret."""
    text = f"{part({'alg': 'HS256', 'kid': 'RS256', 'typ': 'JWT'})}.{part(claims)}"
    public = jwt.algorithms.RSAAlgorithm.to_jwk(KEYS["RS256"].public_key()).encode()
    return f"{text}.{part(hmac.digest(public, text.encode(), sha256))}"


class Provider:
    """An OpenID provider. `user`: who is logged in there; `forge`: how it makes id tokens."""

    def __init__(self, base: Path) -> None:
        certificate(base, "gateway")
        self.ca = base / "gateway.crt"
        self.port = free_port()
        self.issuer = f"https://localhost:{self.port}/lab"
        self.user: dict[str, Any] = {"preferred_username": USER}
        self.forge: Forge = signed
        self.last = ""
        self._codes: dict[str, dict[str, str]] = {}
        routes = [
            Route("/lab/.well-known/openid-configuration", self.describe),
            Route("/lab/keys", self.keys),
            Route("/lab/authorize", self.authorize),
            Route("/lab/token", self.token, methods=["POST"]),
        ]
        tls = {"ssl_certfile": str(self.ca), "ssl_keyfile": str(base / "gateway.key")}
        settings = uvicorn.Config(Starlette(routes=routes), "127.0.0.1", self.port, log_level="error", **tls)
        self._server = uvicorn.Server(settings)

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._server.run)
        thread.start()
        wait_until(lambda: self._server.started)
        return thread

    def stop(self) -> None:
        self._server.should_exit = True

    async def describe(self, request: Request) -> Response:
        ends = {"authorization": "authorize", "token": "token"}
        found = {f"{name}_endpoint": f"{self.issuer}/{path}" for name, path in ends.items()}
        return JSONResponse({"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", **found})

    async def keys(self, request: Request) -> Response:
        of = {
            "RS256": jwt.algorithms.RSAAlgorithm,
            "ES256": jwt.algorithms.ECAlgorithm,
            "EdDSA": jwt.algorithms.OKPAlgorithm,
        }
        listed = [json.loads(of[name].to_jwk(key.public_key())) | {"kid": name} for name, key in KEYS.items()]
        weak = json.loads(of["RS256"].to_jwk(WEAK.public_key())) | {"kid": "weak"}
        shared = {"kty": "oct", "k": part(b"shared"), "kid": "shared"}
        return JSONResponse({"keys": [*listed, weak, shared]})

    async def authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert len(asked["nonce"]) >= 32
        assert "openid" in asked["scope"].split()
        code = secrets.token_hex(8)
        self._codes[code] = asked
        query = urlencode({"code": code, "state": asked["state"], "iss": self.issuer})
        return RedirectResponse(f"{asked['redirect_uri']}?{query}", 302)

    async def token(self, request: Request) -> Response:
        form = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        basic = base64.b64decode(request.headers["authorization"].partition(" ")[2]).decode()
        asked = self._codes.pop(form["code"], None)
        proof = part(sha256(form["code_verifier"].encode()).digest())
        if basic != f"{CLIENT}:{SECRET}" or asked is None or proof != asked["code_challenge"]:
            return JSONResponse({"error": "invalid_grant"}, 400)
        now_s = int(time.time())
        claims = {"iss": self.issuer, "sub": "u-1", "aud": CLIENT, "exp": now_s + 300, "iat": now_s}
        self.last = self.forge(claims | {"nonce": asked["nonce"]} | self.user)
        return JSONResponse({"access_token": "x", "token_type": "Bearer", "id_token": self.last})


WEAK = rsa.generate_private_key(65537, 1024)


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="oidc-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def running(base: Path) -> Iterator[Provider]:
    made = Provider(base)
    thread = made.start()
    yield made
    made.stop()
    thread.join()


@pytest.fixture(scope="module")
def served(base: Path, running: Provider) -> Iterator[Served]:
    secret = base / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    oidc = {"issuer": running.issuer, "client_id": CLIENT, "client_secret": str(secret), "ca": str(running.ca)}
    with serving(oidc=oidc) as found:
        yield found


@pytest.fixture
def provider(running: Provider) -> Provider:
    running.user, running.forge = {"preferred_username": USER}, signed
    return running


def get(port: int, path: str, ca: Path, cookie: str = "") -> tuple[int, str, dict[str, str], list[str]]:
    """Return status, body, headers and cookies of an answer."""
    connection = HTTPSConnection("localhost", port, context=ssl.create_default_context(cafile=ca), timeout=30)
    connection.request("GET", path, headers={"Cookie": cookie} if cookie else {})
    answer = connection.getresponse()
    body = answer.read().decode()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    cookies = answer.headers.get_all("set-cookie") or []
    connection.close()
    return answer.status, body, headers, cookies


class Browser:
    """A browser at the beginning of a login. `callback`: the address to which the provider sends it back."""

    def __init__(self, served: Served, provider: Provider) -> None:
        self._served = served
        status, body, headers, cookies = get(served.port, "/login/oidc", served.base / "gateway.crt")
        assert status == 303, body
        self.cookie = cookies[0].partition(";")[0]
        assert all(word in cookies[0] for word in ("__Host-", "HttpOnly", "Secure", "SameSite=lax"))
        sent = urlsplit(headers["location"])
        back = get(provider.port, f"{sent.path}?{sent.query}", provider.ca)[2]["location"]
        self.callback = back.partition(f":{served.port}")[2]

    def finish(self, callback: str = "", cookie: str | None = None) -> tuple[int, str, str]:
        """Return status, body and session cookie."""
        cookie = self.cookie if cookie is None else cookie
        status, body, _, cookies = get(
            self._served.port, callback or self.callback, self._served.base / "gateway.crt", cookie
        )
        sessions = [one for one in cookies if one.startswith("__Host-hpcsched=") and "Max-Age=0" not in one]
        return status, body, sessions[0].partition(";")[0] if sessions else ""


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_user_logs_in(served: Served, provider: Provider, algorithm: str) -> None:
    provider.forge = lambda claims: signed(claims, algorithm)
    status, body, session = Browser(served, provider).finish()
    assert (status, f"logged in as {USER}" in body) == (200, True), body
    me = served.ask("GET", "/api/v1/me", token="", Cookie=session)
    assert (me[0], me[1]["user"]) == (200, USER)
    tokens = json.loads(served.cluster.run("hctl", "token", "list", "--user=*", "--json").stdout)["tokens"]
    assert [one["name"] for one in tokens if one["kind"] == "session"][-1] == f"u-1 at {provider.issuer}"


# fmt: off
FORGERIES: dict[str, Forge] = {
    "alg none": unsigned,
    "alg none with a signature": lambda c: unsigned(c, signed(c).rpartition(".")[2]),
    "HS256 with the public key": hs256,
    "HS256 with a shared key of the set": lambda c: signed(c, "HS256", b"shared" * 8, kid="shared"),
    "RS512": lambda c: signed(c, "RS512", KEYS["RS256"], kid="RS256"),
    "a weak key": lambda c: signed(c, "RS256", WEAK, kid="weak"),
    "a key of a stranger": lambda c: signed(c, "RS256", STRANGER),
    "an unknown key": lambda c: signed(c, "RS256", STRANGER, kid="mine"),
    "a key in the header": lambda c: signed(
        c, "RS256", STRANGER, jwk=json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(STRANGER.public_key()))),
    "the key of another algorithm": lambda c: signed(c, "RS256", kid="ES256"),
    "crit": lambda c: signed(c, crit=["b64"]),
    "aud of another client": lambda c: signed(c | {"aud": "other"}),
    "aud of several clients": lambda c: signed(c | {"aud": [CLIENT, "other"]}),
    "azp of another client": lambda c: signed(c | {"azp": "other"}),
    "another issuer": lambda c: signed(c | {"iss": "https://other.example.org"}),
    "the issuer with a slash": lambda c: signed(c | {"iss": c["iss"] + "/"}),
    "another nonce": lambda c: signed(c | {"nonce": "0" * 64}),
    "no nonce": lambda c: signed({k: v for k, v in c.items() if k != "nonce"}),
    "nonce is a list": lambda c: signed(c | {"nonce": [c["nonce"]]}),
    "no exp": lambda c: signed({k: v for k, v in c.items() if k != "exp"}),
    "expired": lambda c: signed(c | {"exp": int(time.time()) - 120}),
    "exp is text": lambda c: signed(c | {"exp": "9999999999"}),
    "issued an hour ago": lambda c: signed(c | {"iat": int(time.time()) - 3600}),
    "issued tomorrow": lambda c: signed(c | {"iat": int(time.time()) + 86400}),
    "no user": lambda c: signed({k: v for k, v in c.items() if k != "preferred_username"}),
    "the user is a number": lambda c: signed(c | {"preferred_username": 0}),
    "the user is a path": lambda c: signed(c | {"preferred_username": "../root"}),
    "another text": lambda c: signed(c)[:-8] + "AAAAAAAA",
    "long": lambda c: signed(c | {"x": "y" * 20_000}),
    "not a token": lambda c: "x.y.z",
}
# fmt: on


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a2_a_forged_id_token_is_refused(served: Served, provider: Provider, forgery: str) -> None:
    provider.forge = FORGERIES[forgery]
    status, body, session = Browser(served, provider).finish()
    assert (status, json.loads(body)["kind"], session) == (401, "UnauthenticatedError", ""), body


@pytest.mark.parametrize("user", ["root", "no-such-account", *([GATEWAY] if AS_ROOT else [])])
def test_a2_a_login_as_a_system_account_or_nobody_is_refused(served: Served, provider: Provider, user: str) -> None:
    provider.user = {"preferred_username": user}
    status, body, session = Browser(served, provider).finish()
    assert (status, session) == (403, ""), body


def test_a7_state_code_and_id_token_work_once_and_for_their_browser(served: Served, provider: Provider) -> None:
    first, other = Browser(served, provider), Browser(served, provider)
    assert first.finish(cookie="")[0] == 401
    assert first.finish(cookie=other.cookie)[0] == 401  # a login of an attacker, given to another user
    mixed = {name: values[0] for name, values in parse_qs(urlsplit(other.callback).query).items()}
    mixed["code"] = parse_qs(urlsplit(first.callback).query)["code"][0]
    assert other.finish(f"/login/oidc/callback?{urlencode(mixed)}")[0] == 401  # a stolen code: PKCE
    third = Browser(served, provider)
    assert third.finish(third.callback.replace(urlsplit(provider.issuer).netloc.split(":")[1], "1"))[0] == 401
    assert third.finish()[0] == 200
    assert third.finish()[0] == 401
    # Its id token again, in another login, whose nonce is another one.
    stolen = provider.last
    provider.forge = lambda claims: stolen
    assert Browser(served, provider).finish()[0] == 401


def test_a7_the_controller_takes_a_login_once_and_only_its_own_states(served: Served, provider: Provider) -> None:
    import os

    from tests.attacks.gateway_client import ask, forwarded

    uid = 1 if AS_ROOT else os.geteuid()

    def finish(state: str, token: str) -> int:
        body = {"state": state, "id_token": token}
        return ask(served.cluster.api_socket, "POST", "/v1/logins/finish", body, forwarded(), uid).status

    def token(nonce: str) -> str:
        now_s = int(time.time())
        claims = {"iss": provider.issuer, "sub": "u", "aud": CLIENT, "exp": now_s + 300, "iat": now_s, "nonce": nonce}
        return signed(claims | provider.user)

    begun = ask(served.cluster.api_socket, "POST", "/v1/logins/begin", {}, forwarded(), uid).body
    chance, until, mac = begun["state"].split(".")
    for state in ("", "a.b", f"{chance}.{int(until) + 9000}.{mac}", f"{chance}.{until}.{'0' * 64}", "\u00e9" * 300):
        assert finish(state, token(begun["nonce"])) == 401, state
    assert finish(begun["state"], token("0" * 64)) == 401
    assert finish(begun["state"], token(begun["nonce"])) == 200
    assert finish(begun["state"], token(begun["nonce"])) == 401
    if AS_ROOT:  # not through the gateway
        assert ask(served.cluster.api_socket, "POST", "/v1/logins/begin", {}, uid=0).status == 403


def test_a13_a_readable_secret_and_a_missing_address_are_refused(
    served: Served, tmp_path: Path, provider: Provider
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    text = (served.cluster.config_dir / "hpcsched.toml").read_text()
    for change, why in (("mode", "others can read or write the secret"), ("url", "needs client_id")):
        secret.chmod(0o644 if change == "mode" else 0o600)
        lines = [line for line in text.splitlines() if change != "url" or not line.startswith("url = ")]
        lines = [f'client_secret = "{secret}"' if line.startswith("client_secret") else line for line in lines]
        lines = [f"port = {free_port()}" if line == f"port = {served.port}" else line for line in lines]
        (tmp_path / "hpcsched.toml").write_text("\n".join(lines) + "\n")
        done = subprocess.run(
            ["hpcsched", "gateway"], env=served.cluster.env | {"HPCSCHED_CONFIG": str(tmp_path)}, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode != 0, why
        assert why in done.stderr


def test_f1_no_secret_of_a_token_a_session_or_the_gateway_is_in_any_file(served: Served, provider: Provider) -> None:
    """Not even after the controller was killed. The gateway's secret is where the admin has put it."""
    provider.forge = signed
    callback = Browser(served, provider)
    status, body, session = callback.finish()
    assert status == 200, body
    code = served.cluster.run("hpcsched", "web").stdout.partition("code=")[2].split()[0]
    status, body, headers = served.ask("POST", "/api/v1/session", {"code": code}, token="")
    assert status == 200, body
    secret_words = {
        "token": served.token.rpartition(".")[2],
        "session of OIDC": session.partition("=")[2].partition(".")[2],
        "code of a link": code,
        "session of a link": headers["set-cookie"].partition("=")[2].partition(";")[0].partition(".")[2],
        "id token": provider.last.rpartition(".")[2],
        "code of OIDC": parse_qs(urlsplit(callback.callback).query)["code"][0],
    }
    assert all(len(word) >= 16 for word in secret_words.values()), secret_words
    served.cluster.run("hctl", "backup", str(served.base / "copy"))
    served.cluster.run("hctl", "audit", "export", str(served.base / "audit"))
    for _ in range(2):
        assert {name: found for name, word in secret_words.items() if (found := places_of(word, served.base))} == {}
        assert places_of(SECRET, served.base) == []
        os.kill(served.cluster.api("GET", "/v1/ping")["pid"], signal.SIGKILL)
        served.cluster.up()
