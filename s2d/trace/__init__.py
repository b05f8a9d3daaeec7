"""An answer as a page to walk through: ``record`` makes data of it, ``page`` writes the file."""
