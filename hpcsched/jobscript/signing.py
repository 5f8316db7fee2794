"""Sign what a user submits, for nodes whose root helper starts only signed programs.

The key is made at first use and stays in the user's home. An admin installs its public half on the nodes. What must be signed,
and what a signature is good for, is decided by the node: `hpcnode.helper`. The controller has no key: it compares a signed
request with its job (`check_signed`), so that a mistake is refused at submission and not by the node.

Rules: a request names script, arguments, directory, umask and environment by hash, and files by pattern. The environment has a
random variable, so that its hash in the database does not help to guess it. A renewed request differs from the first only in its
times and in the number of attempts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcnode import helper
from hpcnode.wire import gate
from hpcsched.errors import ConfigError, RequestError
from hpcsched.model.frozen import replace
from hpcsched.model.spec import SIGNED_REQUEST, JobSpec
from hpcsched.model.units import UNLIMITED_S, parse_time_s

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VERSION = 2
KEY_FILE = "~/.config/hpcsched/signing_key"
SALT = "HPCSCHED_SIGNED_SALT"
VALID_FOR = "HPCSCHED_SIGN_FOR"  # the user's variable: how long a signature is valid, as --time
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"  # that nodes give a job without one
VALID_S = 7 * 86400
LEAST_VALID_S = 60
STEP_VALID_S = 3600  # of a step in a job that has its nodes
UNLIMITED_STEPS_S = 30 * 86400  # for jobs without a time limit
MORE_ATTEMPTS = 20
MAX_SIGNED = 256 << 10  # characters of a request with its signature
_LETTER = re.compile("%(%|[0-9]*[A-Za-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Who signs, when and for how long."""

    key: Ed25519PrivateKey
    user: str
    uid: int
    cluster: str
    now_s: float
    valid_s: int = VALID_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What the controller reads of a signed request."""

    expires_s: int
    attempts: int


# ----- the user's key


def own_key(user: str, *, may_make: bool = True) -> Ed25519PrivateKey:
    """Return the key of this process's user, made if there is none. Raises ConfigError.

    `may_make` False: a new key would not be known to the nodes.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = Path(os.path.expanduser(KEY_FILE))
    try:
        if not path.exists() and not may_make:
            raise ConfigError(
                f"cannot sign the job: this machine has no {KEY_FILE}, and the nodes would not know a new key. Submit on the "
                f"head, or copy your key from the head: scp HEAD:{KEY_FILE.removeprefix('~/')} {KEY_FILE}"
            )
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = Ed25519PrivateKey.generate()
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(made.private_bytes_raw().hex() + "\n")
            path.with_name("signing_key.pub").write_text(f"{_public_line(made, user)}\n")
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(f"cannot use your signing key {path}: others may read it; run: chmod 600 {path}")
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use your signing key {path}: {error}") from None


def public_line(user: str) -> str:
    """Return the line for /etc/hpcsched/users/NAME.pub on the nodes. Raises ConfigError."""
    return _public_line(own_key(user), user)


def _public_line(key: Ed25519PrivateKey, user: str) -> str:
    return f"hpcsched-ed25519 {key.public_key().public_bytes_raw().hex()} {user}"


def valid_s(environ: Mapping[str, str]) -> int:
    """Return how long the user's signatures are valid, in seconds. Raises RequestError."""
    text = environ.get(VALID_FOR, "")
    if not text:
        return VALID_S
    seconds = parse_time_s(text) or 0
    if not LEAST_VALID_S <= seconds <= helper.LONGEST_S:
        raise RequestError(f"cannot sign for {VALID_FOR}={text[:60]!r}: it must be between a minute and 90 days")
    return seconds


# ----- what is signed


def signed_job(spec: JobSpec, by: Signer) -> JobSpec:
    """Return the job with a signed request; the environment gets what a node would add."""
    env = {name: value for name, value in spec.env if name not in (SIGNED_REQUEST, SALT)}
    env = {"PATH": DEFAULT_PATH, **env, SALT: os.urandom(16).hex()}
    spec = replace(spec, env=tuple(env.items()))
    request = _begun(by, spec.name) | _content(spec)
    return replace(spec, signed=_sealed(request, by.key), signed_until_s=request["expires"])


def _content(spec: JobSpec) -> dict[str, Any]:
    """Return the part of a request that says what runs, and where."""
    out = spec.stdout or ("slurm-%A_%a.out" if spec.array is not None else "slurm-%j.out")
    limit_s = UNLIMITED_STEPS_S if spec.time_limit_s in (None, UNLIMITED_S) else spec.time_limit_s
    return {
        "script": _digest(spec.script),
        "args": _digest(list(spec.script_args)),
        "files": _patterns([spec.stdin or "/dev/null", out, spec.stderr or out], spec.work_dir),
        "nodes": list(spec.nodelist) if len(spec.nodelist) >= spec.nodes_max else [],
        "tasks": _ranges(spec.array.indices) if spec.array is not None else [],
        "steps_s": limit_s if spec.nodes_max > 1 or spec.components else 0,
        "attempts": MORE_ATTEMPTS,
        "once": spec.requeue is False,
        **_place(spec.work_dir, dict(spec.env)),
    }


def signed_step(argv: Sequence[str], work_dir: str, env: Mapping[str, str], files: Sequence[str], by: Signer) -> str:
    """Return the signed request of a step that its user starts on the head."""
    request = _begun(by, argv[0][:60]) | {
        "argv": _digest(list(argv)),
        "args": _digest([]),
        "files": _patterns([name or "/dev/null" for name in files], work_dir),
        "nodes": [],
        "tasks": [],
        "steps_s": 0,
        "attempts": MORE_ATTEMPTS,
        "once": False,
        **_place(work_dir, env),
    }
    return _sealed(request, by.key)


def renewed(text: str, attempt: int, by: Signer) -> tuple[str, dict[str, Any]]:
    """Return the signed request `text` with a new expiry, and the request in it.

    Only a request that the user has signed before is signed again, whatever the controller sent.

    Raises: RequestError.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        envelope = helper.strict(text)
        by.key.public_key().verify(bytes.fromhex(envelope["signature"]), envelope["request"].encode())
        request: dict[str, Any] = helper.strict(envelope["request"])
    except (ValueError, KeyError, TypeError, AttributeError, InvalidSignature):
        raise RequestError("cannot sign the job again: your key did not sign what the controller sent") from None
    if request["v"] != VERSION or "script" not in request or request["cluster"] != by.cluster:
        raise RequestError("cannot sign the job again: its request is of another cluster or version")
    again = {**request, "issued": int(by.now_s), "expires": int(by.now_s) + by.valid_s}
    return _sealed({**again, "attempts": max(request["attempts"], attempt + MORE_ATTEMPTS)}, by.key), again


def _begun(by: Signer, name: str) -> dict[str, Any]:
    return {
        "v": VERSION,
        "cluster": by.cluster,
        "uid": by.uid,
        "user": by.user,
        "request": os.urandom(16).hex(),
        "name": name[:100],  # for the user who is asked to sign again
        "first": int(by.now_s),
        "issued": int(by.now_s),
        "expires": int(by.now_s) + by.valid_s,
    }


def _place(work_dir: str, env: Mapping[str, str]) -> dict[str, Any]:
    own = {name: value for name, value in env.items() if name not in helper.TOLD and not helper.OURS.fullmatch(name)}
    return {
        "work_dir": _digest(work_dir),
        "directory": work_dir[:1000],  # for the user who is asked to sign again
        "umask": _digest(_umask(env)),
        "environment": _digest(own),
    }


def _umask(env: Mapping[str, str]) -> int:
    """Return the umask that a node gives the tasks: see `hpcnode.shepherd.environment`."""
    text = env.get("SLURM_UMASK", "")
    return int(text, 8) & 0o777 if re.fullmatch("[0-7]{1,4}", text) else 0o022  # int: four octal digits


def _patterns(names: Iterable[str], work_dir: str) -> list[str]:
    """Return absolute paths in which each ``%`` stands for a part of a file's name."""
    return [os.path.join(work_dir, _LETTER.sub("%", name)) for name in names]


def _ranges(indices: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as pairs of first and last."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ranges


def _sealed(request: Mapping[str, Any], key: Ed25519PrivateKey) -> str:
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return json.dumps({"request": text, "signature": key.sign(text.encode()).hex()}, separators=(",", ":"))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ----- what the controller does with it


def read_signature(text: str) -> Signature:
    """Return what the controller needs of a signed request. Raises RequestError."""
    request = _request(text)
    return Signature(expires_s=request["expires"], attempts=request["attempts"])


def _request(text: str) -> dict[str, Any]:
    try:
        if len(text) > MAX_SIGNED:
            raise ValueError
        request: Any = gate.read_json(gate.read_json(text.encode())["request"].encode())
        if type(request["expires"]) is int and type(request["attempts"]) is int and request["attempts"] >= 0:
            return dict(request)
    except (gate.GateError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise RequestError(
        "cannot submit the job: its signed request cannot be read; it is longer than allowed, or damaged"
    )


_OPTIONS = {  # what a user calls the fields of a request
    "args": "arguments of the script",
    "work_dir": "directory (--chdir)",
    "directory": "directory (--chdir)",
    "environment": "environment (--export)",
    "files": "files (--input, --output, --error)",
    "nodes": "nodes (--nodelist)",
    "tasks": "array (--array)",
    "steps_s": "time limit or number of nodes (--time, --nodes)",
    "once": "requeueing (--requeue, --no-requeue)",
}


def check_signed(spec: JobSpec, *, user: str, uid: int, cluster: str, now_s: float | None) -> None:
    """Refuse a job that differs from its signed request, which a node would refuse.

    The script is compared if the specification has it; `now_s` None: an expired request passes. Raises RequestError.
    """
    request = _request(spec.signed)
    wanted = {"v": VERSION, "cluster": cluster, "uid": uid, "user": user} | _content(spec)
    del wanted["attempts"]
    if not spec.script:
        del wanted["script"]
    differing = sorted({_OPTIONS.get(name, name) for name, value in wanted.items() if request.get(name) != value})
    if differing:
        raise RequestError(
            f"cannot take the job: it differs from what its user has signed in its {', '.join(differing)}; submit it anew"
        )
    if request["expires"] != spec.signed_until_s or (now_s is not None and request["expires"] <= now_s):
        raise RequestError("cannot take the job: its signature has expired; compare your clock with that of the head")
