"""Nights in every combination of Python, torch, world size and launcher; what changes between them, and in which version.

`cells` is what is asked for, `venvs` builds (with `interpreters` and `installers`), `run` runs the cells, `compare` finds and dates the
changes, `bisect` halves the versions between two, `pages` shows it.
"""
