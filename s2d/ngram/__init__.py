"""Exit 0: n-grams in the place of layers, of the text so far and of a datastore."""
