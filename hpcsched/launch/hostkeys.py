"""Host keys: which ones are trusted.

A node's key is pinned in its configuration. A jump host's key is looked up in known_hosts. Any
other key is refused: no key is ever added automatically. `@cert-authority` lines are not trusted,
because paramiko does not verify host certificates.

Algorithms: those that Terrapin (CVE-2023-48795) breaks are never negotiated, whether or not the
peer supports strict key exchange: no CBC, and encrypt-then-mac only with strict key exchange.
Signatures and MACs with SHA-1 or MD5 are never negotiated either.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hpcsched.errors import ConfigError
from hpcsched.launch.pipe import LinkError
from hpcsched.store.sealing import private_opener

# Filters over the algorithms of the installed paramiko: names that it does not know have no effect.
DISABLED_ALGORITHMS = {
    "ciphers": ["aes128-cbc", "aes192-cbc", "aes256-cbc", "3des-cbc", "blowfish-cbc", "chacha20-poly1305@openssh.com"],
    "macs": ["hmac-sha1", "hmac-md5", "hmac-sha1-96", "hmac-md5-96", "hmac-sha1-etm@openssh.com"],
    "kex": [
        "diffie-hellman-group1-sha1",
        "diffie-hellman-group14-sha1",
        "diffie-hellman-group-exchange-sha1",
    ],
    "keys": ["ssh-rsa", "ssh-dss"],
    "pubkeys": ["ssh-rsa", "ssh-dss"],
}


def fingerprint(key: paramiko.PKey) -> str:
    """Return the key's fingerprint as `ssh-keygen -l` shows it: ``SHA256:...``."""
    return fingerprint_of(key.asbytes())


def fingerprint_of(blob: bytes) -> str:
    """Return the fingerprint of a public key's bytes."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii").rstrip("=")


def spelled(key: paramiko.PKey) -> str:
    """Return the public key as in known_hosts, without the host name: ``ssh-ed25519 AAAA...``."""
    return f"{key.get_name()} {base64.b64encode(key.asbytes()).decode('ascii')}"


def blob_of(pinned: str) -> bytes:
    """Return the bytes of a key that `spelled` wrote (the configuration has checked it)."""
    return base64.b64decode(pinned.split()[1], validate=True)


def algorithms_for(key_type: str) -> tuple[str, ...]:
    """Return the host key algorithms by which a server can prove a key of this type."""
    return ("rsa-sha2-512", "rsa-sha2-256") if key_type == "ssh-rsa" else (key_type,)


def check_pinned(key: paramiko.PKey, pinned: str, where: str) -> None:
    """Raise LinkError unless `key` is the pinned one."""
    wanted = blob_of(pinned)
    if key.asbytes() != wanted:
        raise LinkError(
            f"cannot trust {where}: its host key has changed: pinned is {fingerprint_of(wanted)}, it shows "
            f"{fingerprint(key)}; either the machine was set up anew (then: hpcsched node rekey NAME), "
            "or somebody is in between"
        )


def known_keys(files: Iterable[Path], host: str, port: int) -> list[str]:
    """Return the known_hosts keys (as `spelled`) of this host and port, except revoked keys."""
    name = host if port == 22 else f"[{host}]:{port}"
    found: list[str] = []
    revoked: set[bytes] = set()
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        for marker, names, key in filter(None, map(_entry, lines)):
            if marker == "@revoked":
                revoked.add(blob_of(key))
            elif not marker and any(_names(listed, name) for listed in names):
                found.append(key)
    return [key for key in found if blob_of(key) not in revoked]


def _entry(line: str) -> tuple[str, list[str], str] | None:
    """Return a line's marker, names and key. (paramiko's reader fails on markers.)"""
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#"):
        return None
    key = " ".join(words[1:3])
    try:
        blob_of(key)
    except ValueError:
        return None  # a damaged line has no effect
    return marker, words[0].split(","), key


def _names(listed: str, name: str) -> bool:
    """Return whether a name of known_hosts, plain or hashed, is `name`."""
    if not listed.startswith("|1|"):
        return listed == name
    try:
        return hmac.compare_digest(paramiko.HostKeys.hash_host(name, listed), listed)
    except (ValueError, AssertionError, IndexError):
        return False


def check_known(key: paramiko.PKey, known: Sequence[str], where: str) -> None:
    """Raise LinkError unless `key` is one of `known`."""
    if not known:
        raise LinkError(
            f"cannot trust {where}: no known_hosts file has a key for it (it shows {fingerprint(key)}); "
            "log in there once with ssh, and compare the fingerprint"
        )
    if key.asbytes() not in map(blob_of, known):
        prints = ", ".join(fingerprint_of(blob_of(each)) for each in known)
        raise LinkError(f"cannot trust {where}: it shows the host key {fingerprint(key)}, known_hosts has {prints}")


def check_agreement(transport: paramiko.Transport, where: str) -> None:
    """Raise LinkError if an attacker can truncate the negotiated connection unseen (Terrapin)."""
    strict = getattr(transport, "agreed_on_strict_kex", False)  # paramiko 3.4
    if not strict and "-etm@" in (transport.remote_mac or "") and "gcm" not in transport.remote_cipher:
        raise LinkError(
            f"cannot trust {where}: it offers encrypt-then-mac without strict key exchange (CVE-2023-48795); "
            "update its SSH server (OpenSSH 9.6 or newer)"
        )


# ----- the launch key: an Ed25519 key pair in OpenSSH's file format, for logins to nodes


def make_key(path: Path, comment: str) -> str:
    """Write a new private key to `path` and its public key to `path`.pub; return the latter.

    The private key is 0600 from the first byte. Raises FileExistsError if the file exists.
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    openssh = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public = f"{openssh.decode('ascii')} {comment}"
    _write(path, private, 0o600)
    _write(path.with_name(path.name + ".pub"), public.encode() + b"\n", 0o644)
    return public


CERTIFICATE_S = 600.0
CLOCKS_S = 60.0  # how far a node's clock may be behind
PRINCIPAL = "hpcsched"


def certificate_of(public_key: str, authority: Path, key_id: str, now_s: float, valid_s: float = CERTIFICATE_S) -> str:
    """Return an OpenSSH user certificate for the launch key, for the file KEY-cert.pub.

    `authority` is the private key that signs. Raises OSError or ValueError.
    """
    with open(authority, "rb", opener=private_opener) as file:
        private = file.read()
    try:
        ca = serialization.load_ssh_private_key(private, None)
    except TypeError as error:  # it has a passphrase
        raise ValueError(str(error)) from None
    subject = serialization.load_ssh_public_key(public_key.encode())
    if not isinstance(ca, Ed25519PrivateKey) or not isinstance(subject, Ed25519PublicKey):
        raise ValueError("both keys must be Ed25519 keys")
    builder = serialization.SSHCertificateBuilder().public_key(subject).serial(int(now_s))
    builder = builder.type(serialization.SSHCertificateType.USER).key_id(key_id.encode())
    builder = builder.valid_principals([PRINCIPAL.encode()])
    certificate = builder.valid_after(int(now_s - CLOCKS_S)).valid_before(int(now_s + valid_s)).sign(ca)
    return certificate.public_bytes().decode("ascii") + f" {key_id}"


def _write(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
