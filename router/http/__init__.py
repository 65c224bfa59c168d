"""The HTTP door: completions, chat, models, health and metrics, as OpenAI's clients expect them, over the route of gRPC."""
