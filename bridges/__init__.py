"""Adapters to what others run; each module names its host."""
