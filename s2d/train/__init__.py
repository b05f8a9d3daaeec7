"""Training: sorted drafts (``nested``), the miniatures (``family``), decision models (``decision``)
and datastores (``data``); ``fit`` is the loop."""
