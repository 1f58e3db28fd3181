"""The loop over a schedule's actions, and the messages between stages.

Begin at `executor`. `p2p` moves tensors between stages; `nonfinite` finds the first NaN or Inf of a step.
"""
