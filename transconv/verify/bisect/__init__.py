"""Bisection: the first stage that makes a kernel wrong."""
