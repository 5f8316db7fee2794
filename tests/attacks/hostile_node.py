"""What a node's `python` is replaced by: a program that speaks as an agent does, and says what it should not.

Arguments: the seed of its words, a file that counts what it has said, and how many messages it says on one connection.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from pathlib import Path

from hpcnode.wire import protocol
from tests.attacks.grammar import Grammar

MARK = b"\x02hpcnode\x03 "


def is_taken(frame: bytes) -> bool:
    """Say whether the frame is a message by its form, so that the controller looks at what it says."""
    try:
        return bool(list(protocol.Framer().feed(frame)))
    except protocol.WireError:
        return False


class HostileNode:
    """One connection of the node."""

    def __init__(self, seed: int, counter: Path, most: int) -> None:
        self.grammar = Grammar(seed)
        self.grammar.broken = 0.02  # a link that is cut is made again after seconds
        self.counter = counter
        self.most = most
        self.framer = protocol.Framer()
        self.tokens: list[str] = []
        self.node = ""

    def serve(self) -> None:
        order = b""
        while not order.endswith(b"\n"):
            order += os.read(0, 1) or sys.exit(1)
        self.node = json.loads(order)["node"]
        self.write(b"\n" + MARK + json.dumps({"ready": True, "root": "/", "python": "3.9"}).encode() + b"\n")
        hello = self.read()[0]
        known = [
            protocol.to_json(protocol.Report(seq=1, token=token, status=protocol.STARTED, at_s=1e9))
            for token in self.tokens[:3]
        ]
        inventory = [{key: value for key, value in one.items() if key != "type"} for one in known]
        frame = self.grammar.frame(self.grammar.welcome(self.node, hello.epoch, inventory))
        while not is_taken(frame) and self.grammar.random.random() < 0.8:
            frame = self.grammar.frame(self.grammar.welcome(self.node, hello.epoch, inventory))
        self.write(frame)
        for _ in range(self.most):
            if select.select([0], [], [], 0.0)[0]:
                self.hear()
            blob = b"x" * 10 if self.grammar.random.random() < 0.2 else b""
            frame = self.grammar.frame(self.grammar.node_message(self.node, self.tokens[-50:]), blob)
            if not is_taken(frame) and self.grammar.random.random() > 0.002:
                continue  # the link would be cut, and made again after seconds: what gets further says more
            self.write(frame)
            with open(self.counter, "ab") as file:
                file.write(b".")

    def read(self) -> list[protocol.Message]:
        while True:
            data = os.read(0, 1 << 20)
            if not data:
                sys.exit(0)
            if found := [message for message, _ in self.framer.feed(data)]:
                return found

    def hear(self) -> None:
        for message in self.read():
            if isinstance(message, protocol.Launch):
                self.tokens.append(message.token)
                good = [
                    protocol.Report(seq=7, token=message.token, status=status, at_s=1e9, codes=codes, signals=codes)
                    for status, codes in ((protocol.CLAIMED, []), (protocol.STARTED, []), (protocol.ENDED, [0]))
                ]
                for report in good[: self.grammar.random.randrange(4)]:
                    self.write(protocol.encode(report))
            elif isinstance(message, protocol.EndJob) and self.grammar.random.random() < 0.8:
                gone = protocol.JobGone(message.incarnation, message.job_id, message.attempt, message.stay)
                self.write(protocol.encode(gone))
            elif isinstance(message, protocol.Ping):
                self.write(protocol.encode(protocol.Pong(request=message.request)))

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    said = Path(sys.argv[2])
    HostileNode(int(sys.argv[1]) + random.SystemRandom().randrange(2**30), said, int(sys.argv[3])).serve()
