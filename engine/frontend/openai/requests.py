"""From a checked body of the OpenAI protocol to the requests that it stands for, one for each choice.

Owns prompts, ids of choices and the room that is left for output. Sends nothing; refuses what can never fit.
"""

from __future__ import annotations

import logging
import uuid

from engine.frontend.admission import check_fits, check_vocabulary, tokenize
from engine.frontend.context import FrontEnd
from engine.frontend.errors import ApiError, ProblemType
from engine.frontend.openai.bodies import ChatBody, CompletionBody, OpenAiBody
from engine.limits import Limits
from engine.messages import Generate

__all__ = ["answer_id", "chat_requests", "completion_requests"]

logger = logging.getLogger(__name__)


def answer_id(body: OpenAiBody, prefix: str) -> str:
    """The id of the answer: the client's own, or a new one."""
    rid = body.rid or f"{prefix}-{uuid.uuid4().hex}"
    if body.user is not None:
        logger.debug("request %s is of user %r", rid, body.user)
    return rid


async def completion_requests(body: CompletionBody, rid: str, front: FrontEnd) -> list[Generate]:
    """The requests of a completion: all choices of the first prompt, then those of the next. Raises ApiError."""
    require_model(body.model, front)
    prompts = [
        await tokenize(front.tokenizer, prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompts
    ]
    return _requests(body, rid, prompts, front.limits, param="prompt", top=body.logprobs)


async def chat_requests(body: ChatBody, rid: str, front: FrontEnd) -> list[Generate]:
    """The requests of a chat completion. Raises ApiError, also when the model has no chat template."""
    require_model(body.model, front)
    conversation = [{"role": message.role, "content": message.text} for message in body.messages]
    text = front.template.render(conversation, body.chat_template_kwargs)
    # The template says where special tokens stand; the tokenizer must not add its own.
    prompt = await tokenize(front.tokenizer, text, special=False)
    top = body.top_logprobs if body.logprobs else None
    return _requests(body, rid, [prompt], front.limits, param="messages", top=top)


def require_model(model: str | None, front: FrontEnd) -> None:
    """Raise ApiError (404) for the name of a model that is not served here."""
    if model is not None and model != front.model_name:
        raise ApiError(
            404,
            ProblemType.NOT_FOUND,
            f"model must be {front.model_name!r}, the one served here, got {model!r}; see /v1/models",
            param="model",
        )


def _requests(
    body: OpenAiBody, rid: str, prompts: list[tuple[int, ...]], limits: Limits, *, param: str, top: int | None
) -> list[Generate]:
    check_vocabulary(body.stop_token_ids, limits.vocab_size, "stop_token_ids")
    count = len(prompts) * body.n
    messages = []
    for index in range(count):
        prompt_ids = prompts[index // body.n]
        check_vocabulary(prompt_ids, limits.vocab_size, param)
        room = _room(len(prompt_ids), limits)
        sampling = body.sampling(body.max_new_tokens or max(1, room, body.min_tokens), index % body.n)
        check_fits(len(prompt_ids), sampling.max_new_tokens, limits, param)
        messages.append(
            Generate(
                rid=rid if count == 1 else f"{rid}-{index}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                priority=body.priority,
                return_logprob=top is not None,
                top_logprobs_num=top or 0,
            )
        )
    return messages


def _room(prompt_tokens: int, limits: Limits) -> int:
    """Most tokens of output that fit behind a prompt; the KV of the very last one is never written."""
    return min(limits.context_length, limits.total_pages * limits.page_size + 1) - prompt_tokens
