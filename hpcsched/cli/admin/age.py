"""Encrypt a backup as one file of the age format, and open it again; knows no clusters.

A file is encrypted for recipients: age public keys (age1...), or ssh-ed25519 and ssh-rsa public keys. Only their private keys
open it, so the head itself needs no secret to make it. It is authenticated: an altered or truncated file is refused as a whole.
Files are streamed, so their size does not matter.

Source: age-encryption.org/v1; the library is pyrage, extra `backup`.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from hpcsched.errors import ConfigError, RequestError

SUFFIX = ".tar.age"
MOST_KEY_BYTES = 1 << 20


def _pyrage() -> Any:
    try:
        import pyrage
    except ImportError:
        raise ConfigError(
            "cannot encrypt or open a backup: pyrage is missing: pip install 'hpcsched[backup]'"
        ) from None
    return pyrage


def recipients_of(words: tuple[str, ...]) -> list[Any]:
    """Return the recipients; a word is a public key or a file with one in each line.

    Raises RequestError.
    """
    pyrage, found = _pyrage(), []
    for word in words:
        lines = [word] if word.startswith(("age1", "ssh-")) else _lines_of(Path(word))
        for line in lines:
            try:
                found.append((pyrage.ssh if line.startswith("ssh-") else pyrage.x25519).Recipient.from_str(line))
            except pyrage.RecipientError:
                raise RequestError(
                    f"cannot encrypt for {line[:80]!r}: it is not a public key of age (age1...) or SSH (ssh-ed25519 ...)"
                ) from None
    if words and not found:
        raise RequestError(f"cannot encrypt a backup: there is no public key in {', '.join(words)}")
    return found


def _lines_of(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_KEY_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the key {path}: {error}") from None
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def encrypt_folder(folder: Path, target: Path, recipients: list[Any]) -> None:
    """Write the files of `folder` encrypted to `target`, which only its owner can read.

    Raises: OSError.
    """
    plain = folder.with_name(folder.name + ".tar")
    try:
        with (
            open(os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w") as archive,
        ):
            archive.add(folder, arcname=".")
        with (
            open(plain, "rb") as source,
            open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as sealed,
        ):
            _pyrage().encrypt_io(source, sealed, recipients)
            sealed.flush()
            os.fsync(sealed.fileno())
    finally:
        plain.unlink(missing_ok=True)


@contextmanager
def opened(file: Path, identity: Path | None) -> Iterator[Path]:
    """Yield a private directory with the files of an encrypted backup.

    Raises ConfigError: the private key is missing, readable by others or another one, or the file was altered or truncated.
    """
    pyrage = _pyrage()
    if identity is None:
        raise ConfigError(
            f"cannot open {file}: it is encrypted; name the file of your private key (age or SSH): --identity FILE"
        )
    identities = _identities_of(identity)
    with TemporaryDirectory(prefix="hpcsched-restore-") as directory:
        plain, folder = Path(directory) / "backup.tar", Path(directory) / "backup"
        try:
            with open(file, "rb") as source, open(plain, "wb") as target:
                pyrage.decrypt_io(source, target, identities)
            with tarfile.open(plain) as archive:
                _extract(archive, folder)
        except (OSError, tarfile.TarError, pyrage.DecryptError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise ConfigError(f"cannot open {file}: {error.strerror}") from None
            raise ConfigError(
                f"cannot open {file}: it was encrypted for another key than {identity}, or was altered or truncated"
            ) from None
        plain.unlink()
        yield folder


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the directories and files of an archive below `folder`.

    Everybody who has the public key can make an archive, so nothing else in it is accepted. (The filter of `extractall` is
    missing in Python 3.11.0 to 3.11.3.)

    Raises: TarError for another kind of member or a name that leaves `folder`, OSError.
    """
    for member in archive:
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is not a file or directory of a backup")
        path = folder / name
        (path if member.isdir() else path.parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        if (content := archive.extractfile(member)) is not None:
            mode = member.mode & 0o755 | 0o600
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
                shutil.copyfileobj(content, file)


def _identities_of(path: Path) -> list[Any]:
    pyrage = _pyrage()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"cannot use the private key {path}: other accounts can read it; run: chmod 600 {path}")
        content = path.read_bytes()[:MOST_KEY_BYTES]
        if content.startswith(b"-----BEGIN"):
            return [pyrage.ssh.Identity.from_buffer(content)]
        return [pyrage.x25519.Identity.from_str(line) for line in _lines_of(path)]
    except OSError as error:
        raise ConfigError(f"cannot read the private key {path}: {error.strerror}") from None
    except pyrage.IdentityError:
        raise ConfigError(
            f"cannot use the private key {path}: it is no private key of age or SSH, or has a passphrase"
        ) from None
