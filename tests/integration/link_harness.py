"""What the tests of links share: a listener that can be waited on, and links with short times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fake_node import fake_bundle
from waiting import PATIENCE_S

from hpcnode.wire import protocol
from hpcsched.launch.bundle import Bundle
from hpcsched.launch.link import ControllerIdentity, LinkTimes, NodeLink
from hpcsched.launch.pipe import Dial, local_dial
from hpcsched.launch.ssh import ssh_dial
from hpcsched.launch.sshconfig import SshSettings
from hpcsched.loopback.cluster import LoopbackNode
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec

IDENTITY = ControllerIdentity(cluster="testing", incarnation="0123456789abcdef", epoch=1)
TIMES = LinkTimes(connect_s=60, heartbeat_s=0.3, down_after_s=30, retry_first_s=0.05, retry_most_s=0.5)


class Listener:
    """Keeps what a link says, for `wait_up`, `wait_message` and `wait_down`."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[tuple[str, Any, bytes]] = asyncio.Queue()

    def on_up(self, node: NodeName, welcome: protocol.Welcome) -> None:
        self._said.put_nowait(("up", welcome, b""))

    def on_message(self, node: NodeName, message: protocol.Message, blob: bytes) -> None:
        self._said.put_nowait(("message", message, blob))

    def on_down(self, node: NodeName, why: str) -> None:
        self._said.put_nowait(("down", why, b""))

    async def wait_up(self, *, after_downs: bool = False) -> protocol.Welcome:
        """Return the next welcome; with `after_downs` the link may fail to come up before, however often."""
        return (await self._next("up", skipped="down" if after_downs else ""))[0]

    async def wait_message(self) -> tuple[Any, bytes]:
        return await self._next("message")

    async def wait_down(self) -> str:
        return (await self._next("down"))[0]

    async def _next(self, wanted: str, skipped: str = "") -> tuple[Any, bytes]:
        async with asyncio.timeout(PATIENCE_S):
            kind, what, blob = await self._said.get()
            while kind == skipped:
                kind, what, blob = await self._said.get()
        assert kind == wanted, f"the link said {kind}: {what}, not {wanted}"
        return what, blob


def spec_of(node: LoopbackNode, **changes: Any) -> NodeSpec:
    """Return the specification of a loopback node, as `hpcsched node add` would write it."""
    given = {
        "name": NodeName(node.name),
        "host": node.host,
        "port": node.port,
        "user": node.user,
        "identity_file": str(node.identity_file),
        "host_key": node.host_key,
        "cpus": 2,
        "mem_mib": 1000,
        "root": str(node.root / "agent"),
    }
    return NodeSpec(**(given | changes))


def local_spec(root: Path, **changes: Any) -> NodeSpec:
    """Return the specification of a node that is this machine, with its agent in `root`."""
    given = {"name": NodeName("here"), "host": "local", "host_key": "", "cpus": 2, "mem_mib": 1000, "root": str(root)}
    return NodeSpec(**(given | changes))


def settings_with(config_file: Path = Path("/nonexistent"), **changes: Any) -> SshSettings:
    """Return SSH settings that read nothing of the person who runs the tests."""
    return SshSettings(**({"config_file": config_file, "launch_key": None, "timeout_s": 60.0} | changes))


@contextlib.asynccontextmanager
async def linked(
    spec: NodeSpec,
    *,
    settings: SshSettings | None = None,
    bundle: Bundle | None = None,
    times: LinkTimes = TIMES,
    dial: Dial | None = None,
) -> AsyncIterator[tuple[NodeLink, Listener]]:
    """Yield a started link and its listener; the link is closed at the end."""
    listener = Listener()
    if dial is None:
        dial = local_dial(spec) if spec.host == "local" else ssh_dial(spec, settings or settings_with())
    link = NodeLink(
        spec,
        dial=dial,
        bundle=bundle or fake_bundle(),
        identity=IDENTITY,
        times=times,
        events=listener,
        loop=asyncio.get_running_loop(),
    )
    link.start()
    try:
        yield link, listener
    finally:
        link.close()
