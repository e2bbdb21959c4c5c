"""Is this machine fit to run Headstart, what will be slow, and does a pair of models fit? ``doctor`` says."""
