"""instructor: an object of a class, by a call that is required."""

from asked_server import asked_server

URL, MODEL = asked_server(__doc__)

import instructor
import openai
from pydantic import BaseModel


# Its name is that of the call which the model recites.
class multiply(BaseModel):
    """Two numbers."""

    a: int
    b: int


client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="unused"), mode=instructor.Mode.TOOLS)
messages = [{"role": "user", "content": "17 * 23?"}]
found = client.chat.completions.create(model=MODEL, response_model=multiply, messages=messages, max_retries=0)
assert (found.a, found.b) == (17, 23)
