"""OpenAI's Responses API without stored responses, in terms of the chat requests that the server knows."""
