"""Other libraries that train with this package's layer, one folder each."""
