"""The text of a computation: its format, its parser, and the page that describes it."""
