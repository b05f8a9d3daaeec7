"""What plugs into the front: many prompts at once (``batch``), a datastore for exit 0
(``datastore``), decision models (``decision``), roots from the target (``target_roots``), several
processes (``tensor_parallel``)."""
