"""The captured program, the rules of its ops, and every rewrite. It knows no spec, cluster or schedule."""
