"""The signature of a certificate's key that says whose the certificate is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcsched.auth.tokens import is_owned, ownership_of
from hpcsched.errors import RequestError

KINDS = {"ed25519": ["ed25519"], "EC": ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"], "RSA": ["rsa:2048"]}


def made(base: Path, name: str, kind: list[str]) -> tuple[bytes, bytes]:
    """Return a certificate and its key."""
    words = [
        "req",
        "-x509",
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-keyout",
        f"{base}/{name}.key",
        "-out",
        f"{base}/{name}.crt",
    ]
    subprocess.run(["openssl", *words, "-newkey", *kind], check=True, capture_output=True)
    return (base / f"{name}.crt").read_bytes(), (base / f"{name}.key").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a2_only_the_key_of_the_certificate_says_whose_it_is(tmp_path: Path, kind: str) -> None:
    certificate, key = made(tmp_path, "mine", KINDS[kind])
    other, _ = made(tmp_path, "other", KINDS[kind])
    signature = ownership_of(certificate, key, "ann")
    assert is_owned(certificate, "ann", signature)
    assert not is_owned(certificate, "bob", signature)
    assert not is_owned(other, "ann", signature)
    assert not is_owned(certificate, "ann", signature[:-2])
    assert not is_owned(certificate, "ann", "")
    with pytest.raises(RequestError, match="cannot read the certificate and its key"):
        ownership_of(certificate, certificate, "ann")


def test_a2_a_key_that_cannot_sign_is_refused(tmp_path: Path) -> None:
    certificate, _ = made(tmp_path, "mine", KINDS["RSA"])
    subprocess.run(["openssl", "genpkey", "-algorithm", "x25519", "-out", f"{tmp_path}/x.key"], check=True)
    with pytest.raises(RequestError, match="must be Ed25519, EC or RSA"):
        ownership_of(certificate, (tmp_path / "x.key").read_bytes(), "ann")
