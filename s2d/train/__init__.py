"""Training: sorted drafts (``nested``), the miniatures (``family``), decision models (``decision``)
and datastores (``self_text``); ``fit`` is the loop."""
