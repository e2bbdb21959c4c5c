"""The workshop's benches: tools that measure, shape and check models. Only the doors call them."""
