"""Two ideas of improved multi-candidate speculative decoding (arXiv 2409.10644)."""
