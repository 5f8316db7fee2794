"""A stand-in for the agent, for tests of the link alone: a bundle whose `attach` speaks the protocol and does tricks.

What it does beside answering is said by the file `behaviour` in the node's root: one word a line.
"""

from __future__ import annotations

from pathlib import Path

import hpcnode
from hpcsched.launch.bundle import Bundle, build_bundle

MAIN = """
import os, sys, time
from hpcnode.agent import helpers
from hpcnode.wire import protocol

def main():
    arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    root = arguments["--root"]
    try:
        with open(os.path.join(root, "behaviour")) as file:
            behaviour = file.read().split()
    except FileNotFoundError:
        behaviour = []
    with open(os.path.join(root, "starts"), "a") as file:
        file.write("%d %s %s\\n" % (os.getpid(), sys.flags.isolated, os.path.basename(sys.path[0])))
    if "complain" in behaviour:
        sys.stderr.write("the spool is on fire\\n")
        return 3
    framer = protocol.Framer()
    said_hello = False
    while True:
        data = os.read(0, 1 << 20)
        if not data:
            return 0
        for message, blob in framer.feed(data):
            answer, back = None, b""
            if isinstance(message, protocol.Hello):
                if "goodbye" in behaviour:
                    answer = protocol.Goodbye(why="epoch 1 is lower than 7")
                elif "garbage" in behaviour:
                    os.write(1, b"\\xff" * 64)
                    continue
                else:
                    answer = protocol.Welcome(
                        version=protocol.VERSION, node=message.node, boot_id="b", agent_version=sys.path[0],
                        pid=os.getpid(), epoch=message.epoch, inventory=[], facts={"root": root})
            elif isinstance(message, protocol.Ping):
                if "mute" not in behaviour:
                    answer = protocol.Pong(request=message.request)
            elif isinstance(message, protocol.Probe):
                facts = {"got": len(blob), "root": root, "cpus": 6, "mem_mib": 5000, "disk_free_mib": 20480,
                         "gpus": [{"index": 0, "name": "NVIDIA A100-SXM4-80GB", "uuid": "u", "mem_mib": 81920}],
                         "python": "3.9.2", "kernel": "6.1", "hostname": "far", "user": "me", "is_root": False,
                         "time_s": time.time() - 100 * ("late" in behaviour)}
                answer = protocol.Facts(request=message.request, facts=facts)
            elif isinstance(message, protocol.CompareProbe):
                try:
                    if "elsewhere" in behaviour:
                        message = protocol.changed(message, sha256="0" * 64)
                    answer, _ = helpers.compare_probe(message)
                except (OSError, ValueError) as problem:
                    why = getattr(problem, "strerror", None) or str(problem)
                    answer = protocol.ProbeCompared(message.request, False, why)
            elif isinstance(message, protocol.ReadFile):
                sys.stderr.write("e" * message.offset)
                sys.stderr.flush()
                answer = protocol.FileData(request=message.request, offset=0, size=message.limit)
                back = bytes(i % 251 for i in range(message.limit))
            elif isinstance(message, protocol.CloseStream):
                sys.stderr.write("told to go")
                return 5
            if answer is not None:
                frame = protocol.encode(answer, back)
                while frame:
                    frame = frame[os.write(1, frame):]
"""


def fake_bundle(extra: bytes = b"") -> Bundle:
    """Return a bundle with the stand-in; `extra` makes its hash another."""
    assert hpcnode.__file__ is not None
    package = Path(hpcnode.__file__).parent
    files = {str(path.relative_to(package.parent)): path.read_bytes() for path in package.rglob("*.py")}
    return build_bundle(files | {"hpcnode/__main__.py": MAIN.encode() + extra})
