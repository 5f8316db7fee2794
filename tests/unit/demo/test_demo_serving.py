"""The answer that the serving demo shows: its lines, and where it comes from."""

from __future__ import annotations

import http.client
import socket
import threading
from pathlib import Path

import pytest
from waiting import wait_until

from hpcsched.demo.serving import LINE_WIDTH, StreamedAnswer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def answered(path: Path, content: bytes) -> StreamedAnswer:
    """An answer that a server with this content gives."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            with connection.makefile("rb") as request:
                headers = http.client.parse_headers(request) if request.readline() else {}
                request.read(int(headers["content-length"]))
            connection.sendall(content)

    threading.Thread(target=serve, daemon=True).start()
    answer = StreamedAnswer(path)
    wait_until(lambda: answer.is_over)
    listener.close()
    return answer


def event(text: str) -> bytes:
    return b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode()


def test_every_word_is_shown_once_in_lines_that_fit(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(60)]
    content = HEAD + b"".join(event(f" {word}") for word in words) + b"data: [DONE]\n\n"
    answer = answered(tmp_path / "s", content)
    assert (answer.tokens, answer.error) == (60, "")
    lines = answer.new_lines() + answer.new_lines(whole=True)
    assert max(map(len, lines)) <= LINE_WIDTH
    assert " ".join(lines).split() == words
    assert answer.new_lines(whole=True) == []


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy",
        HEAD + event("one") + b'data: {"error": {"message": "busy"}}\n\n',
    ],
    ids=["status", "event"],
)
def test_an_error_is_not_taken_for_the_end_of_the_answer(tmp_path: Path, content: bytes) -> None:
    assert "busy" in answered(tmp_path / "s", content).error
