"""Connections to nodes: the open channel to each agent, and what is copied there first.

The controller calls `make_link`. Modules: link (the event loop's view, first messages); bundle,
bootstrap (files copied to the node); ssh, sshconfig, hostkeys (over a network); pipe (also on
this machine).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcsched.config.load import Config
    from hpcsched.launch.bundle import Bundle
    from hpcsched.launch.link import ControllerIdentity, LinkEvents, NodeLink
    from hpcsched.launch.pipe import Abort, Dial, LinkProgress, Pipe
    from hpcsched.launch.sshconfig import SshSettings
    from hpcsched.model.node import NodeSpec


def make_link(
    spec: NodeSpec,
    config: Config,
    *,
    bundle: Bundle,
    identity: ControllerIdentity,
    events: LinkEvents,
    loop: asyncio.AbstractEventLoop,
) -> NodeLink:
    """Return the link to a configured node, not yet started."""
    from hpcsched.launch.link import LinkTimes, NodeLink  # hrun's layout must not load paramiko

    settings = config.controller
    times = LinkTimes(
        connect_s=settings.connect_timeout_s,
        heartbeat_s=settings.heartbeat_s,
        down_after_s=settings.node_down_after_s,
    )
    return NodeLink(
        spec, dial=dial_for(spec, config), bundle=bundle, identity=identity, times=times, events=events, loop=loop
    )


def dial_for(spec: NodeSpec, config: Config) -> Dial:
    """Return the Dial for this node: SSH, or a local one if the node is this machine."""
    from hpcsched.config.keys import LOCAL_HOST
    from hpcsched.launch.pipe import local_dial

    if spec.host == LOCAL_HOST:
        return local_dial(spec)

    def dial(abort: Abort, progress: LinkProgress) -> Pipe:
        # Paramiko takes a quarter of a second to load. It loads in the link's thread, while the
        # controller already answers.
        from hpcsched.launch.ssh import ssh_dial

        with as_controller(config):
            return ssh_dial(spec, ssh_settings(config))(abort, progress)

    return dial


@contextmanager
def as_controller(config: Config) -> Iterator[None]:
    """Have the rights of the controller's account, in a command of root.

    So it tries what the controller will do, and cannot be misled by links in that account's directories. It changes the whole
    process. Does nothing in other processes.
    """
    account = config.controller.account() if os.getuid() == 0 else None
    if account is None:
        yield
        return
    before = {name: os.environ.get(name) for name in ("HOME", "USER", "LOGNAME", "SSH_AUTH_SOCK")}
    groups = os.getgroups()
    os.environ.update(HOME=account.pw_dir, USER=account.pw_name, LOGNAME=account.pw_name)
    os.environ.pop("SSH_AUTH_SOCK", None)
    os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(os.getgid())
        os.setgroups(groups)
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def ssh_settings(config: Config) -> SshSettings:
    """Return the SSH settings that the configuration has for all connections."""
    from hpcsched.launch.sshconfig import SshSettings

    return SshSettings(
        config_file=config.controller.ssh_config,
        launch_key=config.launch_key,
        timeout_s=config.controller.connect_timeout_s,
        down_after_s=config.controller.node_down_after_s,
    )
