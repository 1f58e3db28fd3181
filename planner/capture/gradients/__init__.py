"""Settings about gradients that a forward makes in Python, and Functions with their own backward: kept, or refused.

`parameters` is about writes and hooks of parameters, `custom_functions`, `applications` and `trials` about a user's
own backwards, `regions` about regions of another dtype and regions without gradients.
"""
