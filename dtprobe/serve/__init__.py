"""The pages of `dtprobe.site` live: a night in progress, filters, two runs side by side. Reads only.

On loopback it needs no token; at any other address it does not start without one.
"""

from dtprobe.serve.server import Address, listen, run

__all__ = ["Address", "listen", "run"]
