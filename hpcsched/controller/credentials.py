"""Make, revoke and check the credentials of the API over the network.

The gateway forwards what the client sent: a token, the secret of a session, or the fingerprint of a client certificate that TLS
has verified. The controller accepts these only from connections of the gateway's account, checks them against its own records,
and takes the user from the record. A request from the gateway without a valid credential is refused, except those that make one.

Records are in the database: ids and hashes. The signing keys of tokens are in a file of the state directory, not in backups.
One-time codes are in memory only. Rules of tokens and scopes: `hpcsched.auth.tokens`.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import secrets
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hpcnode.os.durable import write_durably
from hpcsched.api import web
from hpcsched.api.identity import uid_of, user_name, why_refused
from hpcsched.auth.authorize import Action, Identity, Owner, allows, authorize, authorize_root
from hpcsched.auth.tokens import (
    KEY_NAMES,
    MAX_NAME_CHARS,
    PUBLIC,
    Credential,
    CredentialKind,
    IssuerKey,
    Scope,
    SigningKeys,
    account_of,
    bad_token,
    hash_of,
    id_token_key,
    is_owned,
    is_secret_of,
    issuer_keys,
    new_login,
    read_age_s,
    read_id_token,
    read_login,
    read_scopes,
    read_token,
    token_of,
)
from hpcsched.config.load import OidcSettings
from hpcsched.errors import (
    NotFoundError,
    PermissionDeniedError,
    RequestError,
    UnauthenticatedError,
    UnavailableError,
)
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction
from hpcsched.store.sealing import private_opener

Json = dict[str, Any]

KEYS_FILE = "token-keys.json"
# Headers that the gateway sets; it removes them from clients' requests.
FROM_HEADER = "x-hpcsched-gateway"  # the client's address
SESSION_HEADER = "x-hpcsched-session"
CERTIFICATE_HEADER = "x-hpcsched-certificate"
USER_HEADER = "x-slurm-user-name"  # of Slurm's clients: whose the token is
MAX_CREDENTIALS = 10_000
MAX_PER_USER = 100
MAX_SESSIONS_PER_USER = 20  # then the oldest one ends
MAX_CODES = 10_000  # links that wait to be used
MAX_CODES_PER_USER = 20  # then the oldest one ends
MAX_LOGINS_PER_USER = 100  # at a provider, within `LOGIN_S`
CODE_S = 60.0
KEPT_S = 30 * 86400.0  # after its end, so that lists show it
MAX_CACHED = 4_096
MAX_CERTIFICATE_CHARS = 16 << 10
LOGIN_S = 600.0  # from the beginning of a login at a provider to its end
KEYS_S, KEYS_AGAIN_S = 3600.0, 60.0  # age of a provider's keys; before they are fetched again for an unknown key
FETCH_S = 10.0
MAX_FETCHED_BYTES = 256 << 10


class _Code(NamedTuple):
    """A one-time code for a session."""

    uid: int
    user: str
    scopes: tuple[Scope, ...]
    until_s: float


class _Issuer(NamedTuple):
    """The keys of the provider, and when they were fetched."""

    oidc: OidcSettings
    keys: dict[str, IssuerKey]
    at_s: float


class Credentials:
    """The credentials of one controller."""

    def __init__(self, cluster: ClusterState, state_dir: Path, cluster_id: str, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._path = state_dir / KEYS_FILE
        self._cluster_id = cluster_id
        self._clock = clock
        self._keys: SigningKeys | None = None
        self._codes: OrderedDict[str, _Code] = OrderedDict()
        self._verified: OrderedDict[str, str] = OrderedDict()  # hash of a token -> id of its record
        self._gateway: tuple[str | None, int | None] = (None, None)  # configured name, its uid
        self._login_key = secrets.token_bytes(32)
        # States that were used: until when they are remembered, and by which uid.
        self._logins: dict[str, tuple[float, int]] = {}
        self._issuer: _Issuer | None = None

    # ----- who asks

    def identify(self, request: web.Request, peer_uid: int) -> None:
        """Set user, scopes and source of a request that the gateway forwards.

        Raises UnauthenticatedError, PermissionDeniedError.
        """
        source = request.headers.get(FROM_HEADER)
        is_gateway = peer_uid == self._gateway_uid()
        if source is None:
            if is_gateway and peer_uid != os.getuid():
                raise UnauthenticatedError("cannot answer the gateway: its request does not name its user")
            return
        if not is_gateway:
            raise PermissionDeniedError(
                f"cannot accept requests of a gateway from {user_name(peer_uid)}: the gateway's account is "
                f"{self._cluster.config.gateway.user or 'not configured'}; see user in [gateway] of hpcsched.toml"
            )
        request.source = "".join(filter(str.isprintable, source[:64]))
        request.scopes = ()
        if request.path in PUBLIC:
            return
        credential = self._credential_of(request)
        request.uid, request.scopes, request.credential_id = credential.uid, credential.scopes, credential.id

    def _gateway_uid(self) -> int | None:
        """Return the uid whose connections may forward credentials."""
        name = self._cluster.config.gateway.user
        if not name:
            return os.getuid() if os.getuid() else None
        if self._gateway[0] != name:
            self._gateway = (name, uid_of(name))
        return self._gateway[1]

    def _credential_of(self, request: web.Request) -> Credential:
        headers = request.headers
        given = [name for name in ("authorization", SESSION_HEADER, CERTIFICATE_HEADER) if name in headers]
        if len(given) != 1:
            why = "it has more than one credential" if given else "it has no credential"
            raise UnauthenticatedError(f"cannot accept the request: {why}; send one token: Authorization: Bearer TOKEN")
        text = headers[given[0]]
        now_s = self._clock()
        match given[0]:
            case "authorization":
                kind, _, token = text.partition(" ")
                if kind.lower() != "bearer" or not token or "," in token:
                    raise bad_token("the header must be: Authorization: Bearer TOKEN")
                credential = self._of_token(token.strip(), now_s)
            case "x-hpcsched-session":
                credential = self._of_secret(text, CredentialKind.SESSION, text.partition(".")[0])
            case _:
                fingerprint = text.lower()
                credential = self._of_hash(fingerprint, CredentialKind.CERTIFICATE, certificate_id(fingerprint))
        if why := credential.why_invalid(now_s):
            raise UnauthenticatedError(f"cannot accept the {credential.kind} {credential.id}: it {why}")
        if headers.get(USER_HEADER, credential.user) != credential.user:
            raise UnauthenticatedError(
                f"cannot accept the {credential.kind}: it is not of the user that {USER_HEADER} names"
            )
        if user_name(credential.uid) != credential.user:
            raise UnauthenticatedError(f"cannot accept the {credential.kind} {credential.id}: its account is gone")
        return credential

    def _of_token(self, token: str, now_s: float) -> Credential:
        secret_sha256 = hash_of(token)
        credential_id = self._verified.get(secret_sha256)
        if credential_id is None:
            keys = self._load_keys()
            if keys is None:
                raise bad_token("this cluster has made no tokens")
            credential_id = str(read_token(token, keys, self._cluster_id, now_s)["jti"])
            credential = self._of_hash(secret_sha256, CredentialKind.TOKEN, credential_id)
            self._verified[secret_sha256] = credential_id
            if len(self._verified) > MAX_CACHED:
                self._verified.popitem(last=False)
            return credential
        return self._of_hash(secret_sha256, CredentialKind.TOKEN, credential_id)

    def _of_secret(self, secret: str, kind: CredentialKind, credential_id: str) -> Credential:
        return self._of_hash(hash_of(secret), kind, credential_id)

    def _of_hash(self, secret_sha256: str, kind: CredentialKind, credential_id: str) -> Credential:
        credential = self._cluster.credentials.get(credential_id)
        if credential is None or credential.kind is not kind or not is_secret_of(credential, secret_sha256):
            raise UnauthenticatedError(f"cannot accept the {kind}: it is unknown to this cluster")
        return credential

    # ----- tokens and certificates

    def prepare(self, identity: Identity, body: Json) -> tuple[Credential, str]:
        """Return a new record and its secret, "" for a certificate.

        Raises RequestError, UnavailableError.
        """
        texts = _texts(body, ("scopes", "expires", "name", "user", "certificate", "ownership"))
        user, uid = self._for_whom(identity, texts.get("user", ""))
        name = texts.get("name", "")
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise RequestError(f"cannot name the token: a name has at most {MAX_NAME_CHARS} printable characters")
        now_s = self._clock()
        most_s = self._cluster.config.gateway.token_max_age_s
        made = Credential(
            id=secrets.token_hex(8),
            kind=CredentialKind.TOKEN,
            uid=uid,
            user=user,
            scopes=read_scopes(texts.get("scopes", "read")),
            secret_sha256="",
            name=name,
            created_at_s=now_s,
            created_by=identity.user,
            expires_at_s=now_s + read_age_s(texts.get("expires", "30d"), most_s),
        )
        if text := texts.get("certificate", ""):
            fingerprint, end_s = read_certificate(text)
            _check_ownership(identity, text, user, texts.get("ownership", ""))
            return (
                replace(
                    made,
                    id=certificate_id(fingerprint),
                    kind=CredentialKind.CERTIFICATE,
                    secret_sha256=fingerprint,
                    expires_at_s=min(end_s, now_s + most_s)
                    if "expires" not in texts
                    else min(made.expires_at_s, end_s),
                ),
                "",
            )
        keys = self._load_keys() or self._store_keys(
            SigningKeys(current=KEY_NAMES[0], private={KEY_NAMES[0]: secrets.token_bytes(32)})
        )
        try:
            token = token_of(keys, made.id, user, self._cluster_id, now_s, made.expires_at_s)
        except ImportError:
            raise UnavailableError(
                "cannot make a token: PyJWT is missing on the head: pip install 'hpcsched[web]'"
            ) from None
        return replace(made, secret_sha256=hash_of(token)), token

    def _for_whom(self, identity: Identity, user: str) -> tuple[str, int]:
        if user in ("", identity.user):
            authorize(identity, Action.USE_TOKENS, what="make a token")
            return identity.user, identity.uid
        authorize(identity, Action.MANAGE_TOKENS, what=f"make a token for {user[:60]}")
        uid = uid_of(user)
        if uid is None:
            raise NotFoundError(f"cannot make a token for {user[:60]!r}: this machine has no such account")
        if uid in (0, os.getuid()):
            authorize_root(identity, os.getuid(), f"make a token for {user[:60]}")
        return user, uid

    def rotate_key(self) -> str:
        """Make a new signing key and return its name.

        Tokens of the key before the last one end.
        """
        keys = self._load_keys()
        new = secrets.token_bytes(32)
        if keys is None:
            return self._store_keys(SigningKeys(current=KEY_NAMES[0], private={KEY_NAMES[0]: new})).current
        return self._store_keys(keys.rotated(new)).current

    def _load_keys(self) -> SigningKeys | None:
        if self._keys is None:
            try:
                with open(self._path, "rb", opener=private_opener) as file:
                    values = json.loads(file.read(64 << 10))
                private = {name: base64.b64decode(values["private"][name]) for name in values["private"]}
                if values["current"] not in private or not private.keys() <= set(KEY_NAMES):
                    raise ValueError
            except FileNotFoundError:
                return None
            except OSError as error:
                raise UnavailableError(f"cannot read {self._path}: {error.strerror}") from None
            except (ValueError, TypeError, KeyError):
                raise UnavailableError(
                    f"cannot read {self._path}: it is damaged; remove it, and make all tokens anew"
                ) from None
            self._keys = SigningKeys(current=values["current"], private=private)
        return self._keys

    def _store_keys(self, keys: SigningKeys) -> SigningKeys:
        private = {name: base64.b64encode(key).decode() for name, key in keys.private.items()}
        text = json.dumps({"current": keys.current, "private": private})
        try:
            write_durably(str(self._path.parent), self._path.name, text.encode())
        except OSError as error:
            raise UnavailableError(f"cannot write {self._path}: {error.strerror}") from None
        self._keys = keys
        self._verified.clear()
        return keys

    # ----- logins at an OpenID provider

    def begin_login(self) -> Json:
        """Return state and nonce of a new login."""
        self._oidc()
        made = new_login(self._login_key, secrets.token_hex(16), self._clock() + LOGIN_S)
        return {"state": made.state, "nonce": made.nonce}

    async def finish_login(self, body: Json) -> tuple[_Code, str]:
        """Return whose session an id token opens, and the provider's name of the user.

        Raises UnauthenticatedError, PermissionDeniedError, UnavailableError.
        """
        oidc = self._oidc()
        token, state = body.get("id_token"), body.get("state")
        if not isinstance(token, str) or not isinstance(state, str):
            raise RequestError('cannot log in: the body must be {"state": text, "id_token": text}')
        now_s = self._clock()
        login = read_login(self._login_key, state, now_s)
        keys = await self._issuer_keys(oidc, id_token_key(token), now_s)
        claims = read_id_token(
            token, keys, issuer=oidc.issuer, client_id=oidc.client_id, nonce=login.nonce, now_s=now_s
        )
        self._logins = {used: login for used, login in self._logins.items() if login[0] > now_s}
        if state in self._logins:
            raise UnauthenticatedError("cannot log in: this login is over; begin another one")
        name = account_of(claims, oidc.user_claim, oidc.user_domain)
        uid = uid_of(name)
        if uid is None or self._is_system_account(uid):
            raise PermissionDeniedError(
                f"cannot log in as {name!r}: the head has no such account, or it is a system account"
            )
        if sum(by == uid for _, by in self._logins.values()) >= MAX_LOGINS_PER_USER:
            raise UnavailableError(f"cannot log in as {name}: too many logins in {LOGIN_S / 60:g} minutes; wait")
        self._logins[state] = (now_s + LOGIN_S, uid)
        return _Code(uid, name, read_scopes(oidc.scope), now_s), f"{claims['sub']} at {oidc.issuer}"[:MAX_NAME_CHARS]

    def _is_system_account(self, uid: int) -> bool:
        """Return whether the account is root, ours, the gateway's, or one whose jobs are refused."""
        config = self._cluster.config
        ours = {0, os.getuid() if config.controller.user is not None else 0}
        is_gateway = bool(config.gateway.user) and uid == self._gateway_uid()
        return uid in ours or is_gateway or bool(why_refused(uid, config.controller.allow_uid_below))

    def _oidc(self) -> OidcSettings:
        oidc = self._cluster.config.gateway.oidc
        if not oidc.issuer:
            raise NotFoundError("cannot log in: no issuer is set in [gateway.oidc] of hpcsched.toml")
        return oidc

    async def _issuer_keys(self, oidc: OidcSettings, name: str, now_s: float) -> dict[str, IssuerKey]:
        """Return the provider's keys, fetched again if they are old, or lack the key `name`."""
        known = self._issuer
        is_new = known is None or known.oidc != oidc or now_s >= known.at_s + KEYS_S
        if known is None or is_new or (name not in known.keys and now_s >= known.at_s + KEYS_AGAIN_S):
            values = await asyncio.to_thread(_fetched_keys, oidc)
            known = self._issuer = _Issuer(oidc, issuer_keys(values), now_s)
        return known.keys

    # ----- sessions

    def make_code(self, identity: Identity, scopes: tuple[Scope, ...]) -> Json:
        """Return a one-time code that opens a session for the identity."""
        authorize(identity, Action.USE_TOKENS, what="make a link for a session")
        now_s = self._clock()
        for code in [code for code, made in self._codes.items() if made.until_s <= now_s]:
            del self._codes[code]
        mine = [code for code, made in self._codes.items() if made.uid == identity.uid]
        for code in mine[: max(0, len(mine) + 1 - MAX_CODES_PER_USER)]:
            del self._codes[code]
        if len(self._codes) >= MAX_CODES:
            raise UnavailableError("cannot make a link: too many links wait to be used; try again in a minute")
        secret = secrets.token_urlsafe(32)
        self._codes[hash_of(secret)] = _Code(identity.uid, identity.user, scopes, now_s + CODE_S)
        return {"code": secret, "valid_s": CODE_S, "url": self._cluster.config.gateway.url}

    def use_code(self, body: Json) -> _Code:
        """Return what a one-time code stands for, and use it up. Raises UnauthenticatedError."""
        found = self._codes.pop(hash_of(str(body.get("code") or "")), None)
        if found is None or found.until_s <= self._clock():
            raise UnauthenticatedError(
                "cannot open a session: the link is unknown, used or older than a minute; run hpcsched web again"
            )
        return found

    def new_session(self, uid: int, user: str, scopes: tuple[Scope, ...], name: str) -> tuple[Credential, str]:
        """Return the record of a new session, and its secret."""
        now_s = self._clock()
        credential_id = secrets.token_hex(8)
        secret = f"{credential_id}.{secrets.token_urlsafe(32)}"
        made = Credential(
            id=credential_id,
            kind=CredentialKind.SESSION,
            uid=uid,
            user=user,
            scopes=scopes,
            secret_sha256=hash_of(secret),
            name=name,
            created_at_s=now_s,
            created_by=user,
            expires_at_s=now_s + self._cluster.config.gateway.session_s,
        )
        return made, secret

    def scopes_of_code(self, body: Json) -> tuple[Scope, ...]:
        """Return the scopes that a link was asked for."""
        return read_scopes(str(body.get("scopes") or "read,submit,manage"))


def _fetched_keys(oidc: OidcSettings) -> Any:
    """Return the provider's JSON Web Key Set, from its file or from the provider.

    Raises UnavailableError. It takes up to `FETCH_S` for each of two requests.
    """
    if oidc.keys:
        try:
            with open(oidc.keys, "rb") as file:
                return json.loads(file.read(MAX_FETCHED_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise UnavailableError(f"cannot log in: cannot read the issuer's keys {oidc.keys}: {error}") from None
    described = _fetched(f"{oidc.issuer.rstrip('/')}/.well-known/openid-configuration", oidc.ca)
    if not isinstance(described, dict) or described.get("issuer") != oidc.issuer:
        raise UnavailableError(f"cannot log in: {oidc.issuer} describes another issuer")
    return _fetched(str(described.get("jwks_uri")), oidc.ca)


def _fetched(address: str, ca: str) -> Any:
    """Return the JSON at an HTTPS address, without following redirects."""
    parts = urlsplit(address)
    try:
        if parts.scheme != "https" or not parts.hostname:
            raise ValueError("it is not an https address")
        context = ssl.create_default_context(cafile=ca or None)
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=FETCH_S, context=context)
        with closing(connection):
            connection.request("GET", parts.path or "/", headers={"accept": "application/json"})
            answer = connection.getresponse()
            data = answer.read(MAX_FETCHED_BYTES + 1)
        if answer.status != 200 or len(data) > MAX_FETCHED_BYTES:
            raise ValueError(f"status {answer.status}, {len(data)} bytes")
        return json.loads(data)
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise UnavailableError(f"cannot log in: cannot get {address[:200]}: {error}") from None


def _texts(body: Json, names: tuple[str, ...]) -> dict[str, str]:
    if unknown := set(body).difference(names):
        raise RequestError(f"cannot make a token: unknown field {min(unknown)[:40]!r}; there are {', '.join(names)}")
    if not all(isinstance(value, str) for value in body.values()):
        raise RequestError(f"cannot make a token: {', '.join(names)} must be texts")
    return {name: value for name, value in body.items() if value}


def certificate_id(fingerprint: str) -> str:
    """Return the id of a certificate's record."""
    return f"c{fingerprint[:15]}"


def read_certificate(text: str) -> tuple[str, float]:
    """Return fingerprint and end of a certificate in PEM. Raises RequestError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        if len(text) > MAX_CERTIFICATE_CHARS:
            raise ValueError
        certificate = x509.load_pem_x509_certificate(text.encode("ascii"))
        return certificate.fingerprint(hashes.SHA256()).hex(), certificate.not_valid_after_utc.timestamp()
    except ValueError:  # UnicodeEncodeError too
        raise RequestError("cannot read the certificate: it is not one certificate in PEM format") from None


def _check_ownership(identity: Identity, certificate: str, user: str, signature: str) -> None:
    """Raise PermissionDeniedError unless the key has signed, or an admin says, whose it is.

    Otherwise a user could register the certificate of another, whose requests then act for the wrong one.
    """
    if not is_owned(certificate.encode(), user, signature):
        authorize(identity, Action.MANAGE_TOKENS, what="register a certificate without its key (--key=FILE)")


# ----- changes, in a tick


def authorize_rotation(identity: Identity) -> None:
    """Raise PermissionDeniedError unless the identity may rotate the key of tokens."""
    authorize(identity, Action.MANAGE_TOKENS, what="rotate the key of tokens")


def create(tx: Transaction, identity: Identity, made: Credential) -> Credential:
    """Record a new token or certificate, if the identity may still make it."""
    action = Action.USE_TOKENS if made.user == identity.user else Action.MANAGE_TOKENS
    authorize(identity, action, what=f"make a token for {made.user[:60]}")
    return put(tx, made)


def put(tx: Transaction, made: Credential) -> Credential:
    """Record a new credential. Raises RequestError if there are too many."""
    _forget_old(tx)
    credentials = tx.cluster.credentials
    mine = [one for one in credentials.values() if one.uid == made.uid and not one.why_invalid(tx.now_s)]
    before = credentials.get(made.id)
    if before is not None and not before.why_invalid(tx.now_s):
        raise RequestError(
            f"cannot register the certificate: it is registered for {before.user} already; revoke that first"
        )
    if made.kind is CredentialKind.SESSION:
        sessions = sorted((one for one in mine if one.kind is made.kind), key=lambda one: one.created_at_s)
        for one in sessions[: max(0, len(sessions) + 1 - MAX_SESSIONS_PER_USER)]:
            tx.set_credential(one.id, None)
    elif sum(one.kind is not CredentialKind.SESSION for one in mine) >= MAX_PER_USER:
        raise RequestError(f"cannot make a token: {made.user} has {MAX_PER_USER}; revoke some with hctl token revoke")
    if len(credentials) >= MAX_CREDENTIALS:
        raise RequestError(f"cannot make a token: there are {MAX_CREDENTIALS} of all users; revoke some")
    tx.set_credential(made.id, made)
    return made


def _forget_old(tx: Transaction) -> None:
    for one in list(tx.cluster.credentials.values()):
        ended_s = min(one.expires_at_s, one.revoked_at_s or one.expires_at_s)
        if ended_s + KEPT_S < tx.now_s:
            tx.set_credential(one.id, None)


def revoke(tx: Transaction, identity: Identity, ids: list[str], user: str = "") -> list[str]:
    """Revoke credentials by id, or all of a user; return the ids."""
    if user and user != identity.user:
        authorize(identity, Action.MANAGE_TOKENS, what=f"revoke the tokens of {user[:60]}")
    found = []
    for credential_id in ids or [one.id for one in tx.cluster.credentials.values() if one.user == user]:
        one = tx.cluster.credentials.get(credential_id)
        if one is None or not _may_revoke(identity, one):
            raise NotFoundError(f"cannot revoke {credential_id[:40]!r}: you have no such token; see hctl token list")
        if not one.revoked_at_s:
            tx.set_credential(one.id, replace(one, revoked_at_s=tx.now_s))
        found.append(one.id)
    return found


def _may_revoke(identity: Identity, one: Credential) -> bool:
    owner = Owner(uid=one.uid, user=one.user)
    return allows(identity, Action.MANAGE_TOKENS) or allows(identity, Action.REVOKE_TOKENS, owner)


def views(cluster: ClusterState, identity: Identity, user: str) -> list[Json]:
    """Return the credentials of `user`, or of all users (``*``): admins see them all.

    "": all for admins, for others their own.
    """
    if not user and allows(identity, Action.MANAGE_TOKENS):
        user = "*"
    if user in ("", identity.user):
        authorize(identity, Action.REVOKE_TOKENS, what="see the own tokens")
    else:
        authorize(identity, Action.MANAGE_TOKENS, what=f"see the tokens of {'all users' if user == '*' else user[:60]}")
    wanted = user or identity.user
    return [_view(one) for one in _by_age(cluster) if wanted in ("*", one.user)]


def _by_age(cluster: ClusterState) -> Iterator[Credential]:
    yield from sorted(cluster.credentials.values(), key=lambda one: one.created_at_s)


def _view(one: Credential) -> Json:
    return {
        "id": one.id,
        "kind": one.kind.value,
        "user": one.user,
        "name": one.name,
        "scopes": [scope.value for scope in one.scopes],
        "created_at_s": one.created_at_s,
        "created_by": one.created_by,
        "expires_at_s": one.expires_at_s,
        "revoked_at_s": one.revoked_at_s or None,
    }
