"""hpcnode.pyz: everything that runs on a node in one file, and the command line that brings it there.

The same sources give the same bytes, so its hash says whether a node has it already. What is done on the node is
`bootstrap.py`, which travels in the command line, packed so that no shell finds anything in it to interpret.
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

# The dialogue of bootstrap.py.
MARK = b"\x02hpcnode\x03 "

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip can hold
_MAIN = b"import sys\n\nfrom hpcnode.__main__ import main\n\nsys.exit(main())\n"
# -E -s: neither PYTHON* variables nor the user's packages; -S: nor a site's start-up files.
_FLAGS = ("-E", "-s", "-S")
# -c puts the current directory first; -I would leave it out, but Python 2 does not know -I, and must be able to say its version.
_NO_CURRENT_DIRECTORY = "import sys;sys.path[:]=[p for p in sys.path if p]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The bytes of hpcnode.pyz and their hash (hex)."""

    data: bytes
    sha256: str


def build_bundle(sources: Mapping[str, bytes] | None = None) -> Bundle:
    """Return hpcnode.pyz, made of `sources` (path in the zip -> bytes) or of the installed package hpcnode."""
    sources = dict(_sources(files("hpcnode"), "hpcnode")) if sources is None else sources
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as pyz:
        for name, data in sorted({"__main__.py": _MAIN, **sources}.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            pyz.writestr(entry, data, compresslevel=9)
    data = buffer.getvalue()
    return Bundle(data=data, sha256=hashlib.sha256(data).hexdigest())


def bootstrap_argv(python: str) -> list[str]:
    """Return the argument vector that runs bootstrap.py under `python`."""
    source = files("hpcsched.launch").joinpath("bootstrap.py").read_bytes()
    packed = base64.b64encode(zlib.compress(source, 9)).decode("ascii")
    run = f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'
    return [python, *_FLAGS, "-c", f"{_NO_CURRENT_DIRECTORY};{run}"]


def bootstrap_command(python: str) -> str:
    """Return the same as one line for whatever shell the account has: sh, bash, dash, zsh, fish, csh."""
    return "exec " + shlex.join(bootstrap_argv(python))


def _sources(directory: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for item in directory.iterdir():
        name = f"{prefix}/{item.name}"
        if item.is_dir() and item.name != "__pycache__":
            yield from _sources(item, name)
        elif item.name.endswith(".py"):
            yield name, item.read_bytes()
