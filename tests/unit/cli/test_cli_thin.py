"""The thin clients, compiled and in Python: the same words on the wire, and the whole command where that is needed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi

from hpcsched import paths
from hpcsched.cli import thin

SOURCE = Path(thin.__file__).with_suffix(".c")
ROOTS = [str(SOURCE.parents[2]), str(SOURCE.parents[2] / "workers")]
SCRIPT = "#!/bin/sh\n#SBATCH --nodes=2\ntrue\n"
CHECKS = {"ASAN_OPTIONS": "detect_leaks=0"}  # the client ends before it would free anything
DONE = b"1 4\n5\n\xc3\xa42 6\nnoted\nexit 0\n"
ACCEPTED = {"jobs": [{"job_id": 5, "tasks": 1}], "notes": []}

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def bins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each client, with all names, and the whole command beside the compiled one."""
    base = tmp_path_factory.mktemp("clients")
    made = {}
    for kind in ("python", "c"):
        bin_dir = made[kind] = base / kind
        bin_dir.mkdir()
        programs = {"hpcsched-command": "whole"} | ({} if kind == "c" else dict.fromkeys(thin.MODULES, "main"))
        for name, function in programs.items():
            text = (
                f"#!{sys.executable}\nimport sys\nsys.path[:0] = {ROOTS!r}\nfrom hpcsched.cli.thin import {function}\n"
            )
            (bin_dir / name).write_text(f"{text}sys.exit({function}())\n")
            (bin_dir / name).chmod(0o755)
    compiler = shutil.which("cc")
    if compiler is not None:
        words = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(base / "c" / "hsub"), str(SOURCE)]
        checked = [*words, "-fsanitize=address,undefined", "-fno-sanitize-recover"]
        if subprocess.run(checked, capture_output=True, timeout=60, check=False).returncode:  # no library for it
            subprocess.run(words, check=True, timeout=60)
        for name in thin.MODULES:
            if name != "hsub":
                (base / "c" / name).symlink_to("hsub")
    return made


@pytest.fixture(params=["python", "c"])
def run(request: pytest.FixtureRequest, bins: dict[str, Path], tmp_path: Path, api: FakeApi) -> Run:
    """Run a command of one of the clients in `tmp_path`."""
    if request.param == "c" and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "job.sh").write_text(SCRIPT)
    api.answers |= {"POST /v1/command": answered(DONE), "POST /v1/submit": ACCEPTED}

    def run(
        name: str, *argv: str | bytes, env: dict[str | bytes, Any] | None = None, stdin: str = "", **how: Any
    ) -> Any:
        environ = {
            "PATH": "/bin",
            "LANG": "C.UTF-8",
            "HOME": str(tmp_path),
            "HPCSCHED_API": str(api.path),
            **CHECKS,
        } | (env or {})
        return subprocess.run(
            [str(bins[request.param] / name), *argv],
            env={key: value for key, value in environ.items() if value is not None},
            input=stdin.encode(), cwd=tmp_path, stderr=subprocess.PIPE, stdout=how.get("stdout", subprocess.PIPE),
            timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to run as root: another account serves the socket")
def test_a11_a_link_that_another_account_made_leads_to_no_server(run: Run, linked: tuple[socket.socket, str]) -> None:
    server, path = linked
    assert b"served by uid 65534" in run("hqueue", env={"HPCSCHED_API": path}).stderr
    connection, _ = server.accept()
    with connection:
        assert connection.recv(100) == b""


def answered(body: bytes) -> bytes:
    """Return the answer of the controller's entrance for words."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


def sent(api: FakeApi) -> dict[str, Any]:
    """Return the words of the last request."""
    return dict(api.requests("POST /v1/command")[-1])


def test_both_clients_send_the_same_words(api: FakeApi, bins: dict[str, Path], tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "job.sh").write_text('#!/bin/sh\n# \x01\t"\\ é ☃ 🎉\n')
    api.answers["POST /v1/command"] = answered(DONE)
    env = {
        "HPCSCHED_API": str(api.path), "LANG": "C.UTF-8", "ODD": "\x1b\n\"\\ ☃\x7f", "EMPTY": "", "SLURM_UMASK": "1",
        "TZ": "Asia/Tokyo", **CHECKS,
        "PATH": "/bin",
    }  # fmt: skip
    for argv in (["hsub"], ["hsub", "-N", "2", "job.sh", 'a "b"\n', "é", ""], ["squeue", "-h"], ["hcancel", "--me"]):
        bodies = []
        for kind in ("python", "c"):
            words = ["sh", "-c", 'umask 027; ulimit -n 100; exec "$@"', "sh", str(bins[kind] / argv[0]), *argv[1:]]
            subprocess.run(
                words, env=env, cwd=tmp_path, timeout=60, check=True, stdin=subprocess.DEVNULL, capture_output=True
            )
            bodies.append(sent(api))
        for body in bodies:
            assert len(body.pop("request_id")) == 32
            assert {"SLURM_UMASK=0027", "EMPTY="} <= set(body["environ"])
            assert any("NOFILE=100" in item for item in body["environ"])
            seen = dict(item.split("=", 1) for item in reversed(body["environ"]))  # of two of one name the first counts
            body["environ"] = {name: value for name, value in seen.items() if name not in ("LC_CTYPE", "_")}
        assert bodies[0] == bodies[1]


def test_what_the_controller_says_is_printed(run: Run) -> None:
    done = run("hsub", "job.sh")
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\nä".encode(), b"noted\n")


def test_the_exit_status_is_the_controllers(run: Run, api: FakeApi) -> None:
    api.answers["POST /v1/command"] = answered(b"2 10\nno such\n\n\nexit 2\n")
    done = run("hqueue", "--nonsense")
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"no such\n\n\n")


def test_an_answer_of_many_lines_comes_whole(run: Run, api: FakeApi) -> None:
    text = b"".join(b"%d a job's line\n" % at for at in range(100_000))
    api.answers["POST /v1/command"] = answered(b"1 %d\n%sexit 0\n" % (len(text), text))
    assert run("hqueue").stdout == text


def test_the_first_file_among_the_words_is_taken_for_the_script(run: Run, api: FakeApi) -> None:
    run("sbatch", "-J", "x", "job.sh", "arg")
    assert (sent(api)["script"], sent(api)["script_at"]) == (SCRIPT, 2)
    run("hqueue", "job.sh")
    assert "script" not in sent(api)


def test_the_controller_may_ask_for_another_script(run: Run, api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("no script")
    api.answers["POST /v1/command"] = [answered(b"script 2\n"), answered(DONE)]
    assert run("hsub", "-o", "out", "job.sh").returncode == 0
    first, second = api.requests("POST /v1/command")
    assert (first["script_at"], second["script_at"], second["script"]) == (1, 2, SCRIPT)
    assert first["request_id"] == second["request_id"]


def test_standard_input_is_read_when_the_controller_asks_for_it(run: Run, api: FakeApi) -> None:
    api.answers["POST /v1/command"] = [answered(b"script -1\n"), answered(DONE)]
    assert run("hsub", "--hold", stdin="#!/bin/sh\ncat\n").returncode == 0
    assert (sent(api)["script"], sent(api)["script_at"]) == ("#!/bin/sh\ncat\n", -1)


def test_what_the_controller_leaves_to_the_command_is_done_in_python(run: Run, api: FakeApi) -> None:
    api.answers["POST /v1/command"] = answered(b"python\n")
    done = run("hsub", "-J", "whole", "job.sh")
    assert (done.returncode, done.stdout) == (0, b"Submitted batch job 5\n")
    assert api.requests("POST /v1/submit")[-1]["jobs"][0]["name"] == "whole"


def test_a_script_that_was_read_from_standard_input_is_put_back_for_python(run: Run, api: FakeApi) -> None:
    api.answers["POST /v1/command"] = [answered(b"script -1\n"), answered(b"python\n")]
    assert run("hsub", stdin="#!/bin/sh\ncat\n").stdout == b"Submitted batch job 5\n"
    assert api.requests("POST /v1/submit")[-1]["jobs"][0]["script"] == "#!/bin/sh\ncat\n"


def test_a_lost_answer_is_asked_for_again_under_the_same_id(run: Run, api: FakeApi) -> None:
    api.answers["POST /v1/command"] = None
    assert run("hsub", "job.sh").stdout == b"Submitted batch job 5\n"
    (submitted,) = api.requests("POST /v1/submit")
    assert submitted["request_id"] == sent(api)["request_id"]
    assert "HPCSCHED_REQUEST_ID" not in dict(submitted["jobs"][0]["env"])


@pytest.mark.parametrize("name", ["hcancel", "scancel"])
def test_a_signal_whose_answer_was_lost_is_not_sent_twice(run: Run, api: FakeApi, name: str) -> None:
    api.answers |= {"POST /v1/command": None, "POST /v1/cancel": {"jobs": ["1"], "errors": []}}
    done = run(name, "-s", "USR1", "1")
    assert done.returncode == 1
    assert b"lost the connection to the hpcsched controller before it answered" in done.stderr
    assert api.requests("POST /v1/cancel") == []


def test_an_older_controller_is_asked_in_its_own_way(run: Run, api: FakeApi) -> None:
    del api.answers["POST /v1/command"]
    assert run("hsub", "job.sh").stdout == b"Submitted batch job 5\n"


@pytest.mark.parametrize(
    ("argv", "env"),
    [([b"--comment=\xff", "job.sh"], {}), (["job.sh"], {b"ODD": b"\xe9"}), (["job.sh"], {b"A\xed\xa0\x80": "x"})],
)
def test_what_is_not_utf_8_is_not_sent(run: Run, api: FakeApi, argv: list[Any], env: dict[Any, Any]) -> None:
    run("hsub", *argv, env=env)
    assert not any(route == "POST /v1/command" for route, _, _ in api.asked)


@pytest.mark.parametrize("data", [b"#!/bin/sh\n# \xe9\n", b"#!/bin/sh\n\xed\xa0\x80", b"\x7fELF\0", b"#" * 300_000])
def test_a_script_that_cannot_be_sent_is_read_in_python(run: Run, api: FakeApi, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "job.sh").write_bytes(data)
    api.answers["POST /v1/command"] = answered(b"script 0\n")
    run("hsub", "job.sh")
    assert not any("script" in body for body in api.requests("POST /v1/command"))
    assert not any(route == "POST /v1/submit" for route, _, _ in api.asked) or b"\0" not in data


def test_no_controller_is_said_by_the_command(run: Run, tmp_path: Path) -> None:
    done = run("hqueue", env={"HPCSCHED_API": str(tmp_path / "none")})
    assert done.returncode == 1
    assert done.stderr.startswith(b"hqueue: error: Unable to contact hpcsched controller")
    done = run("squeue", env={"HPCSCHED_API": str(tmp_path / "none")})
    assert done.stderr.startswith(b"slurm_load_jobs error: Unable to contact slurm controller")


@pytest.mark.parametrize("body", [b"1 5\nabc\n", b"nonsense\n", b"", b"1 99999999999999999999\nx", b"1 -5\nabc"])
def test_an_answer_that_is_not_one_is_an_error(run: Run, api: FakeApi, body: bytes) -> None:
    api.answers["POST /v1/command"] = answered(body)
    assert run("hqueue").returncode == 1


def test_a_reader_that_has_seen_enough_ends_the_command(run: Run, api: FakeApi) -> None:
    api.answers["POST /v1/command"] = answered(b"1 2000000\n" + b"x" * 2_000_000 + b"exit 0\n")
    read, write = os.pipe()
    os.close(read)
    done = run("hqueue", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


CONFIGS: list[tuple[dict[str, str], str]] = [
    ({"HPCSCHED_CONFIG": "{tmp}/c"}, ""),
    ({"HPCSCHED_CONFIG": "{tmp}/c"}, "[controller]\nrequeue = true\n"),
    ({"HPCSCHED_CONFIG": "{tmp}/c"}, "[controller]\nrun_dir = '{tmp}/r'\n"),
    ({"HPCSCHED_CONFIG": "{tmp}/c"}, "[controller]\nstate_dir = 'far'\n"),
    ({"HPCSCHED_CONFIG": "{tmp}/c"}, "# run_dir = '/nowhere'\n"),
    ({"HPCSCHED_CONFIG": "c"}, ""),
]


@pytest.mark.parametrize(("env", "toml"), CONFIGS)
def test_the_controller_is_found_where_the_configuration_says(
    run: Run, api: FakeApi, tmp_path: Path, env: dict[str, str], toml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {name: value.format(tmp=tmp_path) for name, value in env.items()} | {"HOME": str(tmp_path)}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "hpcsched.toml").write_text(toml.format(tmp=tmp_path))
    monkeypatch.chdir(tmp_path)
    where = Path(os.path.join(tmp_path, paths.api_socket(environ, os.getuid())))
    where.parent.mkdir(parents=True)
    where.symlink_to(api.path)
    assert run("hsub", "job.sh", env={**environ, "HPCSCHED_API": None}).returncode == 0
    assert api.requests("POST /v1/command") or api.requests("POST /v1/submit")


def test_with_a_gateway_the_controller_of_this_machine_is_not_asked(run: Run, api: FakeApi) -> None:
    away = {"HPCSCHED_URL": "http://127.0.0.1:1", "HPCSCHED_TOKEN": f"eyJ{'x' * 20}.{'y' * 20}.{'z' * 20}"}
    for words in (("hqueue",), ("hcancel", "7"), ("hsub", "job.sh")):
        done = run(*words, env=away)
        assert b"Unable to contact hpcsched gateway (127.0.0.1:1: Connection refused)" in done.stderr
        assert done.returncode == 1
    assert api.asked == []
