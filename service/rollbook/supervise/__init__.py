"""Starts, watches and restarts the roles. Never touches the ledger's tables: it reads status over RPC like anybody."""
