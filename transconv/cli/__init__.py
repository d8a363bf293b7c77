"""The command line, one file per verb; ``transconv/__main__.py`` puts them together."""
