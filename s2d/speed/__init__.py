"""Faster passes on a CPU, many prompts in a pass, and one target in several processes."""
