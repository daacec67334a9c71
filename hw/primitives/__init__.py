"""The vendor blocks that inference gets wrong: multiplier and memory. Each has a plain twin for simulation."""
