"""Answers to look at: ``record`` makes data of one, ``page`` a page of that; ``race`` draws two."""
