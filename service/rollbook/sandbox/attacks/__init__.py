"""Attacks that every backend is put to before it may run a program: what they try, and what of it was seen from outside.

Owns the attacks, the bait they look for, and the place where controls run. A program's own word only ever counts against the
backend. Never chooses a backend (``rollbook.sandbox.selection``) and never judges answers (``rollbook.tasks``).
"""
