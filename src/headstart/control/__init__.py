"""How many tokens to draft now, and why not: learnt from ``Round`` records as they come."""
