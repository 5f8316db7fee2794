"""Which host keys are believed, and what is never negotiated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest

from hpcsched.launch import hostkeys
from hpcsched.launch.hostkeys import make_key
from hpcsched.launch.pipe import LinkError


@pytest.fixture
def keys(tmp_path: Path) -> list[paramiko.PKey]:
    for name in ("a", "b"):
        make_key(tmp_path / name, name)
    return [paramiko.PKey.from_path(tmp_path / name) for name in ("a", "b")]


def test_a_pinned_key_is_that_key(keys: list[paramiko.PKey]) -> None:
    pinned = hostkeys.spelled(keys[0])
    hostkeys.check_pinned(keys[0], pinned, "h")
    with pytest.raises(LinkError, match="has changed") as caught:
        hostkeys.check_pinned(keys[1], pinned, "h")
    assert hostkeys.fingerprint(keys[0]) in str(caught.value)
    assert hostkeys.fingerprint(keys[1]) in str(caught.value)


def test_fingerprints_are_openssh_s(keys: list[paramiko.PKey]) -> None:
    # ssh-keygen -lf of this key
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"
    assert hostkeys.fingerprint_of(hostkeys.blob_of(key)) == "SHA256:Rn5T1RH7pTm4SeEWeWXZNiElAKTE6iWHIWCL7G1qle8"
    assert hostkeys.blob_of(hostkeys.spelled(keys[0])) == keys[0].asbytes()


def test_known_hosts(tmp_path: Path, keys: list[paramiko.PKey]) -> None:
    path = tmp_path / "known_hosts"
    make_key(tmp_path / "lost", "lost")
    lost = paramiko.PKey.from_path(tmp_path / "lost")
    hashed = paramiko.HostKeys.hash_host("hidden")
    path.write_text(
        f"plain {hostkeys.spelled(keys[0])}\n[odd]:2222 {hostkeys.spelled(keys[1])}\n"
        f"{hashed} {hostkeys.spelled(keys[1])}\n@cert-authority ca {hostkeys.spelled(keys[0])}\n"
        f"@revoked * {hostkeys.spelled(lost)}\nplain {hostkeys.spelled(lost)}\n"
        f"# a comment\n\nplain ssh-ed25519 AAA\nplain\n|1|bad|bad {hostkeys.spelled(keys[1])}\n"
    )

    def known(host: str, port: int = 22) -> list[str]:
        return hostkeys.known_keys([tmp_path / "none", path], host, port)

    hostkeys.check_known(keys[0], known("plain"), "plain")
    hostkeys.check_known(keys[1], known("odd", 2222), "odd")
    hostkeys.check_known(keys[1], known("hidden"), "hidden")
    for host, key in (("plain", keys[1]), ("plain", lost), ("odd", keys[1]), ("ca", keys[0]), ("other", keys[0])):
        with pytest.raises(LinkError, match="cannot trust"):
            hostkeys.check_known(key, known(host), host)


def test_an_rsa_key_proves_itself_with_sha2_only() -> None:
    assert hostkeys.algorithms_for("ssh-rsa") == ("rsa-sha2-512", "rsa-sha2-256")
    assert hostkeys.algorithms_for("ssh-ed25519") == ("ssh-ed25519",)


def test_f4_weak_algorithms_are_not_offered() -> None:
    class Wire:
        def settimeout(self, _: float) -> None: ...
        def close(self) -> None: ...

    transport = paramiko.Transport(Wire(), disabled_algorithms=hostkeys.DISABLED_ALGORITHMS)
    assert transport.preferred_ciphers
    assert not [name for name in transport.preferred_ciphers if "cbc" in name or "chacha" in name]
    assert not [name for name in transport.preferred_macs if "sha1" in name or "md5" in name]
    assert not [name for name in transport.preferred_kex if name.endswith("sha1")]
    assert "ssh-rsa" not in (*transport.preferred_keys, *transport.preferred_pubkeys)


@pytest.mark.parametrize(
    ("strict", "mac", "cipher", "refused"),
    [
        (True, "hmac-sha2-256-etm@openssh.com", "aes128-ctr", False),
        (False, "hmac-sha2-256", "aes128-ctr", False),
        (False, "hmac-sha2-256-etm@openssh.com", "aes128-ctr", True),
        (False, "hmac-sha2-256-etm@openssh.com", "aes128-gcm@openssh.com", False),  # the mac is not used then
    ],
)
def test_f4_terrapin(strict: bool, mac: str, cipher: str, refused: bool) -> None:
    transport = SimpleNamespace(agreed_on_strict_kex=strict, remote_mac=mac, remote_cipher=cipher)
    if refused:
        with pytest.raises(LinkError, match="CVE-2023-48795"):
            hostkeys.check_agreement(transport, "h")  # type: ignore[arg-type]
    else:
        hostkeys.check_agreement(transport, "h")  # type: ignore[arg-type]
