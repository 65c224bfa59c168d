"""The same load on vLLM's CPU build, on the same weights and cores: `make bench-peer`."""
