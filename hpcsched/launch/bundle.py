"""Build hpcnode.pyz, all code that runs on a node, and the command line that installs it.

The same sources give the same bytes, so the hash tells whether a node already has it.
`bootstrap.py` runs on the node. It is sent in the command line, packed so that no shell interprets
any part of it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shlex
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

# Marks the dialogue of bootstrap.py.
MARK = b"\x02hpcnode\x03 "

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can store
_MAIN = b"import sys\n\nfrom hpcnode.__main__ import main\n\nsys.exit(main())\n"
# -E -s: ignore PYTHON* variables and the user's packages. -S: ignore a site's start-up files.
_FLAGS = ("-E", "-s", "-S")
# -c puts the current directory first. -I would omit it, but Python 2 rejects -I and could not
# report its version.
_NO_CURRENT_DIRECTORY = "import sys;sys.path[:]=[p for p in sys.path if p]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The bytes of hpcnode.pyz and their hash (hex)."""

    data: bytes
    sha256: str


def build_bundle(sources: Mapping[str, bytes] | None = None) -> Bundle:
    """Return hpcnode.pyz, built from `sources`, or from the installed package hpcnode.

    `sources` maps a path in the zip to its bytes.
    """
    sources = dict(_sources(files("hpcnode"), "hpcnode")) if sources is None else sources
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as pyz:
        for name, data in sorted({"__main__.py": _MAIN, **sources}.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, regardless of the building system
            entry.external_attr = 0o644 << 16
            pyz.writestr(entry, data, compresslevel=9)
    data = buffer.getvalue()
    return Bundle(data=data, sha256=hashlib.sha256(data).hexdigest())


def bootstrap_argv(python: str) -> list[str]:
    """Return the argument vector that runs bootstrap.py under `python`."""
    source = files("hpcsched.launch").joinpath("bootstrap.py").read_bytes().split(b'"""', 2)[2]  # without its docstring
    packed = base64.b64encode(zlib.compress(source, 9)).decode("ascii")
    run = f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'
    return [python, *_FLAGS, "-c", f"{_NO_CURRENT_DIRECTORY};{run}"]


def bootstrap_command(python: str) -> str:
    """Return the same as one line for any login shell: sh, bash, dash, zsh, fish, csh."""
    return "exec " + shlex.join(bootstrap_argv(python))


def authorized_line(public_key: str, python: str, source: str = "", principal: str = "") -> str:
    """Return the line for authorized_keys by which `public_key` starts only bootstrap.py.

    `source` limits where logins may come from, as ``from`` of sshd(8). What the client asks to run is ignored. With
    `principal`, keys are let in that have a certificate of `public_key` for it.
    """
    options = ["restrict", f"command={_quoted(bootstrap_command(python))}"]
    if principal:
        options.insert(0, f"cert-authority,principals={_quoted(principal)}")
    if source:
        options.insert(-1, f"from={_quoted(source)}")
    return f"{','.join(options)} {public_key}"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'  # sshd(8): nothing else is special there


def _sources(directory: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for item in directory.iterdir():
        name = f"{prefix}/{item.name}"
        if item.is_dir() and item.name != "__pycache__":
            yield from _sources(item, name)
        elif item.name.endswith(".py"):
            yield name, item.read_bytes()
