"""Ways for bytes to travel beneath torch's own interfaces: `mpi`, `secure` and `serialise`, each a part with its own probe."""
