"""A real model, served by hpcserve in a job: `hserve start`, OpenAI's client at the gateway, killed processes, `hserve stop`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("openai")

import httpx
import openai
from gateway_server import Served, serving
from tiny_models import tiny_model
from waiting import PATIENCE_S, wait_until

from hpcsched.client import https

ASKED: Any = {
    "model": "chat",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 1500,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
SERVER = ("--kind=fp32", "--silence=30")  # a busy machine lets a rank be silent for long


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as started:
        yield started


@pytest.fixture(scope="module")
def model(served: Served) -> Path:
    """Return the model of service `chat`, which has a ready replica."""
    directory = tiny_model(served.base / "tiny", max_position_embeddings=2048)
    run(served, "start", str(directory), "--name=chat", "--replicas=1", "-D", str(served.base), "--", *SERVER)
    wait_until(lambda: found(served)["ready"] == 1, 2 * PATIENCE_S, what=f"a ready replica; output: {output(served)}")
    return directory


@pytest.fixture(scope="module")
def key(served: Served) -> str:
    return served.cluster.run("hctl", "token", "create", "--scope=serve").stdout.strip()


@pytest.fixture
def client(served: Served, key: str) -> Iterator[openai.OpenAI]:
    address = f"https://localhost:{served.port}/v1"
    with httpx.Client(verify=served.context(), timeout=PATIENCE_S) as web:
        yield openai.OpenAI(base_url=address, api_key=key, http_client=web, max_retries=0)


def run(served: Served, *words: str, **env: str) -> str:
    return served.cluster.run("hserve", *words, env=env).stdout


def output(served: Served) -> str:
    """Return what the replicas have said."""
    return "".join(path.read_text() for path in served.base.glob("*.out"))


def found(served: Served) -> dict[str, Any]:
    service: dict[str, Any] = json.loads(run(served, "ls", "chat", "--json"))["services"][0]
    return service


def processes() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the processes of this host, and the words of their commands."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue


def ranks_of(model: Path) -> list[int]:
    """Return the processes that compute a model."""
    wanted = [b"hpcserve.group.rank", os.fsencode(model)]
    return [number for number, words in processes() if words[-3:-1] == wanted and b"--overlap" not in words]  # not hrun


def fronts_of(model: Path) -> list[int]:
    """Return the processes that answer requests to a model."""
    wanted = [b"-m", b"hpcserve", b"run", os.fsencode(model)]
    return [number for number, words in processes() if words[1:5] == wanted]


def test_a_stream_continues_with_the_same_text_when_its_rank_is_killed(
    served: Served, model: Path, client: openai.OpenAI
) -> None:
    assert [one.id for one in client.models.list()] == ["chat"]
    whole = client.chat.completions.create(**ASKED)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == ASKED["max_tokens"]
    before = found(served)["replicas"]
    parts = []
    for event in client.chat.completions.create(**ASKED, stream=True):
        parts.append(event.choices[0].delta.content or "")
        if len(parts) == 10:
            (rank,) = ranks_of(model)
            os.kill(rank, signal.SIGKILL)
    assert "generation 1 is ready" in output(served)  # the rest is from another rank
    assert "".join(parts) == whole.choices[0].message.content
    assert [one["job"] for one in found(served)["replicas"]] == [one["job"] for one in before]


def test_a_stream_continues_at_the_next_replica_when_its_job_has_ended(
    served: Served, model: Path, client: openai.OpenAI
) -> None:
    whole = client.chat.completions.create(**ASKED)
    before = found(served)["replicas"]
    parts, names = [], set()
    for event in client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}):
        names.add(event.id)
        parts.append(event)
        if len(parts) == 10:
            (front,) = fronts_of(model)
            os.kill(front, signal.SIGKILL)
    assert parts[-1].usage is not None
    assert whole.usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    text = "".join(one.choices[0].delta.content or "" for one in parts[:-1])
    assert text == whole.choices[0].message.content
    assert len(names) == 1
    assert not {one["job"] for one in found(served)["replicas"]} & {one["job"] for one in before}


def test_a_service_is_tried_and_stopped_by_commands(served: Served, model: Path, key: str) -> None:
    env = {https.TOKEN: key, https.CA_PATH: str(served.base / "gateway.crt")}
    assert run(served, "test", "chat", "Hello, you.", **env).strip()
    run(served, "stop", "chat")
    wait_until(lambda: not ranks_of(model), what="the end of the ranks")
    assert json.loads(run(served, "ls", "--json"))["services"] == []
