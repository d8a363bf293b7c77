"""Models in place: convolutions swapped, folded, exported, with weights packed once."""
