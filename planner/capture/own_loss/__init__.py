"""Loss functions of the user's: over the outputs of a model, or over several models, as one module."""
