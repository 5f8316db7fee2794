"""Clients of OpenAI's API, as they are, against a model that we serve.

The model is a tiny random one: what it says is noise, so forms and numbers are compared; LangChain's suite, which expects sense,
gets an engine with prepared answers.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")
pytest.importorskip("openai")

import openai
from fake_engine import FakeEngine
from pydantic import BaseModel
from served_api import made_app, served
from small_tokenizers import byte_level
from tiny_models import tiny_model

from hpcserve.api.app import create_app
from hpcserve.batching import BatchLimits
from hpcserve.chat import ChatTemplate
from hpcserve.config import read_config
from hpcserve.engine import LocalEngine
from hpcserve.grammar import Grammar
from hpcserve.group.runner import local_runner
from hpcserve.model import DecoderModel, whole_part
from hpcserve.tokens import TextTokenizer
from hpcserve.weights import WeightFiles

CLIENTS = Path(__file__).parent / "clients"
NODE_PACKAGES = Path(sys.prefix) / "npm" / "node_modules"
CONTEXT_TOKENS = 2048
HELLO = [{"role": "user", "content": "hello"}]
LEAST_CASES = 10_000
EXAMPLES = 3000  # of each operation; the cases of the coverage phase come on top
LEAST_OF_SUITE = 40  # tests of LangChain that must run
JOKE = {"setup": "Why?", "punchline": "Because."}
CALLS: dict[str, object] = {  # calls of tools of LangChain's suite
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "Joke": JOKE,
}


class Place(BaseModel):
    name: str
    degrees: int


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": Place.model_json_schema()}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def address(directory: Path) -> Iterator[str]:
    config = read_config(directory)
    tokenizer = TextTokenizer.load(directory, config.vocab)
    model = DecoderModel(config, WeightFiles(directory), whole_part(config), "fp32", blocks=256)
    engine = LocalEngine(
        local_runner(model),
        BatchLimits(blocks=256, context_tokens=CONTEXT_TOKENS),
        vocabulary=config.vocab,
        eos=frozenset(config.eos_tokens),
        grammar=Grammar(tokenizer, config.vocab).start,
    )
    app = create_app(engine, tokenizer, ChatTemplate.load(directory), name="tiny", version="1")
    with served(app) as started:
        yield f"{started}/v1"
    engine.close()


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as made:
        yield made


def test_openai_client_gets_the_same_text_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 12


def test_openai_client_gets_objects_of_a_schema(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Place, seed=seed, max_tokens=1500, temperature=0.5
        )
        assert isinstance(answer.choices[0].message.parsed, Place)


def test_openai_client_gets_calls_of_a_required_tool(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "seed": 1, "max_tokens": 1500, "temperature": 0.5}
    answer = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    assert answer.finish_reason == "tool_calls"
    assert Place.model_validate_json(answer.message.tool_calls[0].function.arguments)


def test_openai_client_lists_models_and_gets_embeddings(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    same, other, again = client.embeddings.create(model="tiny", input=["one", "two", "one"]).data
    assert same.embedding == pytest.approx(again.embedding, abs=1e-5)
    assert same.embedding != pytest.approx(other.embedding, abs=1e-3)


def test_openai_client_gets_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="cannot find model 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt="x" * 3000)


def test_log_probabilities_of_a_prompt_do_not_depend_on_the_request(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "the quick brown fox", "echo": True, "logprobs": 1, "temperature": 0}
    first = client.completions.create(**asked, max_tokens=1).choices[0].logprobs
    more = client.completions.create(**asked, max_tokens=8).choices[0].logprobs
    assert first.token_logprobs[0] is None
    assert first.token_logprobs[1:] == pytest.approx(more.token_logprobs[1 : len(first.token_logprobs)], abs=1e-5)
    assert all(math.isfinite(value) for value in first.token_logprobs[1:])


def run_client(script: str, address: str, *words: str, timeout_s: float = 500) -> str:
    """Run a client's script against the API, and return what it printed."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env = os.environ | offline | {"OPENAI_BASE_URL": address, "OPENAI_API_BASE": address, "OPENAI_API_KEY": "none"}
    env["NODE_PATH"] = str(NODE_PACKAGES)
    path = CLIENTS / script
    command = ["node", str(path)] if path.suffix == ".mjs" else [sys.executable, str(path)]
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["litellm", "llm"])
def test_other_clients_get_answers_and_streams(address: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"NOT TESTED: {name} is missing; make compat installs it")
    run_client(f"use_{name}.py", address, str(tmp_path))


@pytest.mark.minutes
def test_client_for_javascript_gets_answers_streams_and_errors(address: str) -> None:
    if not (NODE_PACKAGES / "openai").exists():
        pytest.skip("NOT TESTED: npm's openai is missing; make compat installs it where there is npm")
    run_client("use_openai.mjs", address)


@pytest.mark.minutes
def test_lm_eval_gets_the_numbers_of_its_own_engine(address: str, directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="NOT TESTED: lm-eval is missing; make compat installs it")
    ours, theirs = json.loads(run_client("use_lm_eval.py", address, str(directory), str(tmp_path)).splitlines()[-1])
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.minutes
def test_guidellm_measures_the_model_without_a_failed_request(address: str, directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("guidellm", reason="NOT TESTED: guidellm is missing; make compat installs it")
    (measured,) = json.loads(run_client("use_guidellm.py", address, str(directory), str(tmp_path)))["benchmarks"]
    assert (measured["requests"]["errored"], measured["requests"]["incomplete"]) == ([], [])
    assert [one["output_metrics"]["text_tokens"] for one in measured["requests"]["successful"]] == [12] * 6


@pytest.mark.minutes
def test_langchain_passes_its_own_suite(tmp_path: Path) -> None:
    pytest.importorskip("langchain_tests", reason="NOT TESTED: langchain-tests is missing; make compat installs it")
    engine = FakeEngine(byte_level(), prepared_answer, context_tokens=20_000)
    with served(made_app(engine)) as started:
        env = os.environ | {"OPENAI_BASE_URL": f"{started}/v1", "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
        # LangChain's client keeps its connections for the next test: all tests need the same event loop.
        command += ["-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session"]
        command += ["-o", "addopts=", "--rootdir", str(tmp_path), str(CLIENTS / "langchain_suite.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert int(found[1]) >= LEAST_OF_SUITE


def prepared_answer(prompt: str) -> str:
    """Return an answer that makes sense of what LangChain's suite asks."""
    said = re.findall(r"user\n(.*?)(?:assistant|$)", prompt, re.DOTALL)
    last = said[-1] if said else prompt
    if "tool\n" in prompt.rsplit("user\n", 1)[-1]:
        return "The result is in."
    for name, arguments in CALLS.items():
        if f'"{name}"' in prompt:  # the prompt describes this tool
            return json.dumps({"name": name, "arguments": arguments})
    if '"unicode_customer"' in prompt:
        customer = {"customer_name": last.split("'")[1], "description": "a company"}
        return json.dumps({"name": "unicode_customer", "arguments": customer}, ensure_ascii=False)
    return json.dumps(JOKE) if "joke" in last.lower() else "hello world, the weather is fine"


@pytest.mark.minutes
@pytest.mark.timeout(1800)
def test_schemathesis_finds_no_500_and_no_answer_against_the_description(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="NOT TESTED: schemathesis is missing; make compat installs it")
    with served(made_app()) as started:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{started}/openapi.json", "--phases=coverage,fuzzing",
            f"--max-examples={EXAMPLES}", "--seed=1", "--continue-on-failure", "--generation-database=none", "--no-color",
            "--exclude-checks=positive_data_acceptance",  # a schema cannot say what fits the model
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1700)
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    assert found is not None, done.stdout[-2000:]
    assert int(found[2]) >= LEAST_CASES
