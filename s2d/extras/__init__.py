"""Ways to draft or to run that a first reader skips; each plugs into a seam of the front."""
