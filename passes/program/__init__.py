"""Facts of a captured graph; no decisions.

Begin at `program`: the captured graph, and the keys of its nodes' marks. `walks` and `source_lines` answer questions
about nodes, `known_values` and `weights` about what depends on no input; `builder` makes calls.
"""
