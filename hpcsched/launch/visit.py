"""One look at a node through its agent, from a command that waits for it: for `hpcsched node add`.

The same dial, bundle and greeting as the controller's links, without an event loop: what works here works there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcnode import protocol
from hpcsched.errors import UnavailableError
from hpcsched.launch.bundle import Bundle
from hpcsched.launch.greeting import RECEIVE_BYTES, ControllerIdentity, Greeting, greet
from hpcsched.launch.pipe import Abort, Dial, LinkError, Pipe
from hpcsched.model.node import NodeSpec
from hpcsched.shareprobe import PROBE_BYTES, ShareProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was found. `share_error` is "" if the share is the same there, or none was asked about."""

    welcome: protocol.Welcome
    facts: dict[str, Any]
    clock_ahead_s: float  # the node's clock less ours, as well as it can be told
    clock_error_s: float  # half of the time that the question took
    share_error: str


class Asking:
    """A conversation with a node's agent: called with a message, it returns the answer of the wanted type and its bytes."""

    def __init__(self, pipe: Pipe, greeting: Greeting, spec: NodeSpec) -> None:
        self.greeting = greeting
        self._pipe = pipe
        self._spec = spec

    def __call__(self, message: protocol.Message, wanted: type) -> tuple[Any, bytes]:
        """Say `message` and return what answers it. Raises LinkError."""
        self._pipe.send_all(protocol.encode(message))
        return _answer(self._pipe, self.greeting, wanted, self._spec)


@contextmanager
def asking(
    spec: NodeSpec,
    *,
    dial: Dial,
    bundle: Bundle,
    identity: ControllerIdentity,
    timeout_s: float,
    note: Callable[[str], None] = lambda stage: None,
) -> Iterator[Asking]:
    """Start the agent on the node, be in conversation with it, and leave; `note` hears of each stage. Raises LinkError."""
    abort = Abort()
    timer = threading.Timer(timeout_s, abort.now)
    timer.daemon = True
    stages = ["starting"]

    def noted(stage: str) -> None:
        stages.append(stage)
        note(stage)

    timer.start()
    try:
        pipe = dial(abort, noted)
        try:
            greeting = greet(pipe, spec, bundle, identity, noted)
            noted("looking around there")
            yield Asking(pipe, greeting, spec)
        finally:
            pipe.close()
    except UnavailableError:
        if timer.is_alive():
            raise
        raise LinkError(f"cannot reach {spec.name}: no answer within {timeout_s:g} s while {stages[-1]}") from None
    finally:
        timer.cancel()


def visit(
    spec: NodeSpec,
    *,
    dial: Dial,
    bundle: Bundle,
    identity: ControllerIdentity,
    timeout_s: float,
    probe: ShareProbe | None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Visit:
    """Start the agent on the node, ask for its facts (and whether it can read `probe`), and leave. Raises LinkError."""
    with asking(spec, dial=dial, bundle=bundle, identity=identity, timeout_s=timeout_s, note=progress) as ask:
        return _look(ask, probe, bundle)


def _look(ask: Asking, probe: ShareProbe | None, bundle: Bundle) -> Visit:
    welcome = ask.greeting.welcome
    asked_s = time.time()
    facts, _ = ask(protocol.Probe(request=1), protocol.Facts)
    answered_s = time.time()
    error = ""
    if probe is not None:
        question = protocol.ReadFile(request=2, user="", path=str(probe.path), offset=0, limit=PROBE_BYTES)
        read, content = ask(question, protocol.FileData)
        error = probe.judge(read.error, content.decode("ascii", "replace"))
    if bundle.sha256.startswith(welcome.agent_version):  # one of before that still has work knows no measuring
        measured, _ = ask(protocol.Probe(request=3, measure=True), protocol.Facts)
        facts.facts["speed"] = measured.facts.get("speed", 0)
    return Visit(
        welcome=welcome,
        facts=facts.facts,
        clock_ahead_s=float(facts.facts.get("time_s", asked_s)) - (asked_s + answered_s) / 2,
        clock_error_s=(answered_s - asked_s) / 2,
        share_error=error,
    )


def _answer(pipe: Pipe, greeting: Greeting, wanted: type, spec: NodeSpec) -> tuple[Any, bytes]:
    """Return the next message of the wanted type; what else the agent says is for the controller, and waits for it."""
    while True:
        while greeting.rest:
            message, blob = greeting.rest.pop(0)
            if isinstance(message, wanted):
                return message, blob
            if isinstance(message, protocol.Goodbye):
                raise LinkError(f"cannot use node {spec.name}: its agent says: {message.why}")
        data = pipe.receive(RECEIVE_BYTES)
        if not data:
            raise LinkError(f"lost the agent of {spec.name}: {pipe.epitaph()}")
        greeting.rest.extend(greeting.framer.feed(data))
