"""openai-agents with its default class: an agent whose tool is called by responses, whole and as a stream."""

import asyncio

from asked_server import asked_server

URL, MODEL = asked_server(__doc__)

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

PRODUCTS = []


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    PRODUCTS.append(a * b)
    return a * b


async def main() -> None:
    agent = Agent(name="a", instructions="Compute.", tools=[multiply], model=MODEL)
    assert (await Runner.run(agent, "17 * 23?")).final_output == "It is 391."
    streamed = Runner.run_streamed(agent, "17 * 23?")
    async for _ in streamed.stream_events():
        continue
    assert streamed.final_output == "It is 391."
    assert PRODUCTS == [391, 391]


set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused"))
asyncio.run(main())
