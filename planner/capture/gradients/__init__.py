"""What a forward says about gradients in Python: kept, or refused with its line."""
