"""Calls of quantised convolutions: arguments, checks, routes, gradients."""
