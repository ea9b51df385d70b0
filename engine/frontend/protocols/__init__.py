"""OpenAI's and Anthropic's protocols, translated to and from the native one."""
