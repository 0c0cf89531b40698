"""The worker side: lease, generate, verify, spool, submit; engines behind one port. Reaches the ledger by RPC only."""
