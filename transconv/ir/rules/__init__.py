"""Well-formedness: rules of names, of nodes and of each level, and the verifier that applies them."""
