"""An encrypted backup tells a thief nothing, and an altered or truncated one changes nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.loopback.cluster import LocalCluster

pyrage = pytest.importorskip("pyrage", reason="NOT TESTED: pip install 'hpcsched[backup]'")
CANARY = "canary-in-a-script-8812"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), names=("n1",)) as started:
            yield started


def test_f1_an_encrypted_backup_is_opened_by_its_key_alone(cluster: LocalCluster) -> None:
    backups, key = cluster.base / "backups", cluster.base / "age.key"
    backups.mkdir()
    identity = pyrage.x25519.Identity.generate()
    key.write_text(f"# private\n{identity}\n")
    key.chmod(0o600)
    job_id = cluster.run("hsub", "--parsable", "--hold", stdin=f"#!/bin/sh\n: {CANARY}\n").stdout.strip()
    refused = cluster.run("hctl", "backup", str(backups), "encrypt=age1nonsense", check=False)
    assert "is not a public key" in refused.stderr
    assert "encrypted" in cluster.run("hctl", "backup", str(backups), f"encrypt={identity.to_public()}").stdout
    (made,) = backups.iterdir()
    content = made.read_bytes()
    assert made.stat().st_mode & 0o777 == 0o600
    assert b"age-encryption.org/v1" in content[:40]
    launch_key = (cluster.config_dir / "hpcsched.toml").read_bytes()[:60]
    assert CANARY.encode() not in content
    assert launch_key not in content
    assert not list((cluster.base / "etc").rglob(".backup-*")), "no plain text is left"
    cluster.down()
    damages = {"truncated": content[:-20_000], "altered": content[:9000] + bytes([content[9000] ^ 1]) + content[9001:]}
    for what, damaged in damages.items():
        bad = cluster.base / f"{what}-20260102T030405.tar.age"
        bad.write_bytes(damaged)
        refused = cluster.run("hpcsched", "restore", "--force", "--identity", str(key), str(bad), check=False)
        assert "altered or truncated" in refused.stderr, (what, refused)
    refused = cluster.run("hpcsched", "restore", "--force", str(backups), check=False)
    assert "--identity FILE" in refused.stderr
    other = cluster.base / "other.key"
    other.write_text(str(pyrage.x25519.Identity.generate()))
    other.chmod(0o600)
    refused = cluster.run("hpcsched", "restore", "--force", "--identity", str(other), str(backups), check=False)
    assert "another key" in refused.stderr
    key.chmod(0o644)
    refused = cluster.run("hpcsched", "restore", "--force", "--identity", str(key), str(backups), check=False)
    assert "other accounts can read it" in refused.stderr
    key.chmod(0o600)
    assert (cluster.config_dir / "hpcsched.toml").exists(), "nothing was changed so far"
    cluster.run("hpcsched", "restore", "--force", "--identity", str(key), str(backups))
    cluster.up()
    assert cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]["state"] == "PENDING"
