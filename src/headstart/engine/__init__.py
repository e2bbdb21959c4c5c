"""The engine: requests become rounds, rounds become tokens. Start reading at ``round``."""
