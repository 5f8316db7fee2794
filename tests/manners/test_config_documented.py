"""Every key of the configuration is in etc/hpcsched.toml and in its man page, with its meaning and its default."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import hpcsched
from hpcsched.cli.admin import COMMANDS, hpcsched_command
from hpcsched.cli.admin.init import init
from hpcsched.cli.admin.node import node
from hpcsched.cli.hhealth import COMMAND as HHEALTH
from hpcsched.config.accounts import ACCOUNT, ALL_PARTITION, ALL_SECTIONS, QOS, USER
from hpcsched.config.keys import ALERT_RULE, CIRCUIT, NODE, RECEIVER, REQUIRED, SWITCH, Key
from hpcsched.config.load import default_config

REPOSITORY = Path(hpcsched.__file__).parent.parent
SECTIONS_IN_PAGE = {f"[{name}]": keys for name, keys in ALL_SECTIONS.items()} | {
    "[partitions.NAME]": ALL_PARTITION,
    "[accounts.NAME]": ACCOUNT,
    "[users.NAME]": USER,
    "[qos.NAME]": QOS,
    "[topology.switches.NAME]": SWITCH,
    "[alerts.receivers.NAME]": RECEIVER,
    "[alerts.rules.NAME]": ALERT_RULE,
    "[power.circuits.NAME]": CIRCUIT,
    "NODES.D/NAME.TOML": NODE,
}


def page(name: str) -> str:
    """Return a man page's text as a reader sees it, near enough: no escapes, one line a paragraph's line."""
    text = (REPOSITORY / "man" / name).read_text()
    return text.replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^\.S[HS] (.*)\n", text, flags=re.MULTILINE)
    return {title.strip('"'): body for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_sample_is_what_init_writes() -> None:
    assert (REPOSITORY / "etc" / "hpcsched.toml").read_text() == default_config(), (
        "write it anew: python -c 'from hpcsched.config.load import default_config as d; print(d(), end=\"\")'"
    )


@pytest.mark.parametrize(
    ("section", "key"),
    [pytest.param(name, key, id=f"{name} {key.name}") for name, keys in SECTIONS_IN_PAGE.items() for key in keys],
)
def test_the_man_page_has_the_key(section: str, key: Key) -> None:
    body = sections(page("hpcsched.toml.5"))[section]
    found = re.search(rf"^\.TP\n\.B {re.escape(key.name)}\n(.*?)(?=^\.|\Z)", body, re.MULTILINE | re.DOTALL)
    assert found is not None, f"hpcsched.toml(5) has no {key.name} below {section}"
    text = " ".join(found.group(1).split())
    assert " ".join(key.help.split()) in text
    if key.default is REQUIRED:
        assert text.endswith("Required.")
    elif "Default: " not in key.help and key.name != "host_key":
        assert text.endswith(f"Default: {key.default_text}.")


def test_the_man_page_has_no_other_keys() -> None:
    for section, keys in SECTIONS_IN_PAGE.items():
        found = re.findall(r"^\.TP\n\.B (\w+)$", sections(page("hpcsched.toml.5"))[section], re.MULTILINE)
        assert found == [key.name for key in keys], section


def options_of(command: click.Command) -> set[str]:
    return {name for option in command.params if isinstance(option, click.Option) for name in option.opts}


def options_in(body: str) -> set[str]:
    heads = re.findall(r"^\.TP\n\.(?:B|BI|BR) (.*)$", body, re.MULTILINE)
    return {word.strip('",') for head in heads for word in head.split() if word.strip('",').startswith("-")}


@pytest.mark.parametrize(
    ("title", "command"),
    [("init", init), *((f"node {name}", command) for name, command in node.commands.items())],
)
def test_hpcsched_8_has_the_options_of(title: str, command: click.Command) -> None:
    assert options_in(sections(page("hpcsched.8"))[title]) == options_of(command)


def test_hpcsched_8_has_every_command() -> None:
    titles = sections(page("hpcsched.8"))
    for name in [*COMMANDS, *hpcsched_command.commands]:
        assert name in titles or any(title.startswith(f"{name} ") for title in titles), name


def test_hhealth_8_has_the_options() -> None:
    wanted = {f"--{option.name}" for option in HHEALTH.options}
    wanted |= {f"-{option.short}" for option in HHEALTH.options if option.short}
    assert options_in(sections(page("hhealth.8"))["OPTIONS"]) == wanted


def test_the_cron_file_has_a_user_and_known_options() -> None:
    lines = (REPOSITORY / "etc" / "cron.d" / "hpcsched").read_text().splitlines()
    (entry,) = [line for line in lines if re.match(r"[*0-9]", line)]
    fields = entry.split(None, 6)
    assert fields[5] == "root"
    words = re.findall(r"--(\w+)", entry)
    assert set(words) <= {option.name for option in HHEALTH.options}
