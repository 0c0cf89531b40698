"""What every drill shares: the run it disturbs, what it may kill, the independent verdict, the table and the report."""
