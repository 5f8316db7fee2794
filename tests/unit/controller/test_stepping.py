"""How what steps say and what the controller does come in one order."""

from __future__ import annotations

from typing import Any

from world import Cluster

from hpcnode import protocol
from hpcsched.controller.stepping import Stepping
from hpcsched.model.ids import JobId, NodeName, Token

N1 = NodeName("n1")


def inventory(*reports: protocol.Report) -> list[dict[str, Any]]:
    return [{key: value for key, value in protocol.to_json(one).items() if key != "type"} for one in reports]


def test_output_that_comes_behind_a_welcome_waits_until_its_step_was_found_again() -> None:
    cluster = Cluster("n1")
    stepping = Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)
    job_id = cluster.submit()
    cluster.run(job_id)
    token = str(
        Token(
            incarnation=cluster.world.incarnation, job_id=JobId(job_id), attempt=0, step="0", node=N1, nonce=f"{7:032x}"
        )
    )
    to = protocol.Address(node="n1", stream=5)
    started = protocol.Report(seq=9, token=token, status=protocol.STARTED, at_s=cluster.now_s, stream_to=to)
    output = protocol.Output(to=to, token=token, task=0, fd=1, offset=0, eof=False)
    ack = protocol.OutputAck(token=token, task=0, fd=1, offset=3)
    stepping.node_welcome(N1, inventory(started))
    stepping.on_output(N1, output, b"one")
    said = protocol.FromStream(stream=5, uid=1000, job_id=job_id, attempt=0, message=protocol.to_json(ack))
    stepping.on_from_stream(N1, said, b"")
    cluster.tick()
    words = [message.message["type"] for _, message in cluster.sent(protocol.ToStream)]
    assert words == ["StepWaiting", "Output"]
    assert cluster.sent(protocol.OutputAck) == [("n1", ack)]
    stepping.on_output(N1, output, b"two")  # and from now on nothing waits for a tick
    assert [message.message["type"] for _, message in cluster.sent(protocol.ToStream)] == ["Output"]
