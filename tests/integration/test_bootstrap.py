"""bootstrap.py as it runs on a node, under several shells and Pythons."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

from hpcsched.launch.bundle import MARK, Bundle, bootstrap_argv, bootstrap_command, build_bundle

SOURCE = files("hpcsched.launch").joinpath("bootstrap.py").read_text(encoding="utf-8")
SAYS = b"import sys, os\n\ndef main():\n    os.write(1, (' '.join(sys.argv[1:]) + '|' + sys.stdin.read()).encode())\n"
NOBODY = 65534


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    """An hpcnode that prints its arguments and what is left on stdin."""
    return build_bundle({"hpcnode/__init__.py": b"", "hpcnode/__main__.py": SAYS})


def order(bundle: Bundle, root: Path | str, **changes: Any) -> bytes:
    given = {"sha256": bundle.sha256, "size": len(bundle.data), "root": str(root), "cluster": "c", "node": "n"}
    return json.dumps(given | changes).encode() + b"\n"


def run(argv: list[str], said: bytes, **options: Any) -> tuple[list[dict[str, Any]], bytes]:
    """Return the lines that the bootstrap said, and all that came after its last."""
    done = subprocess.run(argv, input=said, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False, **options)
    answers, rest = [], done.stdout
    while rest.startswith(b"\n" + MARK):
        line, _, rest = rest[1 + len(MARK) :].partition(b"\n")
        answers.append(json.loads(line))
    return answers, rest


def test_it_stores_the_bundle_and_becomes_it(bundle: Bundle, tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    argv = bootstrap_argv(sys.executable)
    answers, rest = run(argv, order(bundle, root) + bundle.data + b"what follows")
    assert answers[0] == {"need": True}
    assert answers[1] == {"ready": True, "root": str(root), "python": platform.python_version()}
    assert rest == f"attach --root {root} --cluster c --node n|what follows".encode()
    (pyz,) = root.iterdir()
    assert (pyz.name, pyz.read_bytes()) == (f"hpcnode-{bundle.sha256[:16]}.pyz", bundle.data)
    assert not stat.S_IMODE(root.stat().st_mode) & 0o066
    answers, rest = run(argv, order(bundle, root) + b"at once")
    assert [list(answer) for answer in answers] == [["ready", "root", "python"]]
    assert rest.endswith(b"|at once")


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "csh", "fish"])
def test_every_shell_runs_it(bundle: Bundle, tmp_path: Path, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell} here")
    said = order(bundle, tmp_path / "root") + bundle.data
    answers, _ = run([path, "-c", bootstrap_command(sys.executable)], said)
    assert answers[-1]["ready"] is True


def test_an_old_python_is_told_apart() -> None:
    code = f"import sys; sys.version_info = (3, 6, 9, 'final', 0); exec({SOURCE!r})"
    answers, rest = run([sys.executable, "-c", code], b"")
    assert answers == [{"error": f"cannot run the agent: {sys.executable} is Python 3.6.9, and it needs 3.9 or newer"}]
    assert rest == b""


def test_its_syntax_is_old() -> None:
    """No Python older than 3.9 is at hand; these are the newer things that would be syntax errors there."""
    import ast

    tree = ast.parse(SOURCE, feature_version=(3, 4))
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Match, ast.Nonlocal, ast.Starred)
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [f.name for f in functions if f.returns or f.args.kwonlyargs or any(a.annotation for a in f.args.args)]


def test_bytes_that_are_not_those_announced_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    spoilt = bundle.data[:-1] + bytes([bundle.data[-1] ^ 1])
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, tmp_path / "root") + spoilt)
    assert answers[1:] == [{"error": "cannot take hpcnode.pyz: what arrived is not what was announced"}]
    assert list((tmp_path / "root").iterdir()) == []


def test_a_connection_cut_in_the_middle_leaves_nothing(bundle: Bundle, tmp_path: Path) -> None:
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, tmp_path / "root") + bundle.data[:100])
    assert answers == [{"need": True}]
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_root_that_others_may_write_is_refused(bundle: Bundle, tmp_path: Path, mode: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, root))
    assert answers == [{"error": f"cannot use {root}: others may write {root} (mode {mode:o})"}]


def test_a_root_below_what_others_may_write_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, tmp_path / "root"))
    assert f"others may write {tmp_path} " in answers[0]["error"]
    tmp_path.chmod(0o1777)  # as /tmp: nobody else can take the root away
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, tmp_path / "root") + bundle.data)
    assert answers[-1]["ready"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users")
def test_f7_roots_agent_is_not_below_what_a_group_may_write(bundle: Bundle, tmp_path: Path) -> None:
    """One of the group could put another agent there, and root would run it."""
    os.chown(tmp_path, 0, NOBODY)
    tmp_path.chmod(0o775)
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, tmp_path / "root"))
    assert f"others may write {tmp_path} " in answers[0]["error"]


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users")
def test_a_root_of_another_user_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, NOBODY, NOBODY)
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, root))
    assert answers == [{"error": f"cannot use {root}: {root} belongs to uid {NOBODY}"}]


@pytest.fixture
def everybody_s_tmp() -> Iterator[Path]:
    path = Path("/tmp") / f"hpcsched-test-{os.getpid()}"
    path.mkdir(mode=0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_plain_user_s_root_is_in_their_home(bundle: Bundle, everybody_s_tmp: Path) -> None:
    home = everybody_s_tmp / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    said = order(bundle, "") + bundle.data
    argv = ["/usr/bin/env", "-i", f"HOME={home}", *bootstrap_argv("/usr/bin/python3")]
    answers, rest = run(argv, said, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
    root = home / ".local/state/hpcsched-node/c/n"
    assert answers[-1]["root"] == str(root)
    assert rest.startswith(b"attach --root " + str(root).encode())
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_plain_user_s_root_in_a_namespace_in_which_root_has_no_name(bundle: Bundle, everybody_s_tmp: Path) -> None:
    """Where a plain user's own user namespace (user_namespaces(7)) has no uid for root, as for the demo's nodes."""
    user = 12345
    home = everybody_s_tmp / "home"
    home.mkdir()
    os.chown(home, user, user)
    unshare = ["unshare", "--user", f"--map-user={user}"]
    as_user: dict[str, Any] = {"user": user, "group": user, "extra_groups": [], "cwd": "/"}
    if subprocess.run([*unshare, "true"], check=False, **as_user).returncode != 0:
        pytest.skip("plain users may make no user namespaces here")
    said = order(bundle, str(home / "node")) + bundle.data
    answers, _ = run([*unshare, *bootstrap_argv("/usr/bin/python3")], said, **as_user)
    assert answers[-1].get("root") == str(home / "node"), answers


def bootstrap_functions() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(SOURCE.replace("\nmain()\n", "\n"), names)  # noqa: S102 - our own source, which is never a module
    return names


def test_a_home_that_cannot_be_written_is_an_error_that_says_where_else(bundle: Bundle) -> None:
    as_a_plain_user = "import os; os.geteuid = lambda: 1000\n" + SOURCE
    argv = [sys.executable, "-c", as_a_plain_user]
    answers, _ = run(argv, order(bundle, ""), env={"HOME": "/dev/null/home"})
    (refusal,) = answers
    assert refusal["error"].startswith("cannot keep hpcnode.pyz: [Errno 20] Not a directory")
    assert refusal["error"].endswith("; name another directory: --root of hpcsched node add, root in n.toml")


def test_a_network_home_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    names = bootstrap_functions()
    choose = names["choose_root"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/u")
    for kind, root in (("ext4", "/home/u/.local/state/hpcsched-node/c/n"), ("nfs4", "/var/tmp/hpcsched-node-1000/c/n")):
        names["file_system_of"] = lambda _, kind=kind: kind
        assert choose("", "c", "n") == root
    assert choose("/given", "c", "n") == "/given"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert choose("", "c", "n") == "/var/lib/hpcsched-node/c/n"


def test_it_knows_file_systems() -> None:
    kind_of = bootstrap_functions()["file_system_of"]
    assert kind_of("/proc/self/no/such") == "proc"
    assert kind_of("/") != ""


def test_stdin_may_be_a_socket(bundle: Bundle, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen(bootstrap_argv(sys.executable), stdin=theirs, stdout=theirs)
        theirs.close()
        ours.sendall(order(bundle, tmp_path / "root") + bundle.data)
        ours.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: ours.recv(65536), b""))
    assert process.wait(timeout=PATIENCE_S) == 0
    assert said.endswith(b"--node n|")


def argv_with_policy(path: Path) -> list[str]:
    """Return the bootstrap's command with the administrator's policy in another file."""
    return [sys.executable, "-E", "-s", "-S", "-c", SOURCE.replace("/etc/hpcsched/node.json", str(path))]


@pytest.mark.skipif(os.getuid() != 0, reason="the policy of a node belongs to root")
def test_a_node_s_policy_names_the_code_that_may_run_and_its_directory(bundle: Bundle, tmp_path: Path) -> None:
    policy, root = tmp_path / "node.json", tmp_path / "root"
    policy.write_text(json.dumps({"bundles": ["0" * 64], "root": str(root)}))
    answers, _ = run(argv_with_policy(policy), order(bundle, root) + bundle.data)
    assert f"cannot run hpcnode.pyz {bundle.sha256}: it is not in bundles" in answers[0]["error"]
    policy.write_text(json.dumps({"bundles": [bundle.sha256], "root": str(root)}))
    answers, _ = run(argv_with_policy(policy), order(bundle, tmp_path / "elsewhere") + bundle.data)
    assert f"root in {policy} is '{root}'" in answers[0]["error"]
    for name in ("..", ".", "a/b", ""):
        answers, _ = run(argv_with_policy(policy), order(bundle, root, node=name) + bundle.data)
        assert "cannot use the name" in answers[0]["error"]
    assert not root.exists()
    answers, rest = run(argv_with_policy(policy), order(bundle, root) + bundle.data + b"x")
    assert [list(answer)[0] for answer in answers] == ["need", "ready"]
    assert rest.startswith(b"attach ")


@pytest.mark.skipif(os.getuid() != 0, reason="the policy of a node belongs to root")
@pytest.mark.parametrize("broken", ["mode", "owner", "text", "list", "folder"])
def test_a_policy_that_cannot_be_trusted_lets_nothing_run(bundle: Bundle, tmp_path: Path, broken: str) -> None:
    policy, root = tmp_path / "node.json", tmp_path / "root"
    if broken == "folder":
        policy.mkdir()
    else:
        policy.write_text({"text": "{", "list": "[]"}.get(broken, "{}"))
    if broken == "mode":
        policy.chmod(0o666)
    if broken == "owner":
        os.chown(policy, NOBODY, NOBODY)
    answers, rest = run(argv_with_policy(policy), order(bundle, root) + bundle.data)
    assert [list(answer)[0] for answer in answers] == ["error"]
    assert rest == b""
    assert not root.exists()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5\1\0\0\0\3", b"id\n", b"", b"{" * 70_000])
def test_who_is_not_the_controller_gets_no_word(said: bytes) -> None:
    assert run(bootstrap_argv(sys.executable), said) == ([], b"")


@pytest.mark.parametrize("size", [-1, 0, 1 << 40])
def test_a_bundle_of_another_size_is_refused(bundle: Bundle, tmp_path: Path, size: int) -> None:
    answers, _ = run(bootstrap_argv(sys.executable), order(bundle, tmp_path / "root", size=size))
    assert "cannot take" in answers[0]["error"]
