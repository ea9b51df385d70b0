"""Token ids to text: the tokenizer, stop strings, reasoning, tool calls."""
