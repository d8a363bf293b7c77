"""Certificates of invariant mode: that the bits of a sample's result do not depend on the batch."""
