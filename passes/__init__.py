"""The captured program, the rules of its ops, and every rewrite. It knows no spec, cluster or schedule.

Begin at `lower`: it lists the passes in their order. `base` is the interface of a pass, and of what passes make,
`lowering` all that they read. `ops/` holds what rewritten graphs call, `rules/` and `types/` what all decisions rest
on.
"""
