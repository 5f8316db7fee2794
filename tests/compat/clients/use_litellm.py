"""Answers, streams, embeddings and errors through LiteLLM."""

import os

import litellm
import pytest

ADDRESS = os.environ["OPENAI_BASE_URL"]
ASKED = {
    "model": "openai/tiny",
    "api_base": ADDRESS,
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 8,
}

whole = litellm.completion(**ASKED)
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ASKED, stream=True)]
assert "".join(parts) == whole.choices[0].message.content, parts
assert whole.usage.completion_tokens <= 8
text = litellm.text_completion(model="text-completion-openai/tiny", api_base=ADDRESS, prompt="hello", max_tokens=4)
assert text.choices[0].finish_reason in ("length", "stop")
assert len(litellm.embedding(model="openai/tiny", api_base=ADDRESS, input=["a", "b"]).data) == 2
with pytest.raises(litellm.BadRequestError, match="temperature"):
    litellm.completion(**ASKED | {"temperature": -1}, num_retries=0)
