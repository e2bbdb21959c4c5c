"""The workshop where drafts are made: data from the target itself, a shape, training, proof."""
