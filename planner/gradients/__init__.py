"""What changes gradients outside of the ops of a forward: kept, or refused with the user's line."""
