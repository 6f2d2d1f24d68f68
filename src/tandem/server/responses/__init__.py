"""OpenAI's Responses API, in terms of the chat requests that the server knows."""
