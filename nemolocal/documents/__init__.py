"""Documents: read whole, cut into pieces, found again, answered from and summarised.

Handed a `TextModel`; knows nothing of engines, servers and pages.
"""
