"""The loop over a schedule's actions, and the messages between stages."""
