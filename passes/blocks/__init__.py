"""Repeated layers, found by structure alone.

Begin at `blocks`. `periods` and `structure` propose groups, `structure` also says which are equal, and `live_sets`
follows values across the cuts between stages.
"""
