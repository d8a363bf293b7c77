"""The checks of ``doctor``, a file for each subject."""
