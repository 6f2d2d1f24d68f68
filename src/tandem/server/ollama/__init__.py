"""Ollama's API, translated to chat, completion and embedding requests."""
