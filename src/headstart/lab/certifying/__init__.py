"""A certificate of losslessness for one pair of models on one machine; ``certify`` makes it."""
