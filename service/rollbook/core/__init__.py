"""Rules without I/O, clock or unpassed randomness; standard library only."""
