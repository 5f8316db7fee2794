"""Credentials of requests over the network, and their scopes.

There are tokens, sessions and client certificates.

A credential acts for one user, within its scopes. Its record has the hash of the secret, never the secret. A token is a JSON
Web Token that the controller signs with one of two keys. A verified signature is not enough: the record of the token must have
the same hash, and must be neither expired nor revoked. So a stolen signing key makes no tokens, and a revocation counts at once.

Pure: key material, ids and the time are arguments. It does not know where records and keys are kept.

Sources: RFC 7519 (JWT), RFC 8037 (EdDSA in JOSE), RFC 8725 (JWT best current practices), OpenID Connect Core 1.0.
"""

from __future__ import annotations

import binascii
import hmac
import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

from hpcsched.auth.authorize import Action
from hpcsched.errors import RequestError, UnauthenticatedError
from hpcsched.model.units import parse_time_s

MAX_TOKEN_CHARS = 2_000
ALGORITHM = "EdDSA"
TYPE = "JWT"
KEY_NAMES = ("a", "b")  # every `kid`; a rotation renews the one that is not current
CLAIMS = ("iss", "aud", "sub", "jti", "iat", "nbf", "exp")
MAX_NAME_CHARS = 100
MIN_AGE_S = 60.0
_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")


class Scope(StrEnum):
    """Actions that a credential allows. Never more than its user may do."""

    READ = "read"
    SUBMIT = "submit"
    MANAGE = "manage"
    METRICS = "metrics"
    SERVE = "serve"
    ADMIN = "admin"


class CredentialKind(StrEnum):
    TOKEN = "token"
    SESSION = "session"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """The record of a credential.

    `secret_sha256`: of the token or the session's secret, or the fingerprint of the certificate. `revoked_at_s` 0: not revoked.
    """

    id: str
    kind: CredentialKind
    uid: int
    user: str
    scopes: tuple[Scope, ...]
    secret_sha256: str
    name: str = ""
    created_at_s: float
    created_by: str
    expires_at_s: float
    revoked_at_s: float = 0.0

    def why_invalid(self, now_s: float) -> str:
        """Return why the credential is not valid now, "" if it is."""
        if self.revoked_at_s:
            return "is revoked"
        return "has expired" if now_s >= self.expires_at_s else ""


def hash_of(secret: str | bytes) -> str:
    """Return the hash of a secret, as a record has it."""
    return sha256(secret.encode("utf-8", "replace") if isinstance(secret, str) else secret).hexdigest()


def is_secret_of(credential: Credential, secret_sha256: str) -> bool:
    """Return whether the record has this hash; takes the same time for all hashes."""
    return hmac.compare_digest(credential.secret_sha256, secret_sha256)


# ----- client certificates: the key of a certificate signs whose it is


def _owner_text(user: str, fingerprint: str) -> bytes:
    """Return the text that a certificate's key signs. No message of TLS begins like it."""
    return f"hpcsched: the client certificate {fingerprint} is of the user {user}".encode()


def ownership_of(certificate: bytes, key: bytes, user: str) -> str:
    """Return the signature, by its key, that a certificate is `user`'s.

    Both are PEM. Raises RequestError.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    try:
        private = load_pem_private_key(key, None)
        text = _owner_text(user, load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise RequestError(
            "cannot read the certificate and its key: both must be PEM, the key without password"
        ) from None
    if isinstance(private, ed25519.Ed25519PrivateKey):
        return private.sign(text).hex()
    if isinstance(private, ec.EllipticCurvePrivateKey):
        return private.sign(text, ec.ECDSA(hashes.SHA256())).hex()
    if isinstance(private, rsa.RSAPrivateKey):
        return private.sign(text, padding.PKCS1v15(), hashes.SHA256()).hex()
    raise RequestError("cannot prove that the certificate is yours: its key must be Ed25519, EC or RSA")


def is_owned(certificate: bytes, user: str, signature: str) -> bool:
    """Return whether the key of the certificate has signed that it is `user`'s."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.x509 import load_pem_x509_certificate

    try:
        read = load_pem_x509_certificate(certificate)
        key, text = read.public_key(), _owner_text(user, read.fingerprint(hashes.SHA256()).hex())
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(bytes.fromhex(signature), text)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(bytes.fromhex(signature), text, padding.PKCS1v15(), hashes.SHA256())
        else:
            return False
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


# ----- scopes

# Routes of the controller's API that need another scope than READ (GET) or ADMIN (POST).
_SCOPES: Mapping[tuple[str, str], Scope] = {
    ("GET", "/v1/files"): Scope.SUBMIT,  # a job could read them
    ("GET", "/v1/file"): Scope.SUBMIT,
    ("POST", "/v1/submit"): Scope.SUBMIT,
    ("POST", "/v1/test"): Scope.SUBMIT,
    # Its requests for jobs go through their own routes; its submission checks SUBMIT.
    ("POST", "/v1/command"): Scope.READ,
    ("POST", "/v1/reach"): Scope.SUBMIT,
    ("POST", "/v1/cancel"): Scope.MANAGE,
    ("POST", "/v1/hold"): Scope.MANAGE,
    ("POST", "/v1/release"): Scope.MANAGE,
    ("POST", "/v1/requeue"): Scope.MANAGE,
    ("POST", "/v1/suspend"): Scope.MANAGE,
    ("POST", "/v1/resume"): Scope.MANAGE,
    ("POST", "/v1/update"): Scope.MANAGE,
    ("POST", "/v1/crontab"): Scope.SUBMIT,
    ("POST", "/v1/services/use"): Scope.SERVE,
    ("POST", "/v1/services/start"): Scope.SUBMIT,
    ("POST", "/v1/services/roll"): Scope.SUBMIT,
    ("POST", "/v1/services/scale"): Scope.MANAGE,
    ("POST", "/v1/services/stop"): Scope.MANAGE,
    ("POST", "/v1/tokens/revoke"): Scope.MANAGE,
    ("POST", "/v1/sessions/close"): Scope.READ,
    ("GET", "/v1/strays"): Scope.ADMIN,
}
# Only for users on the head: they write files or run programs there, or make credentials.
HEAD_ONLY = frozenset(
    {
        "/v1/backup",
        "/v1/triggers/set",
        "/v1/triggers/clear",
        "/v1/tokens/create",
        "/v1/tokens/rotate-key",
        "/v1/sessions/link",
    }
)
METRICS_PATH = "/metrics"
# Without a credential, because they make one.
_LOGINS = frozenset({"/v1/sessions/open", "/v1/logins/begin", "/v1/logins/finish"})
# Of the gateway itself: it says how busy replicas are, and opens connections to them. It asks for each request of a user besides.
OF_GATEWAY = frozenset({"/v1/services/sync", "/v1/services/reach"})
PUBLIC = _LOGINS | OF_GATEWAY


_ACTIONS: Mapping[Scope, frozenset[Action]] = {
    Scope.READ: frozenset(
        {
            Action.VIEW_JOBS,
            Action.VIEW_DETAILS,
            Action.VIEW_NODES,
            Action.VIEW_USAGE,
            Action.VIEW_RESERVATIONS,
            Action.REVOKE_TOKENS,
        }
    ),
    Scope.SUBMIT: frozenset({Action.SUBMIT, Action.VIEW_FILES, Action.REACH_JOB, Action.MANAGE_SERVICE}),
    Scope.MANAGE: frozenset(
        {
            Action.VIEW_JOBS,
            Action.CANCEL,
            Action.HOLD,
            Action.RELEASE,
            Action.REQUEUE,
            Action.UPDATE,
            Action.SUSPEND,
            Action.MANAGE_SERVICE,
            Action.USE_TOKENS,
            Action.REVOKE_TOKENS,
        }
    ),
    Scope.SERVE: frozenset({Action.USE_SERVICE}),
    Scope.METRICS: frozenset({Action.VIEW_JOBS, Action.VIEW_NODES, Action.VIEW_USAGE, Action.VIEW_RESERVATIONS}),
    Scope.ADMIN: frozenset(Action),
}


def actions_of(scopes: Iterable[str]) -> frozenset[Action]:
    """Return the actions that these scopes allow."""
    return frozenset().union(*(_ACTIONS[Scope(scope)] for scope in scopes))


def scope_of(method: str, path: str) -> Scope | None:
    """Return the scope that a request needs; None: only the head's socket is enough."""
    if path in HEAD_ONLY:
        return None
    if path == METRICS_PATH or path.startswith(METRICS_PATH + "/"):
        return Scope.METRICS
    return _SCOPES.get((method, path), Scope.READ if method == "GET" else Scope.ADMIN)


def why_out_of_scope(scopes: tuple[str, ...] | None, method: str, path: str) -> str:
    """Return why `scopes` do not allow the request, "" if they do; None: no credential."""
    if scopes is None or path in PUBLIC:
        return ""
    needed = scope_of(method, path)
    if needed is None:
        return "only on the head, over the controller's socket"
    if needed in scopes:
        return ""
    return f"it needs the scope {needed}, and your credential has {', '.join(scopes)}"


def read_scopes(text: str) -> tuple[Scope, ...]:
    """Return the scopes of a text such as ``read,submit``, each once, in the order of `Scope`."""
    words = {word.strip() for word in text.split(",") if word.strip()}
    known = ", ".join(Scope)
    if unknown := words.difference(Scope):
        raise RequestError(f"cannot use scope {min(unknown)[:40]!r}: there are {known}")
    if not words:
        raise RequestError(f"cannot make a credential without scopes: there are {known}")
    return tuple(scope for scope in Scope if scope in words)


def read_age_s(text: str, most_s: float) -> float:
    """Return the seconds of a text such as ``30d``, up to `most_s`."""
    age_s = parse_time_s(text, whole_minutes=False)
    if age_s is None or not MIN_AGE_S <= age_s <= most_s:
        raise RequestError(
            f"cannot use the age {text[:40]!r}: a credential is valid for {MIN_AGE_S:g} s to {most_s / 86400:g} days; "
            "write it as 30d or 12h"
        )
    return float(age_s)


# ----- JSON Web Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKeys:
    """The keys of tokens: raw private Ed25519 keys by name, and the one that signs."""

    current: str
    private: Mapping[str, bytes]

    def rotated(self, new: bytes) -> SigningKeys:
        """Return the keys after a rotation: `new` signs, the one before still verifies."""
        name = KEY_NAMES[1] if self.current == KEY_NAMES[0] else KEY_NAMES[0]
        return SigningKeys(current=name, private={self.current: self.private[self.current], name: new})


def token_of(keys: SigningKeys, credential_id: str, user: str, cluster: str, now_s: float, expires_at_s: float) -> str:
    """Return a signed token; `cluster` is the id of the cluster that accepts it."""
    import jwt  # of the extra [web]: a cluster without a gateway does not need it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    claims = {
        "iss": issuer_of(cluster),
        "aud": audience_of(cluster),
        "sub": user,
        "jti": credential_id,
        "iat": int(now_s),
        "nbf": int(now_s),
        "exp": int(expires_at_s),
    }
    key = Ed25519PrivateKey.from_private_bytes(keys.private[keys.current])
    return jwt.encode(claims, key, algorithm=ALGORITHM, headers={"kid": keys.current, "typ": TYPE})


def audience_of(cluster: str) -> str:
    """Return the audience of the tokens of a cluster."""
    return f"hpcsched-api:{cluster}"


def issuer_of(cluster: str) -> str:
    """Return the issuer of the tokens of a cluster."""
    return f"hpcschedd:{cluster}"


def read_token(token: str, keys: SigningKeys, cluster: str, now_s: float) -> Mapping[str, Any]:
    """Return the claims of a token whose signature, header, times and audience are right.

    Raises UnauthenticatedError.
    """
    import jwt
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = keys.private.get(_key_name(token))
    if private is None:
        raise bad_token("its key is unknown; it may be older than two key rotations")
    try:
        claims: Mapping[str, Any] = jwt.decode(
            token,
            Ed25519PrivateKey.from_private_bytes(private).public_key(),
            algorithms=[ALGORITHM],
            audience=audience_of(cluster),
            issuer=issuer_of(cluster),
            options={
                "require": list(CLAIMS),
                "strict_aud": True,
                # With our own time, below.
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
    except jwt.InvalidSignatureError:
        raise bad_token("its signature is wrong: it was altered, or its key was replaced by two rotations") from None
    except jwt.PyJWTError as error:
        raise bad_token(f"it is not one of this cluster ({error})") from None
    _check_claims(claims, now_s)
    return claims


def bad_token(why: str) -> UnauthenticatedError:
    """Return the error for a token that is not valid."""
    return UnauthenticatedError(f"cannot accept the token: {why}; make one with hctl token create")


def _key_name(token: str) -> str:
    """Return the name of the token's key, from a header that is exactly as we write it."""
    if len(token) > MAX_TOKEN_CHARS or token.count(".") != 2 or not token.isascii():
        raise bad_token("it is not a signed JSON Web Token")
    first = token.partition(".")[0]
    try:
        header = json.loads(urlsafe_b64decode(first + "=" * (-len(first) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        raise bad_token("its header cannot be read") from None
    if not isinstance(header, dict) or header.keys() != {"alg", "typ", "kid"}:
        raise bad_token("its header is not as hpcsched writes it")
    if header["alg"] != ALGORITHM or header["typ"] != TYPE or header["kid"] not in KEY_NAMES:
        raise bad_token("its algorithm, type or key is not allowed")
    return str(header["kid"])


def _check_claims(claims: Mapping[str, Any], now_s: float) -> None:
    if not all(isinstance(claims[name], str) and claims[name] for name in ("sub", "jti")):
        raise bad_token("its subject or its id is not a text")
    if not all(type(claims[name]) in (int, float) for name in ("iat", "nbf", "exp")):
        raise bad_token("its times are not numbers")
    if now_s < max(claims["nbf"], claims["iat"]):
        raise bad_token("it is not valid yet")
    if now_s >= claims["exp"]:
        raise bad_token("it has expired")


# ----- id tokens of an OpenID provider, with which a user logs in

MAX_ID_TOKEN_CHARS = 16_000
MAX_ISSUER_KEYS = 100
LEAST_RSA_BITS = 2048
LEEWAY_S = 60.0  # of the provider's clock
ID_TOKEN_AGE_S = 600.0  # a login takes no longer
ID_CLAIMS = ("iss", "sub", "aud", "exp", "iat", "nonce")


class IssuerKey(NamedTuple):
    """A public key of a provider, and the one algorithm that it is for."""

    algorithm: str
    key: Any


def issuer_keys(values: object) -> dict[str, IssuerKey]:
    """Return the keys of a JSON Web Key Set that sign id tokens, by key id.

    Left out are keys of other kinds, of other uses, and weak ones. Raises RequestError.
    """
    import jwt

    listed = values.get("keys") if isinstance(values, dict) else None
    if not isinstance(listed, list) or len(listed) > MAX_ISSUER_KEYS:
        raise RequestError("cannot read the keys of the issuer: they are not a JSON Web Key Set")
    found = {}
    for one in listed:
        if not isinstance(one, dict) or one.get("use", "sig") != "sig" or "d" in one:
            continue
        try:
            key = jwt.PyJWK.from_dict(one).key
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
            continue
        algorithm = _algorithm_of(key)
        if algorithm and one.get("alg", algorithm) == algorithm:
            found[str(one.get("kid", ""))] = IssuerKey(algorithm, key)
    return found


def _algorithm_of(key: object) -> str:
    """Return the algorithm of a public key; "": none that we allow."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= LEAST_RSA_BITS:
        return "RS256"
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return "ES256"
    return "EdDSA" if isinstance(key, ed25519.Ed25519PublicKey) else ""


def id_token_key(token: str) -> str:
    """Return the id of the key that an id token says it is signed with."""
    return str(_id_token_header(token).get("kid", ""))


def read_id_token(
    token: str, keys: Mapping[str, IssuerKey], *, issuer: str, client_id: str, nonce: str, now_s: float
) -> Mapping[str, Any]:
    """Return the claims of an id token of this issuer, for this client and this login.

    The algorithm is that of the key, whatever the token says. Raises UnauthenticatedError.
    """
    import jwt

    header = _id_token_header(token)
    known = keys.get(str(header.get("kid", "")))
    if known is None or header.get("alg") != known.algorithm or "crit" in header:
        raise bad_login("its key or its algorithm is not one of the issuer")
    try:
        claims: Mapping[str, Any] = jwt.decode(
            token,
            known.key,
            algorithms=[known.algorithm],
            audience=client_id,
            issuer=issuer,
            # Times are checked with our own time, below.
            options={"require": list(ID_CLAIMS), "verify_exp": False, "verify_nbf": False, "verify_iat": False},
        )
    except jwt.PyJWTError as error:
        raise bad_login(type(error).__name__) from None
    if isinstance(claims["aud"], list) and claims["aud"] != [client_id] and claims.get("azp") is None:
        raise bad_login("it is for several clients")
    if claims.get("azp", client_id) != client_id:
        raise bad_login("it is for another client")
    given = claims["nonce"]
    if not isinstance(given, str) or not given.isascii() or not hmac.compare_digest(given, nonce):
        raise bad_login("it is of another login")
    if not all(type(claims[name]) in (int, float) for name in ("iat", "exp")):
        raise bad_login("its times are not numbers")
    if not -LEEWAY_S <= now_s - claims["iat"] <= ID_TOKEN_AGE_S or now_s >= claims["exp"] + LEEWAY_S:
        raise bad_login("it has expired, or its time is in the future")
    return claims


def account_of(claims: Mapping[str, Any], claim: str, domain: str) -> str:
    """Return the name of the account that a claim names. Raises UnauthenticatedError."""
    value = claims.get(claim)
    if not isinstance(value, str) or (claim == "email" and claims.get("email_verified") is not True):
        raise bad_login(f"it has no claim {claim!r}, or that is not verified")
    name, at, given = value.partition("@")
    if domain and (at, given) != ("@", domain):
        raise bad_login(f"its claim {claim!r} does not end with @{domain}")
    name = name if domain else value
    if _ACCOUNT.fullmatch(name) is None:
        raise bad_login(f"its claim {claim!r} is not the name of an account")
    return name


def bad_login(why: str) -> UnauthenticatedError:
    """Return the error for an id token that is not valid."""
    return UnauthenticatedError(f"cannot log in: the id token is not accepted: {why}")


def _id_token_header(token: str) -> Mapping[str, Any]:
    if len(token) > MAX_ID_TOKEN_CHARS or token.count(".") != 2 or not token.isascii():
        raise bad_login("it is not a signed JSON Web Token")
    first = token.partition(".")[0]
    try:
        header = json.loads(urlsafe_b64decode(first + "=" * (-len(first) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        raise bad_login("its header cannot be read") from None
    if not isinstance(header, dict):
        raise bad_login("its header cannot be read")
    return header


# ----- states of logins: made and checked without memory, so that no flood of logins can displace another


class Login(NamedTuple):
    """A login at a provider that has begun.

    The state comes back with the user, the nonce in the id token.
    """

    state: str
    nonce: str


def new_login(key: bytes, chance: str, until_s: float) -> Login:
    """Return the login of this random text, which may end until `until_s`."""
    return _login(key, f"{chance}.{until_s:.0f}")


def read_login(key: bytes, state: str, now_s: float) -> Login:
    """Return the login that has this state.

    Raises UnauthenticatedError if we did not begin it, or too long ago.
    """
    given = _login(key, state.rpartition(".")[0]) if state.isascii() and len(state) <= MAX_NAME_CHARS * 2 else None
    if given is None or not hmac.compare_digest(given.state, state):
        raise UnauthenticatedError(
            "cannot log in: this login did not begin here, or the controller was restarted; try again"
        )
    if now_s >= float(state.split(".")[1]):
        raise UnauthenticatedError("cannot log in: the login took too long; try again")
    return given


def _login(key: bytes, begun: str) -> Login:
    return Login(
        f"{begun}.{hmac.new(key, b'state' + begun.encode(), sha256).hexdigest()}",
        hmac.new(key, b"nonce" + begun.encode(), sha256).hexdigest(),
    )
