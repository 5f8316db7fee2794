"""One look at a node through its agent, from a command that waits for it: for `hpcsched node add`.

The same dial, bundle and greeting as the controller's links, without an event loop: what works here works there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
    abort = Abort()
    timer = threading.Timer(timeout_s, abort.now)
    timer.daemon = True
    stages = ["starting"]

    def note(stage: str) -> None:
        stages.append(stage)
        progress(stage)

    timer.start()
    try:
        pipe = dial(abort, note)
        try:
            greeting = greet(pipe, spec, bundle, identity, note)
            note("looking around there")
            return _look(pipe, greeting, spec, probe, bundle)
        finally:
            pipe.close()
    except UnavailableError:
        if timer.is_alive():
            raise
        raise LinkError(f"cannot reach {spec.name}: no answer within {timeout_s:g} s while {stages[-1]}") from None
    finally:
        timer.cancel()


def _look(pipe: Pipe, greeting: Greeting, spec: NodeSpec, probe: ShareProbe | None, bundle: Bundle) -> Visit:
    asked_s = time.time()
    pipe.send_all(protocol.encode(protocol.Probe(request=1)))
    facts, _ = _answer(pipe, greeting, protocol.Facts, spec)
    answered_s = time.time()
    error = ""
    if probe is not None:
        question = protocol.ReadFile(request=2, user="", path=str(probe.path), offset=0, limit=PROBE_BYTES)
        pipe.send_all(protocol.encode(question))
        read, content = _answer(pipe, greeting, protocol.FileData, spec)
        error = probe.judge(read.error, content.decode("ascii", "replace"))
    if bundle.sha256.startswith(greeting.welcome.agent_version):  # one of before that still has work knows no measuring
        pipe.send_all(protocol.encode(protocol.Probe(request=3, measure=True)))
        measured, _ = _answer(pipe, greeting, protocol.Facts, spec)
        facts.facts["speed"] = measured.facts.get("speed", 0)
    return Visit(
        welcome=greeting.welcome,
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
