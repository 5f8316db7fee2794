"""LangChain's standard tests of a chat model, for its OpenAI client against our API."""

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServedModel(ChatModelIntegrationTests):
    """The suite, for a model that reads text only."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        """LangChain's client."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        """What the client is made with."""
        return {"model": "tiny", "temperature": 0, "stream_usage": True}

    @property
    def supports_anthropic_inputs(self) -> bool:
        """Forms of messages of another API are not read."""
        return False

    @property
    def supports_json_mode(self) -> bool:
        """Any JSON object can be asked for."""
        return True

    @property
    def model_override_value(self) -> str:
        """The name of a model that requests may ask for instead."""
        return "tiny"
