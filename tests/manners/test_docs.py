"""Links, anchors, named files and commands in README, CONTRIBUTING and docs/ exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = {*PROJECT["scripts"], "hrun"}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
README_MAX_LINES = 60
PROSE_MAX_COLUMNS = 100

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_OUR_FOLDERS = ("docs", "etc", "hpcsched", "man", "systemd", "tests", "workers")
# A word that looks like a command of ours, at the start of a line or of inline code.
_CALL = re.compile(
    r"^(?:[$#] )?(h(?:acct|alloc|cancel|ctl|health|info|logs|mon|pcsched\w*|prio|queue|run|sh|share|sim|sub|tunnel|why)\w*)\b"
)


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return _FENCE.sub("", page.read_text())


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the page's blocks in these languages."""
    return [text for language, text in _FENCE.findall(page.read_text()) if language in languages]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def make_targets(text: str) -> set[str]:
    """Return the targets of the make commands in a text."""
    return set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = [word.rstrip("/") for word in _CODE.findall(prose(page)) if re.fullmatch(r"[\w.*/-]+", word)]
    ours = [word for word in named if word.split("/")[0] in _OUR_FOLDERS and "/" in word]
    assert [word for word in ours if not any(ROOT.glob(word))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_make_targets_that_are_named_exist(page: Path) -> None:
    lines = [line for text in blocks(page, "console", "sh", "bash", "cron") for line in text.splitlines()]
    called = {match[1] for line in [*lines, *_CODE.findall(prose(page))] if (match := _CALL.match(line))}
    assert called - COMMANDS == set()
    assert make_targets(prose(page)) | make_targets("\n".join(lines)) <= TARGETS


def test_options_that_are_named_are_in_the_man_page_of_their_command() -> None:
    unknown = []
    for page in PAGES:
        shown = [line[2:] for text in blocks(page, "console") for line in text.splitlines() if line[:2] in ("$ ", "# ")]
        for code in [*_CODE.findall(prose(page)), *shown]:
            words = re.split(r" --wrap| \| ", code)[0].split() or [""]
            if words[0] not in COMMANDS:
                continue
            found = [path for section in (1, 8) if (path := ROOT / "man" / f"{words[0]}.{section}").exists()]
            text = "".join(path.read_text() for path in found).replace("\\-", "-")
            options = [re.split(r"[=|]", word)[0] for word in words[1:] if re.match(r"--\w", word)]
            unknown += [(page.name, code, option) for option in options if option not in text]
    assert unknown == []


def test_each_man_page_is_in_the_reference_and_each_page_in_the_navigation() -> None:
    reference = (ROOT / "docs/reference.md").read_text()
    assert [path.name for path in (ROOT / "man").glob("*.[1-8]") if f"(../man/{path.name})" not in reference] == []
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    adrs = (ROOT / "docs/internals.md").read_text()
    assert [path.name for path in (ROOT / "man/adr").glob("*.md") if f"(../man/adr/{path.name})" not in adrs] == []


def test_the_readme_fits_one_screen_and_prose_is_wrapped() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_MAX_LINES
    long = [
        (page.name, line)
        for page in PAGES
        for line in prose(page).splitlines()
        if len(line) > PROSE_MAX_COLUMNS and not line.startswith("|")
    ]
    assert long == []


def test_the_changes_of_a_release_fit_one_screen() -> None:
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert [text.split("\n")[0] for text in releases if len(text.splitlines()) > README_MAX_LINES] == []


def test_pages_of_the_site_load_nothing_from_other_hosts() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "//" not in re.sub(r"^\s*#.*$", "", settings, flags=re.MULTILINE)
    picture = (ROOT / "docs/demo.svg").read_text()
    assert set(re.findall(r"https?://[^\"'\s)]+", picture)) <= {"http://www.w3.org/2000/svg"}
