"""What scenarios share: for judges `symptoms` (tries, shares, times) and `tries` (a whole verdict), for workers `rendezvous`, for both
sides of a family of scenarios `mismatch`. Importing any of them imports neither torch nor pandas.
"""
