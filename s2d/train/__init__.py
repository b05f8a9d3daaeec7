"""Training: sorted drafts (``nested``), the miniatures (``family``), decision models (``decision``)
and datastores (``text``); ``fit`` is the loop."""
