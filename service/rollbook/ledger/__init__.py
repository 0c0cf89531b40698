"""The truth, in SQL: tables, verbs, audit. Imports core and observe only; the only layer that imports sqlalchemy."""
