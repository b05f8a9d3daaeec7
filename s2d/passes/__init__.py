"""How passes are made: for many prompts, by several processes, all of one size."""
