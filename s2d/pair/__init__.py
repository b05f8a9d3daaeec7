"""A target and what drafts for it, as all programs find and load them."""
