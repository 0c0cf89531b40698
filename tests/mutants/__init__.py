"""Known public bugs as defects of this service, and the table that says which test catches which."""
