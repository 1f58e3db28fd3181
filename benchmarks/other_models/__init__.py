"""Models from other packages and papers, through `meshwright verify`: `python -m benchmarks.other_models [NAME…]`.

A file a package (or a subject, if the model is rewritten after its paper) holds functions that build a model with
its loss; `catalogue` lists them with their inputs and layouts; `worker` verifies one; `table` prints the results.
"""
