"""Looking at an answer: every step of it as a page, or its text in colours on a terminal."""
