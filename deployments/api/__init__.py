"""The HTTP side of the Router: an OpenAI-compatible API in front of any engine. No Ray."""
