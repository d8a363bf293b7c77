"""Arguments that several verbs share."""
