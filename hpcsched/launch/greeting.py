"""The first messages on a new pipe: the bootstrap's dialogue, then Hello and Welcome.

It blocks until it is done or the pipe ends. It does not know how the pipe was made. Output of the
node's shell before the bootstrap's is skipped, up to a bound. Every refusal becomes a LinkError
with a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hpcnode.wire import gate, protocol
from hpcsched.launch.bundle import MARK, Bundle
from hpcsched.launch.pipe import LinkError, LinkProgress, Pipe
from hpcsched.model.node import NodeSpec

MAX_NOISE_BYTES = 256 << 10
RECEIVE_BYTES = 256 << 10
COMMAND_NOT_FOUND = ("status 126", "status 127")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerIdentity:
    """Identity of the controller for the node to which it connects."""

    cluster: str
    incarnation: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The agent's answer, and data received after it; `framer` holds an incomplete frame."""

    welcome: protocol.Welcome
    rest: list[tuple[protocol.Message, bytes]]
    framer: protocol.Framer


def greet(pipe: Pipe, spec: NodeSpec, bundle: Bundle, identity: ControllerIdentity, progress: LinkProgress) -> Greeting:
    """Copy hpcnode.pyz to the node if it is missing, and return the agent's welcome.

    Raises LinkError.
    """
    order = {
        "sha256": bundle.sha256,
        "size": len(bundle.data),
        "root": spec.root,
        "cluster": identity.cluster,
        "node": spec.name,
    }
    try:
        pipe.send_all(json.dumps(order).encode("ascii") + b"\n")
        said, left = _next_line(pipe, b"", spec)
        if said.get("need"):
            progress(f"copying the agent there ({len(bundle.data) >> 10} KiB)")
            pipe.send_all(bundle.data)
            said, left = _next_line(pipe, left, spec)
        progress("waiting for the agent's welcome")
        hello = protocol.Hello(
            version=protocol.VERSION,
            cluster=identity.cluster,
            incarnation=identity.incarnation,
            epoch=identity.epoch,
            node=spec.name,
        )
        pipe.send_all(protocol.encode(hello))
        return _welcome(pipe, left, spec)
    except OSError:  # it ended before it read all our data
        raise LinkError(_no_bootstrap(spec, pipe.epitaph(), b"")) from None
    except protocol.WireError as error:
        raise LinkError(f"cannot understand the agent on {spec.name}: {error}") from None


def _next_line(pipe: Pipe, data: bytes, spec: NodeSpec) -> tuple[dict[str, Any], bytes]:
    """Return the bootstrap's next line and the data after it."""
    while True:
        start = data.find(b"\n" + MARK)
        end = data.find(b"\n", start + 1) if start >= 0 else -1
        if end >= 0:
            break
        if len(data) > MAX_NOISE_BYTES:
            raise LinkError(
                f"cannot start the agent on {spec.name}: its shell printed {len(data)} bytes and ran no command; "
                f"the last were {_tail(data)!r}"
            )
        more = pipe.receive(RECEIVE_BYTES)
        if not more:
            raise LinkError(_no_bootstrap(spec, pipe.epitaph(), data))
        data += more
    try:
        said = gate.read_json(data[start + 1 + len(MARK) : end])
        if not isinstance(said, dict):
            raise gate.GateError("not a JSON object")
    except gate.GateError:
        raise LinkError(f"cannot understand the bootstrap on {spec.name}: {_tail(data)!r}") from None
    if "error" in said:
        raise LinkError(f"cannot start the agent on {spec.name}: {said['error']}")
    return said, data[end + 1 :]


def _no_bootstrap(spec: NodeSpec, epitaph: str, noise: bytes) -> str:
    text = f"cannot start the agent on {spec.name}: {epitaph}"
    if any(status in epitaph for status in COMMAND_NOT_FOUND):
        text += f" (is there no {spec.python}? install Python 3.9 or newer there, or set python in {spec.name}.toml)"
    return text + (f"; before that it printed {_tail(noise)!r}" if noise.strip() else "")


def _welcome(pipe: Pipe, data: bytes, spec: NodeSpec) -> Greeting:
    framer = protocol.Framer()
    messages = list(framer.feed(data))
    while not messages:
        data = pipe.receive(RECEIVE_BYTES)
        if not data:
            raise LinkError(f"cannot start the agent on {spec.name}: {pipe.epitaph()}")
        messages = list(framer.feed(data))
    first, rest = messages[0][0], messages[1:]
    if isinstance(first, protocol.Goodbye):
        raise LinkError(f"cannot use node {spec.name}: its agent says: {first.why}")
    if not isinstance(first, protocol.Welcome):
        raise LinkError(f"cannot understand the agent on {spec.name}: it said {type(first).__name__} before Welcome")
    if first.version != protocol.VERSION:
        raise LinkError(
            f"cannot use node {spec.name}: its agent speaks protocol {first.version}, we speak {protocol.VERSION}"
        )
    if first.node != spec.name:
        raise LinkError(f"cannot use node {spec.name}: the agent there says that it is {first.node!r}")
    return Greeting(welcome=first, rest=rest, framer=framer)


def _tail(data: bytes) -> str:
    return data[-200:].decode("utf-8", "replace").strip()
