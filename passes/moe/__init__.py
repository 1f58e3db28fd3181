"""MoE layers behind a router, found by the meaning of their ops: nothing here reads a name."""
