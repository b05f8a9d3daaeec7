"""The experiments of two papers on the miniatures: what is compared (``experiments``), the drafts
for it (``drafts``), how it is measured (``lab``) and what is printed (``report``)."""
