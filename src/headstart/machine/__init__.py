"""Floor 2: run a model fast. Loading, the KV slab, runners and text; nothing here knows why tokens are drafted."""
