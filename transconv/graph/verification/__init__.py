"""First results of a graph beside torch's operators, and reports of wrong ones."""
