"""How what steps say and what the controller does come in one order."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from cluster import Cluster

from hpcnode.wire import message as message_codec
from hpcnode.wire import protocol
from hpcsched.controller.nodes import messages
from hpcsched.controller.stepping import Stepping
from hpcsched.model.ids import JobId, LaunchToken, NodeName
from hpcsched.model.node import MeasuredNode
from hpcsched.steps.step import HEAD

N1 = NodeName("n1")


def inventory(*reports: protocol.Report) -> list[dict[str, Any]]:
    return [{key: value for key, value in protocol.to_json(one).items() if key != "type"} for one in reports]


def test_output_that_comes_behind_a_welcome_waits_until_its_step_was_found_again() -> None:
    cluster = Cluster("n1")
    stepping = Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)
    job_id = cluster.submit()
    cluster.run(job_id)
    token = str(
        LaunchToken(
            incarnation=cluster.state.incarnation, job_id=JobId(job_id), attempt=0, step="0", node=N1, nonce=f"{7:032x}"
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


# ----- failures of ours, which must be the step command's alone


def _request(cluster: Cluster, job_id: int, *argv: str, **options: Any) -> protocol.FromStream:
    request = protocol.StepRequest(
        version=protocol.VERSION, job_id=job_id, options=options, argv=list(argv), work_dir="/", env={}
    )
    return protocol.FromStream(stream=5, uid=1000, job_id=job_id, attempt=0, message=protocol.to_json(request))


def _words(cluster: Cluster) -> list[Any]:
    said = [json.loads(json.dumps(message.message)) for _, message in cluster.sent(protocol.ToStream)]
    return list(map(protocol.from_json, said))


def test_a_step_whose_row_cannot_be_written_is_refused_and_its_command_is_told() -> None:
    cluster = Cluster("n1")
    stepping = Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.sent(protocol.Launch)
    stepping.on_from_stream(N1, _request(cluster, job_id, "./prog\ud800"), b"")
    other = cluster.submit()  # in the same tick
    cluster.tick()
    cluster.tick()
    (ended,) = [word for word in _words(cluster) if isinstance(word, protocol.StepEnded)]
    assert "fault" in ended.error
    assert [message.job_id for _, message in cluster.sent(protocol.Launch)] == [other]
    assert cluster.store.load_steps([job_id])[0].step == "batch"


def test_an_unexpected_failure_of_a_step_request_is_told_to_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")
    stepping = Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)
    job_id = cluster.submit()
    cluster.run(job_id)

    def fail(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(stepping.service, "_on_request", fail)
    stepping.on_from_stream(N1, _request(cluster, job_id, "true"), b"")
    cluster.tick()
    cluster.tick()
    (ended,) = [word for word in _words(cluster) if isinstance(word, protocol.StepEnded)]
    assert "fault" in ended.error


def test_an_unexpected_failure_outside_of_the_tick_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")
    stepping = Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)

    def fail(*_: object) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(stepping.service, "_on_signal", fail)
    signal = protocol.to_json(protocol.StepSignal(signum=10))
    stepping.on_from_stream(N1, protocol.FromStream(stream=5, uid=1000, job_id=1, attempt=0, message=signal), b"")
    for _ in range(2):
        cluster.tick()
    (ended,) = [word for word in _words(cluster) if isinstance(word, protocol.StepEnded)]
    assert "fault" in ended.error


def test_an_innocent_hrun_in_a_tick_with_one_that_cannot_be_written_gets_its_job() -> None:
    cluster = Cluster("n1")
    told: list[tuple[int, Any]] = []
    stepping = Stepping(
        cluster.controller,
        cluster.ports,
        clock=lambda: cluster.now_s,
        reply_head=lambda stream, message, blob: told.append((stream, message)),
    )
    request = protocol.StepRequest(version=protocol.VERSION, job_id=0, options={}, argv=["true"], work_dir="/", env={})
    said = protocol.FromStream(stream=7, uid=0, job_id=0, attempt=0, message=protocol.to_json(request))
    cluster.controller.ask(lambda tx: tx.note_request(1, "\ud800", [1]), lambda result: None)
    stepping.on_from_stream(HEAD, said, b"")
    cluster.tick()
    cluster.tick()
    assert not [message for _, message in told if isinstance(message, protocol.StepEnded)]
    (launch,) = [message for _, message in cluster.sent(protocol.Launch)]
    assert (launch.job_id, launch.step, launch.argv) == (1, "0", ["true"])
    assert [row.step for row in cluster.store.load_steps([1])] == ["0"]


def test_a_step_whose_launch_is_too_long_for_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")
    stepping = Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)
    job_id = cluster.submit()
    cluster.run(job_id)
    send = cluster.ports.send

    def encode(node: NodeName, message: Any, blob: bytes = b"") -> None:
        protocol.encode(message, blob)
        send(node, message, blob)

    monkeypatch.setattr(cluster.ports, "send", encode)
    monkeypatch.setattr(message_codec, "MAX_JSON_BYTES", 20_000)
    stepping.on_from_stream(N1, _request(cluster, job_id, "true", *["x" * 1000] * 18), b"")
    monkeypatch.setattr(message_codec, "MAX_JSON_BYTES", 10_000)
    for _ in range(3):
        cluster.tick()
    (ended,) = [word for word in _words(cluster) if isinstance(word, protocol.StepEnded)]
    assert "bytes are too many" in ended.error


# ----- the speeds of the job's nodes


def _measured(cluster: Cluster, name: str, **fields: Any) -> None:
    node = cluster.state.nodes[NodeName(name)]
    cluster.state.nodes[NodeName(name)] = replace(node, measured=MeasuredNode(**fields))


def _speeds(message: Any) -> str:
    return str(message.env.get("HPCSCHED_NODE_SPEEDS", ""))


def test_batch_and_steps_are_told_the_speeds_of_the_jobs_own_nodes() -> None:
    cluster = Cluster("n1", "n2", "n3")
    stepping = Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)
    for name, speed in (("n1", 0.91), ("n2", 0.455), ("n3", 7.0)):
        _measured(cluster, name, cpu_speed=speed)
    job_id = cluster.submit(nodes_min=2, nodes_max=2, env=(("HPCSCHED_NODE_SPEEDS", "n1=1e9"),))
    cluster.run(job_id)
    job = cluster.job(job_id)
    names = [share.node for share in job.shares]
    told = ",".join(f"{name}={cluster.state.nodes[name].speed:g}" for name in names)
    assert _speeds(messages.launch_batch(job, cluster.state, names[0])) == told
    cluster.sent(protocol.Launch)
    stepping.on_from_stream(N1, _request(cluster, job_id, "true"), b"")
    cluster.tick()
    assert {_speeds(message) for _, message in cluster.sent(protocol.Launch)} == {told}


def test_speeds_that_do_not_compare_the_nodes_are_not_told() -> None:
    cluster = Cluster("n1", "n2")
    one = cluster.job(cluster.submit(nodes_min=1))
    two = replace(one, shares=(one.shares[0], replace(one.shares[0], node=NodeName("n2"))))
    on_gpus = replace(two, shares=tuple(replace(share, gpus=(0,)) for share in two.shares))
    for name, speed in (("n1", 1.0), ("n2", 0.0)):
        _measured(cluster, name, cpu_speed=speed, gemm_gflops=speed)
    assert messages.node_speeds(two, cluster.state) == {}
    _measured(cluster, "n2", cpu_speed=2.0)
    assert messages.node_speeds(two, cluster.state) == {"HPCSCHED_NODE_SPEEDS": "n1=1,n2=2"}
    assert messages.node_speeds(one, cluster.state) == {}
    assert messages.node_speeds(on_gpus, cluster.state) == {}  # the speed of a CPU says nothing of GPUs
    _measured(cluster, "n2", cpu_speed=2.0, gemm_gflops=50_000.0)
    assert messages.node_speeds(on_gpus, cluster.state) == {"HPCSCHED_NODE_SPEEDS": "n1=1,n2=50000"}
