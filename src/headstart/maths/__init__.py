"""Floor 1: pure functions on tensors.

Knows: distributions, noise, trees, the verification rules and what a round costs.
Does not know: models, tokenizers, files, requests or who drafted. Nothing here reads a clock or keeps state.
"""
