"""The Messages protocol of Anthropic, as other words for a chat."""
