"""An API that is served on the loopback interface by a thread, for clients as they are."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fake_engine import FakeEngine
from small_tokenizers import byte_level
from starlette.applications import Starlette
from waiting import wait_until

from hpcserve.api.app import create_app, server_config
from hpcserve.chat import ChatTemplate

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VERSION = "0123abcd"


def made_app(engine: FakeEngine | None = None, *, template: str | None = TEMPLATE, **settings: object) -> Starlette:
    """Return the application of model `tiny` over an engine."""
    tokenizer = byte_level()
    return create_app(
        engine or FakeEngine(tokenizer),
        tokenizer,
        ChatTemplate(template, {}),
        name="tiny",
        version=VERSION,
        **settings,  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Yield the address of an application while it is served."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(server_config(app))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started, 20)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
