"""mkdocs hook: files outside docs/ become pages of the site, and the site loads nothing from other hosts.

A link from a page to `../PATH` works on a code host. Here PATH becomes a page: Markdown as it is, man pages as groff
prints them, anything else as text. mkdocs.yml names this file.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
MERMAID = "mermaid@11.12.0"
MERMAID_FILE = "assets/mermaid.min.js"
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)


def page_path(path: str) -> str:
    """Return the page's source path for a file of the repository, as `man/hsub.1`."""
    return "files/" + (path if path.endswith(".md") else path + ".md")


def targets(text: str, folder: str) -> list[str]:
    """Return the repository paths that the links of a text in `folder` lead to."""
    found = [posixpath.normpath(posixpath.join(folder, link)) for link, _ in _LINK.findall(text) if "://" not in link]
    return [path for path in found if (ROOT / path).is_file()]


def body(path: str) -> str:
    """Return the Markdown of a file's page."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    if re.fullmatch(r"man/.*\.[1-9]", path):
        if shutil.which("groff"):
            command = ["groff", "-man", "-Tutf8", "-P-cbou", "-rLL=92n", str(ROOT / path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        name, _, section = Path(path).name.rpartition(".")
        return f"# {name}({section})\n\n```text\n{text.strip()}\n```\n"
    return f"# {path}\n\n```text\n{text}```\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Serve Mermaid from the site itself, if npm can fetch it; else browsers load it from unpkg.com."""
    cached = ROOT / ".venv-docs" / (MERMAID.replace("@", "-") + ".js")
    if not cached.exists() and cached.parent.is_dir() and shutil.which("npm"):
        packed = subprocess.run(
            ["npm", "pack", "--silent", MERMAID], cwd=cached.parent, capture_output=True, text=True, check=False
        )
        archive = cached.parent / packed.stdout.strip()
        if packed.returncode == 0 and archive.is_file():
            with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
                script = tar.extractfile("package/dist/mermaid.min.js")
                cached.write_bytes(script.read() if script else b"")
            archive.unlink()
    if cached.exists():
        config["extra_javascript"] = [MERMAID_FILE]
        config["extra"]["mermaid"] = str(cached)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a page links to, and for each that those link to."""
    pages = {file.src_uri for file in files}
    waiting = [path for uri in sorted(pages) if uri.endswith(".md") for path in targets(read(uri), "docs")]
    while waiting:
        path = waiting.pop()
        if path.startswith("docs/") or page_path(path) in pages:
            continue
        pages.add(page_path(path))
        files.append(File.generated(config, page_path(path), content=body(path)))
        if path.endswith(".md"):
            waiting += targets((ROOT / path).read_text(), posixpath.dirname(path))
    if script := config["extra"].get("mermaid"):
        files.append(File.generated(config, MERMAID_FILE, content=Path(script).read_bytes()))
    return files


def read(uri: str) -> str:
    """Return the text of a page below docs/."""
    return (ROOT / "docs" / uri).read_text()


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to files of the repository lead to their pages."""
    here = page.file.src_uri
    origin = posixpath.join("docs", here) if not here.startswith("files/") else here.removeprefix("files/")

    def rewritten(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
        if "://" in link or not (ROOT / path).is_file():
            return match[0]
        uri = path.removeprefix("docs/") if path.startswith("docs/") else page_path(path)
        return f"]({os.path.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in parts)
