"""Exit 0: n-grams in the place of layers (``table``), of the text so far and of a ``datastore``;
``costs`` says how many nodes of a tree are worth sending."""
