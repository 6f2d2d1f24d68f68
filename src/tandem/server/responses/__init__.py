"""OpenAI's Responses API, translated to chat requests."""
