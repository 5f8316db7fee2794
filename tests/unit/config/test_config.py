"""hpcsched.toml and nodes.d: what is read from them, and what is said about what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcsched.config.keys import toml_value
from hpcsched.config.load import (
    Config,
    default_config,
    load_config,
    load_node,
    natural_order,
    render_config,
    render_node,
)
from hpcsched.errors import ConfigError
from hpcsched.metrics.usage_report import DIMENSIONS

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return what writes a configuration directory: the main file's text, and nodes by name."""

    def make(main: str = "", /, **nodes: str) -> Path:
        (tmp_path / "nodes.d").mkdir(exist_ok=True)
        (tmp_path / "hpcsched.toml").write_text(main)
        for name, text in nodes.items():
            (tmp_path / "nodes.d" / f"{name}.toml").write_text(text)
        tmp_path.chmod(0o755)
        return tmp_path

    return make


def node(**keys: Any) -> str:
    given = {"host": "h.example", "host_key": HOST_KEY, "cpus": 4, "memory": "8G"} | keys
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in given.items() if value is not None)


def load(path: Path) -> Config:
    return load_config(path, environ={"HOME": "/home/u"})


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value)


def test_an_empty_file_means_the_defaults(write: Write) -> None:
    config = load(write())
    assert config.name == "cluster"
    assert config.controller.heartbeat_s == 15
    assert config.controller.node_down_after_s == 40
    assert config.controller.lease_s == 120
    assert config.controller.kill_wait_s == 30
    assert config.controller.requeue is True
    assert config.scheduler.policy == "easy"
    assert config.scheduler.default_time_limit is None
    assert config.scheduler.weights.age == 1000
    assert [(p.name, p.default, p.nodes) for p in config.partitions] == [("main", True, ())]
    assert config.nodes == ()


def test_values_come_in_their_units(write: Write) -> None:
    path = write(
        """
        [cluster]
        name = "home"
        share = "/srv/share"
        [controller]
        state_dir = "state"
        heartbeat_s = 0.5
        node_down_after_s = 2
        [roles]
        admins = ["ada", "grace"]
        [scheduler]
        default_time_limit = "1-12"
        weights.age = 7
        [partitions.gpu]
        nodes = "n[2,10]"
        max_time = "2:00:00"
        default_mem_per_cpu = "2G"
        max_nodes = 3
        [partitions.all]
        default = true
        """,
        n10=node(gpus=["a100:2", "h200"], features=["fast"], memory=2000, user="me", port=2222),
        n2=node(),
    )
    config = load(path)
    assert config.controller.state_dir == path / "state"
    assert config.controller.run_dir == path / "state" / "run"
    assert config.api_socket == path / "state" / "run" / "api.sock"
    assert config.access.admins == ("ada", "grace")
    assert config.scheduler.default_time_limit == 36 * 3600
    assert config.scheduler.weights.age == 7
    gpu, everything = config.partitions
    assert gpu.nodes == ("n2", "n10")
    assert (gpu.max_time_s, gpu.default_mem_per_cpu_mib, gpu.max_nodes) == (7200, 2048, 3)
    assert everything.nodes == ("n2", "n10")  # 2 before 10
    small, big = config.nodes
    assert (small.mem_mib, small.port, small.user, small.identity_file) == (8192, None, None, None)
    assert [(g.index, g.type) for g in big.gpus] == [(0, "a100"), (1, "a100"), (2, "h200")]
    assert (big.mem_mib, big.port, big.user, big.features) == (2000, 2222, "me", ("fast",))
    assert big.host_key == HOST_KEY


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[controler]\n",
            ["unknown table 'controler'", "did you mean controller", "cluster, controller, roles, privacy"],
        ),
        ("[controller]\nheartbeat = 1\n", ["[controller]", "'heartbeat'", "did you mean heartbeat_s", "kill_wait_s"]),
        ("[roles]\nadmin = ['x']\n", ["did you mean admins"]),
        ("[roles]\nadmins = 'x'\n", ["[roles] admins = 'x'", "a list of texts"]),
        ("[roles]\nadmins = ['-x']\n", ["admins = ['-x']", "user name"]),
        ("[controller]\nheartbeat_s = '15'\n", ["heartbeat_s = '15'", "wants seconds"]),
        ("[controller]\nheartbeat_s = nan\n", ["wants seconds"]),
        ("[controller]\nheartbeat_s = 30\n", ["node_down_after_s = 40 is less than twice heartbeat_s = 30"]),
        ("[controller]\nrequeue = 1\n", ["requeue = 1", "true or false"]),
        ("[controller]\nlog_level = 'loud'\n", ["debug, info, warning, error"]),
        ("controller = 3\n", ["[controller] is 3", "table"]),
        ("[cluster]\nname = 'a/b'\n", ["name = 'a/b'", "a word"]),
        ("[cluster]\nshare = 'srv'\n", ["an absolute path"]),
        ("[scheduler]\nweights.ages = 1\n", ["[scheduler.weights]", "'ages'", "did you mean age"]),
        ("[scheduler]\nweights.age = -1\n", ["from 0"]),
        ("[scheduler]\nweights.age = true\n", ["whole number"]),
        ("[scheduler]\ndefault_time_limit = 'soon'\n", ["cannot read time 'soon'"]),
        ("[scheduler]\ndefault_time_limit = 0\n", ["above zero"]),
        ("[partitions.a]\ndefault = true\n[partitions.b]\ndefault = true\n", ["more than one", "a, b"]),
        ("[partitions.a]\nnodes = 'm1'\n", ["[partitions.a]", "'m1'", "did you mean n1", "hpcsched node add"]),
        ("[partitions.a]\nnodes = 'n1,n1'\n", ["names a node twice"]),
        ("[partitions.a]\nnodes = 'n[0-999999999]'\n", ["cannot expand"]),
        ("[partitions.'a b']\n", ["not a partition name"]),
        ("[partitions.a]\nmax_time = 5\ndefault_time = 6\n", ["default_time above its max_time"]),
        ("[cost]\nkwh = 'cheap'\n", ["[cost] kwh = 'cheap'", "a number, or a table of windows"]),
        ("[cost]\nkwh = {default = 1, '25:00-26:00' = 2}\n", ["[cost] kwh", "25:00 is not a time of day"]),
        ("[cost]\nkwh = {default = 1, 'Sa 0:00-24:00' = 2, '22:00-6:00' = 3}\n", ["overlap"]),
        ("[power]\nbudget_watts = -1\n", ["[power] budget_watts = -1", "0 or more"]),
        ("[power.circuits.a]\nwatts = 100\n", ["[power.circuits.a]", "lacks the key 'nodes'"]),
        ("[power.circuits.a]\nwatts = 100\nnodes = 'n7'\n", ["[power.circuits.a] names the node 'n7'"]),
        ("[power.circuits.'a b']\nwatts = 100\nnodes = 'n1'\n", ["not a name of a circuit"]),
        ("[cluster\n", ["line 1"]),
    ],
)
def test_what_is_wrong_in_the_main_file_is_named(write: Write, text: str, words: list[str]) -> None:
    said = refusal(write(text, n1=node()))
    assert "hpcsched.toml" in said
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (node(cpu=3), ["unknown key 'cpu'", "did you mean cpus"]),
        (node(cpus=None), ["lacks the key 'cpus'"]),
        (node(cpus=0), ["cpus = 0", "from 1"]),
        (node(memory="lots"), ["cannot read memory size"]),
        (node(host="-oProxyCommand=x"), ["host name"]),
        (node(host="a b"), ["host name"]),
        (node(host="dead:"), ["host name"]),
        (node(host="fe80::%"), ["host name"]),
        (node(user="-l"), ["user name"]),
        (node(python="python3; reboot"), ["Python 3.9"]),
        (node(port=70000), ["65535"]),
        (node(root="relative"), ["absolute path"]),
        (node(gpus=["a100:900"]), ["at most 256"]),
        (node(gpus=["a100:x"]), ["GPU types"]),
        (node(host_key=""), ["not an SSH host key", "hpcsched node add"]),
        (node(host_key="ssh-dss AAAA"), ["not an SSH host key"]),
        (node(host_key="ssh-ed25519 AAA"), ["damaged"]),
        (node(host_key=HOST_KEY.replace("ed25519", "rsa", 1).replace("ssh-rsa", "ssh-rsa")), ["holds another"]),
        (node(identity_file="a\nb"), ["one line"]),
    ],
)
def test_what_is_wrong_in_a_node_file_is_named(write: Write, text: str, words: list[str]) -> None:
    said = refusal(write("", n1=text))
    assert "n1.toml" in said
    for word in words:
        assert word in said


def test_circuits_begin_with_that_of_all_nodes(write: Write) -> None:
    text = "[power]\nbudget_watts = 900\n[power.circuits.rack1]\nwatts = 400\nnodes = 'n1'\n"
    path = write(text, n1=node(idle_watts=100, peak_watts=300, gpu_watts=250), n2=node(idle_watts=100))
    config = load(path)
    assert [(one.name, one.budget_watts, one.nodes) for one in config.circuits] == [
        ("", 900, ()), ("rack1", 400, ("n1",))
    ]  # fmt: skip
    assert config.nodes[0].gpu_watts == 250
    (path / "hpcsched.toml").write_text(text.replace("900", "200"))
    assert "[power] allows 200 W, and its nodes take 200 W when they are idle" in refusal(path)


def test_a_node_file_is_named_as_a_node(write: Write) -> None:
    path = write("")
    (path / "nodes.d" / "a.b.toml").write_text(node())
    assert "'a.b' is not a node name" in refusal(path)


@pytest.mark.parametrize("host", ["::1", "2001:db8::7", "fe80::1%eth0", "192.0.2.7", "n1.lab", "my_alias"])
def test_a_host_is_a_name_or_an_address_of_either_kind(write: Write, host: str) -> None:
    assert [spec.host for spec in load(write("", n1=node(host=host))).nodes] == [host]


def test_a_node_can_join_partitions_by_itself(write: Write) -> None:
    text = "[partitions.a]\nnodes = 'n2'\n[partitions.b]\nnodes = []\n"
    config = load(write(text, n1=node(partitions=["a", "b"]), n2=node(partitions=["a"])))
    assert [(p.name, p.nodes) for p in config.partitions] == [("a", ("n2", "n1")), ("b", ("n1",))]
    assert "n1.toml: there is no partition 'aa' (did you mean a?); there are a, b" in refusal(
        write(text, n1=node(partitions=["aa"]), n2=node())
    )


def test_the_head_itself_needs_no_host_key(write: Write) -> None:
    assert load(write("", n1=node(host="local", host_key=None))).nodes[0].host_key == ""


def test_no_file_says_how_to_make_one(tmp_path: Path) -> None:
    assert "hpcsched init" in refusal(tmp_path)


@pytest.mark.parametrize("what", ["hpcsched.toml", "nodes.d", "nodes.d/n1.toml", "."])
def test_what_everybody_may_write_is_not_believed(write: Write, what: str) -> None:
    path = write("", n1=node())
    (path / what).chmod(0o777)
    said = refusal(path)
    assert "everybody may write it" in said
    assert "chmod o-w" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_file_of_another_user_is_not_believed(write: Write) -> None:
    path = write()
    os.chown(path / "hpcsched.toml", 12345, -1)
    assert "belongs to uid 12345" in refusal(path)


def test_f6_a_link_into_a_directory_that_everybody_may_write_is_not_believed(write: Write, tmp_path: Path) -> None:
    path = write()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (path / "hpcsched.toml").rename(elsewhere / "real.toml")
    (path / "hpcsched.toml").symlink_to(elsewhere / "real.toml")
    load_config(path)
    elsewhere.chmod(0o1777)
    assert f"cannot trust {elsewhere}: everybody may write it" in refusal(path)


def test_a_fifo_does_not_hold_us_up(write: Write) -> None:
    path = write()
    (path / "hpcsched.toml").unlink()
    os.mkfifo(path / "hpcsched.toml")
    assert "not a regular file" in refusal(path)


def test_bytes_that_are_no_text_are_refused(write: Write) -> None:
    path = write()
    (path / "hpcsched.toml").write_bytes(b"# \xff\n")
    assert "not UTF-8 (byte 2)" in refusal(path)


def test_the_template_is_the_defaults(write: Write) -> None:
    plain = load(write(""))
    assert load(write(default_config())) == plain


def test_what_the_template_shows_as_default_is_the_default(write: Write) -> None:
    """Take the comment signs away: nothing changes but paths that are only examples."""
    shown = "".join(
        line.removeprefix("#") if line.startswith("#") and not line.startswith("# ") and line != "#\n" else line
        for line in default_config().splitlines(keepends=True)
        if not line.startswith(("#state_dir", "#run_dir", "#certificate", "#key"))
    )
    assert "\nheartbeat_s = 15\n" in shown
    assert load(write(shown)) == load(write(""))


def test_chosen_values_come_back(write: Write) -> None:
    text = render_config({"cluster": {"name": "x", "share": '/a "b"\\c'}, "controller": {"run_dir": "/r"}})
    config = load(write(text))
    assert (config.name, config.share, config.controller.run_dir) == ("x", '/a "b"\\c', Path("/r"))
    chosen = {"host": "h", "host_key": HOST_KEY, "cpus": 3, "memory": "5M", "gpus": ["t4"], "weight": 9}
    path = write("", n1=render_node("n1", chosen))
    spec = load_node(path / "nodes.d" / "n1.toml").spec
    assert (spec.host, spec.cpus, spec.mem_mib, spec.gpus[0].type, spec.weight) == ("h", 3, 5, "t4", 9)


def test_sections_with_names_of_their_own_are_written(write: Write) -> None:
    chosen = {
        "partitions.main": {"nodes": "all", "default": True},
        "partitions.night": {"nodes": "all", "max_time": "1:00:00"},
        "accounts.physics": {"shares": 10, "users": ["anna"]},
        "qos.normal": {},
        "qos.high": {"priority": 100},
        "licenses": {"matlab": 4},
    }
    config = load(write(render_config(chosen)))
    assert [partition.name for partition in config.partitions] == ["main", "night"]
    assert config.partitions[1].max_time_s == 3600
    assert config.accounting == load(write(_text_of(chosen))).accounting


def _text_of(chosen: Mapping[str, Mapping[str, object]]) -> str:
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())
        for name, values in chosen.items()
    )


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"partition.night": {}}, r"\[partition.night\]: the sections are cluster, .*partitions.NAME"),
        ({"partitions.night": {"node": "all"}}, r"'node' in section \[partitions.night\]"),
        ({"cluster": {"nam": "x"}}, r"'nam' in section \[cluster\]"),
        ({"partitions": {"main": {}}}, r"\[partitions\]"),
    ],
)
def test_a_section_or_key_that_would_be_dropped_is_refused(chosen: dict[str, dict[str, object]], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        render_config(chosen)


def test_numbers_in_names_count_as_numbers() -> None:
    assert sorted(["n10", "n2", "gpu1", "n1", "n"], key=natural_order) == ["gpu1", "n", "n1", "n2", "n10"]


def test_times_of_the_configuration_may_have_units(tmp_path: Path) -> None:
    text = '[controller]\nrequeue_delay_s = "2m"\n[scheduler]\ndefault_time_limit = "4h"\n'
    text += '[partitions.main]\ndefault = true\nmax_time = "1d12h"\n'
    (tmp_path / "hpcsched.toml").write_text(text)
    config = load_config(tmp_path)
    assert config.controller.requeue_delay_s == 120
    assert config.scheduler.default_time_limit == 4 * 3600
    assert config.partitions[0].max_time_s == 36 * 3600


def test_rules_of_alerts_are_changed_by_name(write: Write) -> None:
    text = """
[alerts.rules.ClockOff]
for = "10m"
limit = "90s"
severity = "critical"
[alerts.rules.NodeSlow]
enabled = false
[alerts.rules.HeadDiskFull]
limit = "2G"
"""
    clock, slow, disk = load(write(text)).alerts.rules
    assert (clock.name, clock.for_s, clock.limit, clock.severity) == ("ClockOff", 600.0, 90.0, "critical")
    assert clock.changed == ["for", "severity", "limit"]
    assert (slow.enabled, slow.changed, disk.limit) == (False, ["enabled"], 2048.0)
    assert load(write("[alerts.rules.NodeDown]\nfor = 0\n")).alerts.rules[0].for_s == 0.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[alerts.rules.NodeDwon]", "[alerts.rules] has the unknown rule 'NodeDwon'"),
        ("[alerts.rules.NodeDown]\nafter = 3", "[alerts.rules.NodeDown] has the unknown key 'after'"),
        ('[alerts.rules.NodeDown]\nfor = "soon"', "[alerts.rules.NodeDown] for = 'soon'"),
        ('[alerts.rules.NodeDown]\nseverity = "bad"', "severity = 'bad': wants one of info, warning, critical"),
        ("[alerts.rules.NodeDown]\nlimit = 3", "limit = 3: this rule has no limit"),
        ('[alerts.rules.ClockOff]\nlimit = "1s"', "limit = '1s': wants 2s to 1d"),
        ('[alerts.rules.FileSystemFull]\nlimit = "5%"', "limit = '5%': wants a number"),
        ("[alerts.rules.FileSystemFull]\nlimit = nan", "limit = nan: wants a number"),
        ("[alerts.rules]\nNodeDown = 3", "[alerts.rules.NodeDown] is 3, and should be a table"),
        ("[alerts]\nrules = 3", "[alerts.rules] is 3, and should be a table"),
    ],
)
def test_what_is_wrong_with_a_rule_of_alerts_is_said(write: Write, text: str, why: str) -> None:
    assert why in refusal(write(text))


def test_reports_by_mail_have_rows_that_hreport_knows_and_need_a_mail_server(write: Write) -> None:
    smtp = '[alerts]\nsmtp = "smtp://localhost"\n'
    made = load(write(smtp + '[reports]\nmail = ["head@lab.org"]\nby = ["node", "month"]\n')).reports
    assert (made.mail, made.by) == (("head@lab.org",), ("node", "month"))
    assert load(write(f"[reports]\nby = {toml_value(list(DIMENSIONS))}\n")).reports.by == DIMENSIONS
    assert "needs smtp of [alerts]" in refusal(write('[reports]\nmail = ["head@lab.org"]\n'))
    assert "wants a list of some of user" in refusal(write('[reports]\nby = ["weather"]\n'))
    assert "wants a list of some of user" in refusal(write("[reports]\nby = []\n"))
    assert "wants a mail address" in refusal(write(smtp + '[reports]\nmail = ["-oQ/tmp"]\n'))
