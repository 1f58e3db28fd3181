"""Settings about gradients that a forward makes in Python: kept, or refused at the source line."""
