"""What scenarios share. Importing any of it imports neither torch nor pandas.

For judges `symptoms` (tries, shares, times) and `tries` (a whole verdict), for workers `rendezvous`, and for families of scenarios
`mismatch` (both sides) and `survivors` (the judge; the worker is that of `rank-killed`).
"""
