"""The OpenAI protocol: completions, chat completions and models, in the form that clients expect."""
