"""Is a decoder lossless? The exact law of any program that draws at random, and of rules."""
