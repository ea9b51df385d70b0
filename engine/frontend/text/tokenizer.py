"""The checkpoint's tokenizer and its chat template, which turns messages into the prompt format of the model's
training.

Loads them, and owns the error for messages that a template refuses. Never invents a template: a model without one has
no chat. Stateless.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.frontend.schema.errors import ApiError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A method name of Python that the library's errors mention.
_OWN_METHOD = re.compile(r"(?:[\w<>]+\.)+\w+\(\)")
_DOCUMENTS = re.compile(r"\bdocuments\b")
_TOOLS = re.compile(r"\btools\b")


class TemplateSource(Protocol):
    """The part of a transformers tokenizer that chat templates need."""

    chat_template: str | dict[str, str] | None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Render the prompt of a conversation."""


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template, if it has one."""

    def __init__(self, source: TemplateSource) -> None:
        self._source = source

    @property
    def text(self) -> str:
        """The template's text, or all templates joined if there are several; empty without one."""
        template = self._source.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def knows_tools(self) -> bool:
        return _TOOLS.search(self.text) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        ask: bool = True,
        continue_last: bool = False,
        documents: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt of a conversation; with ``ask`` it ends at the beginning of the assistant's next message.

        With ``continue_last`` it ends within the last message, which the output continues. Raises ApiError (400) if the
        model has no template or the template refuses the conversation.
        """
        if self._source.chat_template is None:
            raise ApiError.invalid(
                "chat needs a chat template, but this model's tokenizer has none; use /v1/completions", param="messages"
            )
        offered: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        if documents:
            if _DOCUMENTS.search(self.text) is None:
                raise ApiError.at(
                    "documents",
                    "need a chat template that shows them to the model, but this model's does not, got "
                    f"{len(documents)}; put them into a message",
                )
            offered["documents"] = [dict(document) for document in documents]
        if continue_last:
            offered["continue_final_message"] = True
        options = {"tokenize": False, "add_generation_prompt": ask, **offered, **variables}
        try:
            return self._apply([dict(message) for message in messages], options)
        except _refusals() as exc:
            why = _OWN_METHOD.sub("it", str(exc))
            raise ApiError.invalid(
                f"the model's chat template must accept the messages, but: {why}; change roles or order",
                param="messages",
            ) from exc
        except RecursionError as exc:
            raise ApiError.invalid(
                "the model's chat template must accept the messages, but they or the tools are nested too deeply for "
                "it; nest objects less",
                param="messages",
            ) from exc

    def _apply(self, conversation: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        """Render with call arguments as objects, or as text for a template that inserts them verbatim."""
        try:
            return str(self._source.apply_chat_template(conversation, **options))
        except TypeError:
            written = [_with_written_arguments(message) for message in conversation]
            if written == conversation:
                raise
            return str(self._source.apply_chat_template(written, **options))


def _with_written_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": _written(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _written(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def load_tokenizer(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    """Return the fast tokenizer of the configured model and its chat template.

    Raises CheckpointError if the folder has no working tokenizer.
    """
    # Takes seconds to import, which the supervisor did before the fork.
    from transformers import AutoTokenizer

    from engine.model.checkpoint import require_trust, resolve_folder

    folder = resolve_folder(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as exc:  # tokenizers raises plain Exceptions, and transformers many unrelated types
        require_trust(folder, exc, trust_remote_code=config.trust_remote_code)
        raise CheckpointError(f"{folder} must hold a tokenizer that transformers can load, but: {exc}") from exc
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(
            f"{folder} must hold a fast tokenizer, got a {type(tokenizer).__name__}; convert it to tokenizer.json"
        )
    return backend, ChatTemplate(tokenizer)


def _refusals() -> tuple[type[Exception], ...]:
    """Return the errors that templates raise, deliberately or for a value of an unexpected type."""
    from jinja2.exceptions import TemplateError

    return TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError
