"""The loop over a schedule's actions, and the messages between stages.

Begin at `executor`. `p2p` moves tensors between stages; `nonfinite` and `find_nonfinite` look for the first NaN.
"""
