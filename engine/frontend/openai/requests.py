"""From a body of the OpenAI protocol to its order: the requests that it stands for, one for each choice.

Owns prompts, ids of choices and the room that is left for output. Sends nothing; refuses what can never fit.
"""

from __future__ import annotations

import logging
import uuid

from engine.frontend.admission import Admission, check_fits, check_vocabulary, tokenize
from engine.frontend.errors import ApiError, ProblemType
from engine.frontend.openai.bodies import ChatBody, CompletionBody, OpenAiBody
from engine.frontend.order import Order
from engine.frontend.protocol import parse_body
from engine.limits import Limits
from engine.messages import Generate

__all__ = ["chat_order", "completion_order", "require_model"]

logger = logging.getLogger(__name__)


def completion_order(data: bytes, admission: Admission) -> Order:
    """The order of a completion: all choices of the first prompt, then those of the next. Raises ApiError."""
    body = parse_body(CompletionBody, data)
    require_model(body.model, admission.model_name)
    prompts = [
        tokenize(admission, prompt, param="prompt") if isinstance(prompt, str) else tuple(prompt)
        for prompt in body.prompts
    ]
    return _order(body, "cmpl", prompts, admission.limits, param="prompt", top=body.logprobs)


def chat_order(data: bytes, admission: Admission) -> Order:
    """The order of a chat completion. Raises ApiError, also when the model has no chat template."""
    body = parse_body(ChatBody, data)
    require_model(body.model, admission.model_name)
    conversation = [{"role": message.role, "content": message.text} for message in body.messages]
    text = admission.template.render(conversation, body.chat_template_kwargs)
    # The template says where special tokens stand; the tokenizer must not add its own.
    prompt = tokenize(admission, text, param="messages", special=False)
    top = body.top_logprobs if body.logprobs else None
    return _order(body, "chatcmpl", [prompt], admission.limits, param="messages", top=top)


def require_model(model: str | None, served: str) -> None:
    """Raise ApiError (404) for the name of a model that is not served here."""
    if model is not None and model != served:
        raise ApiError(
            404,
            ProblemType.NOT_FOUND,
            f"model must be {served!r}, the one served here, got {model!r}; see /v1/models",
            param="model",
        )


def _order(
    body: OpenAiBody, prefix: str, prompts: list[tuple[int, ...]], limits: Limits, *, param: str, top: int | None
) -> Order:
    rid = _answer_id(body, prefix)
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
    return Order(
        rid=rid,
        messages=tuple(messages),
        stream=body.stream,
        n=body.n,
        logprobs=top is not None,
        include_usage=body.include_usage,
    )


def _room(prompt_tokens: int, limits: Limits) -> int:
    """Most tokens of output that fit behind a prompt; the KV of the very last one is never written."""
    return min(limits.context_length, limits.total_pages * limits.page_size + 1) - prompt_tokens


def _answer_id(body: OpenAiBody, prefix: str) -> str:
    """The id of the answer: the client's own, or a new one."""
    rid = body.rid or f"{prefix}-{uuid.uuid4().hex}"
    if body.user is not None:
        logger.debug("request %s is of user %r", rid, body.user)
    return rid
