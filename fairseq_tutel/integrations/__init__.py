"""Integrations with libraries that train with this package's layer, one folder each."""
