"""The guessers, one family a file; ``base`` holds the contract."""
