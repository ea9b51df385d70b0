"""Talking to a model in the terminal: a conversation over the OpenAI protocol, and the terminal around it."""

from __future__ import annotations

from engine.chat.conversation import ChatError, Conversation, Turn
from engine.chat.terminal import Terminal

__all__ = ["ChatError", "Conversation", "Terminal", "Turn"]
