"""pydantic-ai: an agent whose tool is called, by chat completions and by responses."""

from asked_server import asked_server

URL, MODEL = asked_server(__doc__)

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="unused")
for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
    agent, products = Agent(model), []

    @agent.tool_plain
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        products.append(a * b)  # noqa: B023 - each agent is done before the next
        return a * b

    assert agent.run_sync("17 * 23?").output == "It is 391."
    assert products == [391]
