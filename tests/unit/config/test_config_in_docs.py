"""The configuration that docs/ shows is accepted as a file of conf.d."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcsched.config.load import load_config, render_config

DOCS = Path(__file__).parents[3] / "docs"
SNIPPETS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, text in enumerate(re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_configuration_in_the_guides_is_accepted(snippet: str, tmp_path: Path) -> None:
    (tmp_path / "hpcsched.toml").write_text(render_config({"cluster": {"name": "lab"}}))
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/snippet.toml").write_text(snippet)
    tmp_path.chmod(0o755)
    load_config(tmp_path)


def test_the_guides_show_configuration() -> None:
    assert len(SNIPPETS) >= 2
