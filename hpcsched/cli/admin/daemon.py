"""`hpcsched up`, `down`, `status`, `gateway` and `web`: the controller and its API."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import click

from hpcsched import client, paths
from hpcsched.cli.admin.init import give_to_controller, seal_keys_of
from hpcsched.config.load import Config, load_config, load_gateway
from hpcsched.controller.logfile import start_log
from hpcsched.errors import ConfigError, PermissionDeniedError, UnavailableError
from hpcsched.launch import as_controller
from hpcsched.listing.text import clean
from hpcsched.model.units import format_time_s

START_S = 20.0
STOP_S = 20.0
NODES_S = 5.0  # time for the nodes to answer after a start
LOG_FILE = "hpcschedd.log"
LOG_TAIL_BYTES = 4000


@click.command()
def up() -> None:
    """Start the controller in the background, and wait until it answers."""
    running = _ping()
    if running is not None:
        click.echo(f"hpcschedd is already running (process {running['pid']})")
        return
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    log = config.controller.state_dir / LOG_FILE
    account = config.controller.account()
    _prepare(config)
    with as_controller(config):
        stream = open_log(log)
    with stream:
        start = stream.tell()
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "hpcsched.controller"),
                *("--config", str(config.config_dir), "--log-file", str(log)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            cwd="/",
            **_as_controller(account),
        )
    _wait_until_it_answers(process, log, start)
    click.echo(f"hpcschedd runs (process {process.pid}, log {log})")
    for line in [*_nodes_that_answer(), *_closed_to_others()]:
        click.echo(line)


def _prepare(config: Config) -> None:
    """Make the directories of a controller that is not root.

    Raises UnavailableError.
    """
    account = config.controller.account()
    if os.getuid() != 0 or account is None:
        return
    run_dir = config.controller.run_dir
    try:
        for directory, mode in ((config.controller.state_dir, 0o700), (run_dir, 0o755)):
            if not directory.exists():
                directory.mkdir(mode=mode, parents=True)
                directory.chmod(mode)  # whatever the umask is
                give_to_controller(config, directory)
        seal_keys_of(config)
    except OSError as error:
        raise UnavailableError(f"cannot start hpcschedd: cannot make {error.filename}: {error.strerror}") from None


def _as_controller(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Return Popen arguments that start the controller as its account."""
    if os.getuid() != 0 or account is None:
        return {}
    home = {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    env = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"} | home
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups, "umask": 0o077, "env": env}


def _closed_to_others() -> list[str]:
    """Return a warning if other users cannot read the installation of root's controller."""
    python = Path(sys.executable)
    if os.getuid() != 0:
        return []
    real = python.resolve()
    for path in (*python.parents, *real.parents):
        if not path.stat().st_mode & 0o001:
            return [
                f"other users cannot run the commands: {path} is closed to them; install hpcsched with a Python outside of "
                "it, as /usr/bin/python3 -m venv /opt/hpcsched"
            ]
    return []


def _nodes_that_answer() -> list[str]:
    """Wait briefly for the nodes to answer, and return a line about them."""
    deadline_s = time.monotonic() + NODES_S
    while True:
        nodes = client.call("GET", "/v1/nodes")["nodes"]
        unknown = [node["name"] for node in nodes if node["link"] == "unknown"]
        if not unknown or time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    if not nodes:
        return ["there are no nodes yet; add one with: hpcsched node add user@host"]
    down = [f"  {node['name']} does not answer: {clean(node['link_why'])}" for node in nodes if node["link"] == "down"]
    waited = [f"  {', '.join(unknown)}: no answer within {NODES_S:g} s; see hinfo -N"] if unknown else []
    count = sum(node["link"] == "up" for node in nodes)
    return [f"{count} of {len(nodes)} {'node answers' if len(nodes) == 1 else 'nodes answer'}", *down, *waited]


def open_log(log: Path) -> BinaryIO:
    """Open the log for appending, and create its directory. Raises UnavailableError."""
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))  # whatever the umask is
    except OSError as error:
        raise UnavailableError(f"cannot start hpcschedd: cannot write its log {log}: {error.strerror}") from None


def _wait_until_it_answers(process: subprocess.Popen[bytes], log: Path, start: int) -> None:
    deadline_s = time.monotonic() + START_S
    while _ping() is None:
        code = process.poll()
        if code is not None:
            raise UnavailableError(f"cannot start hpcschedd: it ended with status {code}:\n{_tail(log, start)}")
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"cannot start hpcschedd: no answer within {START_S:g} s; see {log}")
        time.sleep(0.05)


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as stream:
        stream.seek(max(start, log.stat().st_size - LOG_TAIL_BYTES))
        return stream.read().decode("utf-8", "replace").rstrip()


@click.command()
def down() -> None:
    """Stop the controller. Running jobs continue, and the next controller finds them."""
    try:
        pid = client.controller_pid()
    except client.NoControllerError:
        click.echo("hpcschedd is not running")
        return
    if not pid:
        raise UnavailableError("cannot stop hpcschedd: it runs in another container")
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise PermissionDeniedError(f"cannot stop hpcschedd: process {pid} is not yours") from None
    deadline_s = time.monotonic() + STOP_S
    while _is_there(pid):
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"cannot stop hpcschedd: process {pid} has not ended within {STOP_S:g} s")
        time.sleep(0.05)
    click.echo(f"hpcschedd has stopped (process {pid}); running jobs continue")


def _is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def status(as_json: bool) -> None:
    """Report whether the controller is running, and its nodes and jobs.

    Exit status 0 if it is running, else 1.
    """
    answer = client.call("GET", "/v1/ping")
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(f"cluster {answer['cluster']}: hpcschedd {answer['hpcsched']} runs (process {answer['pid']})")
    click.echo(f"  up for  {format_time_s(int(answer['now_s'] - answer['started_at_s']))}, epoch {answer['epoch']}")
    click.echo(f"  nodes   {_counts(answer['nodes'])}")
    click.echo(f"  jobs    {_counts(answer['counts'])}")
    for note in answer.get("not_taken", ()):
        click.echo(f"! {note}")
    config, wrong = _config_on_disk()
    if config is not None and (log := config.controller.state_dir / LOG_FILE).exists():
        click.echo(f"  log     {log}")
    if wrong:
        click.echo(
            f"  the configuration on disk is invalid; the controller still uses the previous one: {clean(wrong)}"
        )


def _config_on_disk() -> tuple[Config | None, str]:
    """Return the configuration, and the error in its files.

    No configuration: its files cannot be read, or have an error. "": no error.
    """
    config_dir = paths.find_config_dir(os.environ, os.getuid())
    try:
        return (load_config(config_dir) if os.access(config_dir / paths.CONFIG_FILE, os.R_OK) else None), ""
    except ConfigError as error:
        return None, str(error)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items())) or "none"


def _ping() -> dict[str, Any] | None:
    try:
        return client.call("GET", "/v1/ping")
    except UnavailableError:
        return None


# ----- `hpcsched gateway` and `hpcsched web`: the API over the network, and links to it


@click.command()
@click.option("--port", type=int, default=None, help="Another port than that of hpcsched.toml.")
@click.option("--insecure-loopback", is_flag=True, help="For development: without TLS, at 127.0.0.1 only.")
def gateway(port: int | None, insecure_loopback: bool) -> None:
    """Serve the API to the network over HTTPS, until a signal.

    See [gateway] in hpcsched.toml(5). Every request needs a credential: hctl token create.
    """
    from dataclasses import replace

    try:
        from hpcsched.gateway import server
    except ImportError as error:
        raise ConfigError(f"cannot run the gateway: {error.name} is missing: pip install 'hpcsched[web]'") from None
    config_dir = paths.find_config_dir(os.environ, os.getuid())
    settings = load_gateway(config_dir)
    start_log("info", None, is_ecs=settings.log_format == "ecs", service="hpcsched-gateway")
    if port is not None:
        settings = replace(settings, port=port)
    socket_path = paths.api_socket(os.environ, os.getuid())
    steps_path = os.path.join(os.path.dirname(socket_path), paths.STEPS_SOCKET)
    places = server.GatewayPlaces(socket_path, steps_path, config_dir / "templates")
    server.run(settings, places, insecure=insecure_loopback)


@click.command()
@click.option(
    "--scope", default="read,submit,manage", help="What the session allows: read,submit,manage,metrics,serve,admin."
)
def web(scope: str) -> None:
    """Print a link that opens a session in a browser: once, within a minute."""
    answer = client.call("POST", "/v1/sessions/link", {"scopes": scope})
    url = answer["url"]
    if not url:
        settings = load_gateway(paths.find_config_dir(os.environ, os.getuid()))
        url, tunnel = gateway_address(settings.address, settings.port, os.environ)
        if tunnel:
            click.echo(f"The gateway listens on this machine only. First run on yours: {tunnel}", err=True)
    click.echo(f"{url}/login?code={answer['code']}")


def gateway_address(address: str, port: int, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the address of a gateway without url, and the ssh command that leads there.

    The command is "" if none is needed: a user who came by SSH needs one to a gateway on the loopback address.
    """
    if address not in ("127.0.0.1", "::1", "localhost"):
        return f"https://{socket.getfqdn()}:{port}", ""
    words = environ.get("SSH_CONNECTION", "").split()
    user = environ.get("LOGNAME", "")
    host = (f"{user}@" if user else "") + (words[2] if len(words) == 4 else "")
    return f"https://localhost:{port}", f"ssh -N -L {port}:localhost:{port} {host}" if len(words) == 4 else ""
