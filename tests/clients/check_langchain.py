"""langchain-openai: a tool that is bound, its result, a stream, and structured output."""

from asked_server import asked_server

URL, MODEL = asked_server(__doc__)

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Multiply(BaseModel):
    """Two numbers."""

    a: int
    b: int


Multiply.__name__ = "multiply"
model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="unused")
said = [HumanMessage("17 * 23?")]
answer = model.bind_tools([multiply]).invoke(said)
(call,) = answer.tool_calls
assert call["args"] == {"a": 17, "b": 23}
said += [answer, ToolMessage(str(multiply.invoke(call["args"])), tool_call_id=call["id"])]
assert "".join(chunk.content for chunk in model.bind_tools([multiply]).stream(said)) == "It is 391."
shaped = model.with_structured_output(Multiply, method="function_calling").invoke("17 * 23?")
assert (shaped.a, shaped.b) == (17, 23)
