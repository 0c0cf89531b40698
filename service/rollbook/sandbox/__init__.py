"""Isolation of model-written code: backends behind one interface, chosen by what they contain and not by what is installed.

Owns processes, namespaces and limits. Never judges: an execution says how a program ended, and whose doing it was (P6).
"""
