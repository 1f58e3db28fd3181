"""One YAML file becomes one frozen Spec.

Begin at `spec`; `sections`, `inputs`, `optimizer` and `cluster` are its parts, `fields` their checks, `conflicts` the
keys that exclude each other, `messages` the errors.
"""
