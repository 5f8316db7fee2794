"""Sign submitted jobs with the user's key, for nodes whose root helper wants that.

The key is made at first use and stays in the user's home. An admin installs its public half on the nodes. What must be signed is
decided by the node: `hpcnode.helper`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hpcsched import client
from hpcsched.errors import ConfigError
from hpcsched.model.spec import SIGNED_REQUEST, JobSpec

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"  # that nodes give a job without one
VALID_S = 7 * 86400
MAX_REQUEUES = 20  # starts of one job on one node that are signed for


def own_key() -> Ed25519PrivateKey:
    """Return this user's key, made if there is none. Raises ConfigError."""
    path = Path(os.path.expanduser("~/.config/hpcsched/signing_key"))
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = Ed25519PrivateKey.generate()
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(made.private_bytes_raw().hex() + "\n")
            public = path.with_name("signing_key.pub")
            public.write_text(f"hpcsched-ed25519 {made.public_key().public_bytes_raw().hex()} {client.my_name()}\n")
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(f"cannot use your signing key {path}: others may read it; run: chmod 600 {path}")
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use your signing key {path}: {error}") from None


def public_line() -> str:
    """Return the line for /etc/hpcsched/users/NAME.pub on the nodes. Raises ConfigError."""
    return f"hpcsched-ed25519 {own_key().public_key().public_bytes_raw().hex()} {client.my_name()}"


def signed(spec: JobSpec, *, cluster: str, request_id: str, key: Ed25519PrivateKey) -> JobSpec:
    """Return the job with a signed request in its environment."""
    now_s = int(time.time())
    env = [(name, value) for name, value in spec.env if name != SIGNED_REQUEST]
    env += [] if "PATH" in dict(env) else [("PATH", DEFAULT_PATH)]  # the node would add it, and it would not be signed
    tasks = len(spec.array.indices) if spec.array is not None else 1
    request = {
        "v": 1,
        "cluster": cluster,
        "uid": os.getuid(),
        "user": client.my_name(),
        "request": request_id or os.urandom(16).hex(),
        "script": _digest(spec.script),
        "args": list(spec.script_args),
        "work_dir": spec.work_dir,
        "env": {name: _digest(value) for name, value in env},
        "nodes": list(spec.nodelist) if len(spec.nodelist) >= spec.nodes_max else [],
        "steps": spec.nodes_max > 1,
        "starts": tasks * (1 if spec.requeue is False else MAX_REQUEUES),
        "issued": now_s,
        "expires": now_s + VALID_S,
    }
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    envelope = json.dumps({"request": text, "signature": key.sign(text.encode()).hex()}, separators=(",", ":"))
    return replace(spec, env=(*env, (SIGNED_REQUEST, envelope)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
