"""Model, KV pages and their allocator, sampler, sequence, runner."""
