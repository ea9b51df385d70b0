"""The OpenAI protocol: completions, chat completions and models, in the shapes that the field's clients expect."""
