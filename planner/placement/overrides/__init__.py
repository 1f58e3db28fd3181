"""What a spec asks for by hand: which blocks, which styles."""
