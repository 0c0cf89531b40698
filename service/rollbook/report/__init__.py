"""What a person reads about a run: progress, report, plots, evaluation. Reads the ledger, writes only its own files."""
