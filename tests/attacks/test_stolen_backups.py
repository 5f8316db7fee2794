"""An encrypted backup tells a thief nothing, and an altered or truncated one changes nothing."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcsched.cli.admin import backup
from hpcsched.cli.admin.backup import opened
from hpcsched.errors import ConfigError
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


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def _encrypted(folder: Path, archive: bytes) -> tuple[Path, Path]:
    """Return a private key, and a file with this archive that is encrypted for it: everybody could make it."""
    identity = pyrage.x25519.Identity.generate()
    key, file = folder / "key", folder / "backup.tar.age"
    key.write_text(str(identity))
    key.chmod(0o600)
    file.write_bytes(pyrage.encrypt(archive, [identity.to_public()]))
    return file, key


def _sparse() -> bytes:
    """Return an archive of some kilobytes with a file of a terabyte of zeros."""
    member = _member("hpcsched.db", tarfile.GNUTYPE_SPARSE)
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = tarfile.itn(1 << 40, 12, tarfile.GNU_FORMAT)  # its size with the zeros
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(tarfile.RECORDSIZE)


def _compressed() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = _member("hpcsched.db")
        member.size = 8 << 20
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    return gzip.compress(content.getvalue())


def _many() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for number in range(4):
            archive.addfile(_member(f"file{number}"))
    return content.getvalue()


@pytest.mark.parametrize("archive", [_sparse, _compressed, _many])
def test_b7_an_archive_is_no_larger_than_its_file(
    archive: Callable[[], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "MOST_MEMBERS", 3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, key = _encrypted(tmp_path, archive())
    with pytest.raises(ConfigError, match="cannot open"), opened(file, key):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"key", "backup.tar.age"}


@pytest.mark.parametrize(
    "members",
    [
        [_member("../outside")],
        [_member("/tmp/outside")],
        [_member("a", tarfile.SYMTYPE, "/etc"), _member("a/outside")],
        [_member("a", tarfile.LNKTYPE, "/etc/passwd")],
        [_member("a", tarfile.FIFOTYPE)],
        [_member("a", tarfile.CHRTYPE)],
        [_member("a"), _member("a")],
    ],
)
def test_b7_an_archive_for_our_key_writes_nothing_elsewhere(members: list[tarfile.TarInfo], tmp_path: Path) -> None:
    """Everybody who has the public key can make one."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO())
    file, key = _encrypted(tmp_path, content.getvalue())
    with pytest.raises(ConfigError, match="cannot open"), opened(file, key):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"key", "backup.tar.age"}
