"""Readers: raw artifacts in, typed frames out. The only code that parses artifacts."""
