"""Ways to draft or to run that a first reader skips. Each plugs into a seam of the front."""
